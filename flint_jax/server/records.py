"""When a request came, spoke and ended: what histograms and request logs are made of."""

from __future__ import annotations

import contextvars
import dataclasses
from bisect import bisect_left
from collections.abc import Sequence

STOP, LENGTH, TOOL_CALLS, ABORT, ERROR = "stop", "length", "tool_calls", "abort", "error"
REASONS = (STOP, LENGTH, TOOL_CALLS, ABORT, ERROR)


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """An HTTP request as it came in. at: ``time.monotonic``."""

    request_id: str = ""
    route: str = ""
    at: float = 0.0


# set by the outermost layer for everything that one HTTP request runs
arrival: contextvars.ContextVar[Arrival] = contextvars.ContextVar("arrival")


@dataclasses.dataclass(slots=True)
class Record:
    """One engine request. Times are ``time.monotonic``; admitted, first, last: 0.0 for not yet.

    reason: one of REASONS, "" while it runs. corrupted: the engine could not draw a token (NaN).
    """

    arrived: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0
    reason: str = ""
    corrupted: bool = False


class Histogram:
    """Counts by bucket; belongs to one thread. bounds: rising upper bounds, the last bucket is open."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add ``value``, ``times`` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, how many are at most that), as Prometheus writes them."""
        so_far, rows = 0, []
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            so_far += count
            rows.append((str(bound), so_far))
        return rows


def decades(first: float, last: float) -> tuple[float, ...]:
    """1, 2, 5, 10 ... times ``first``, up to ``last``."""
    bounds, n = [], 0
    while not bounds or bounds[-1] < last * 0.999:
        power, digit = divmod(n, 3)
        bounds.append(float(f"{first * (1, 2, 5)[digit] * 10**power:.6g}"))
        n += 1
    return tuple(bounds)


class Timings:
    """The histograms of all requests. Written on the event loop only: no lock."""

    def __init__(self):
        self.first_token = Histogram(decades(1e-3, 1000))
        self.inter_token = Histogram(decades(1e-4, 10))
        self.end_to_end = Histogram(decades(1e-2, 5000))
        self.queue = Histogram(decades(1e-4, 1000))
        self.prefill = Histogram(decades(1e-3, 1000))
        self.decode = Histogram(decades(1e-2, 5000))
        self.prompt_tokens = Histogram(decades(1, 500_000))
        self.generation_tokens = Histogram(decades(1, 500_000))
        self.ended = dict.fromkeys(REASONS, 0)
        self.corrupted = 0
        self.rejected = 0
        self.unknown_fields = 0

    def spoke(self, record: Record, tokens: int, at: float) -> None:
        """The engine said ``tokens`` more tokens at time ``at``."""
        if record.first:
            self.inter_token.observe((at - record.last) / tokens, tokens)
        else:
            record.first = at
            self.first_token.observe(at - record.arrived)
            if tokens > 1:
                self.inter_token.observe(0.0, tokens - 1)
        record.last = at
        record.tokens += tokens

    def end(self, record: Record, at: float) -> None:
        """The request is over."""
        self.ended[record.reason or ABORT] += 1
        self.corrupted += record.corrupted
        self.prompt_tokens.observe(record.prompt_tokens)
        self.generation_tokens.observe(record.tokens)
        if record.reason in (STOP, LENGTH, TOOL_CALLS):
            self.end_to_end.observe(at - record.arrived)
        if record.admitted:
            self.queue.observe(max(0.0, record.admitted - record.arrived))
        if record.first:
            self.prefill.observe(max(0.0, record.first - (record.admitted or record.arrived)))
            self.decode.observe(record.last - record.first)


# of the application that answers the current request
timings: contextvars.ContextVar[Timings] = contextvars.ContextVar("timings")
