"""How long a prefill step takes, and how much of it fits between two decode steps. Pure arithmetic, no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from flint_jax.plan import Request

# Weights of a measurement that was slower than thought, and of a quicker one: a stream that waits is the worse mistake.
SLOWER, QUICKER = 0.5, 0.2
HICCUP = 10  # times as slow as thought is the most that is believed


@dataclasses.dataclass
class PrefillCost:
    """ms = factor * (fixed + token * T + pair * T * S) for T tokens of a piece that begins at position S.

    The constants are those of an H200 at full size; ``factor`` is learnt from the steps that were measured, so another
    device or model is met after the first few. packed: the fixed part is paid once a step, else once a piece.
    """

    fixed_ms: float = 8.0
    token_ms: float = 0.012
    pair_ms: float = 4.5e-7
    packed: bool = True
    factor: float = 1.0
    measured: int = 0

    def ms(self, pieces: Iterable[tuple[int, int]]) -> float:
        """Milliseconds that a step of (start, count) pieces takes."""
        return self.factor * self._prior(tuple(pieces))

    def per_token(self, start: int) -> float:
        """Milliseconds of one token of a piece that begins at ``start``, before the factor."""
        return self.token_ms + self.pair_ms * start

    def learn(self, pieces: Iterable[tuple[int, int]], measured_ms: float) -> None:
        """Take a measured step into account."""
        ratio = max(measured_ms / self._prior(tuple(pieces)), 1e-3)
        self.measured += 1
        if self.measured == 1:
            self.factor = ratio
            return
        ratio = min(ratio, HICCUP * self.factor)
        self.factor += (SLOWER if ratio > self.factor else QUICKER) * (ratio - self.factor)

    def _prior(self, pieces: tuple[tuple[int, int], ...]) -> float:
        fixed = self.fixed_ms * (1 if self.packed else len(pieces))
        return fixed + sum(count * self.per_token(start) for start, count in pieces)


class Allowance:
    """What one prefill step may hold: ``tokens``, ``rows`` pieces, and ``ms`` milliseconds (None for any number).

    A piece that does not end where its request has to pause is a multiple of ``grain`` tokens. ``counts`` is what was
    given out, tokens of each request. tile: each piece takes a multiple of so many places.
    """

    def __init__(self, cost: PrefillCost, tokens: int, rows: int, grain: int, ms: float | None = None, tile: int = 1):
        self.cost, self.rows, self.grain, self.tile = cost, rows, grain, tile
        self.tokens = self._all_tokens = tokens
        # In the units of the constants, after the fixed part that the first piece pays.
        self.ms = self._all_ms = None if ms is None else ms / cost.factor - cost.fixed_ms
        self.counts: dict[Request, int] = {}

    def divisible(self, oldest: Request) -> bool:
        """Whether half of it is worth having: two rows, and a grain of either's tokens."""
        if self.rows < 2 or self.tokens // 2 < self.grain:
            return False
        return self.ms is None or self.ms / 2 >= self.grain * self.cost.per_token(oldest.prefilled)

    def give(self, request: Request, *, kept: float = 0.0) -> None:
        """Give the request all that it can use, but for the part ``kept`` (of all there was) and then one row."""
        room, have = request.pause - request.prefilled, self.counts.get(request, 0)
        if have == room or (not have and len(self.counts) >= self.rows - (kept > 0)):
            return
        more, fixed = self.tokens - int(kept * self._all_tokens), 0.0
        if self.ms is not None:
            fixed = self.cost.fixed_ms if self.counts and not have and not self.cost.packed else 0.0
            left = self.ms - kept * self._all_ms - fixed
            more = min(more, int(left / self.cost.per_token(request.prefilled)))
        total = min(room, have + more)
        if total < room:
            total -= total % self.grain
        if total > have:
            self._take(request, have, total, fixed)

    def give_least(self, request: Request) -> None:
        """Give the request one grain, whatever the time it takes: a prompt that nothing is left for still ends."""
        self._take(request, 0, min(request.pause - request.prefilled, self.grain, self.tokens), 0.0)

    def _take(self, request: Request, have: int, total: int, fixed: float) -> None:
        self.counts[request] = total
        self.tokens = max(self.tokens - (-(-total // self.tile) + -have // self.tile) * self.tile, 0)
        if self.ms is not None:
            self.ms -= fixed + (total - have) * self.cost.per_token(request.prefilled)
