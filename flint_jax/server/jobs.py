"""The bridge between the engine's thread and one HTTP request.

A job submits engine requests and collects their events. Everything that can wake it arrives in one inbox: events, the
client hanging up, silence, shutdown, a dead engine. So the reader waits in one place, which costs about 10 µs a token.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from flint_jax.server.errors import ApiError, ClientGone
from flint_jax.server.records import ABORT, ERROR, Arrival, Record, Timings, arrival

log = logging.getLogger("flint_jax.server")
_serial = itertools.count()


class EngineError(Exception):
    """The engine could not finish a request, for instance because its logits were NaN."""


class Job:
    """Engine requests 0..choices-1 of one HTTP request. Make it on the event loop; close it when done.

    tick_s: ``events`` returns an empty list after this many seconds without any event; 0 means never.
    timings: where its times go. arrival, records: the HTTP request, and one record an engine request.
    """

    def __init__(
        self,
        engine: Any,
        choices: int,
        *,
        tick_s: float,
        timings: Timings | None = None,
        on_close: Callable[[Job], None] = lambda job: None,
    ):
        self._engine, self._tick_s, self._on_close = engine, tick_s, on_close
        self._choices = choices
        self._timings = timings or Timings()
        self.arrival = arrival.get(None) or Arrival(at=monotonic())
        self.records: list[Record] = []
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[tuple[int, Any, float]] = deque()
        self._wake = asyncio.Event()
        self._wake_sent = False
        self._error: BaseException | None = None
        self._ids: list[str] = []
        self._open: dict[int, str] = {}  # index -> engine request id
        self._timer: asyncio.TimerHandle | None = None
        self._silent = False
        self._watcher: asyncio.Task | None = None
        self.closed = False

    def __len__(self) -> int:
        return self._choices

    # -- towards the engine ----------------------------------------------------------------------------------------

    def submit(self, prompt_ids: Sequence[int], params: Any, name: str, **extras: Any) -> int:
        """Start one engine request; returns its index. Raises RequestError.

        extras: further arguments of the engine's submit (``constraint`` ...); those that are None are left out.
        """
        index = len(self._ids)
        request_id = f"{name}-{index}-{next(_serial)}"
        self._ids.append(request_id)
        self._open[index] = request_id
        record = Record(self.arrival.at, len(prompt_ids))
        try:
            self._engine.submit(
                prompt_ids,
                params,
                request_id=request_id,
                on_event=lambda event: self._put(index, event),
                **{name: value for name, value in extras.items() if value is not None},
            )
        except BaseException:
            del self._open[index]
            raise
        self.records.append(record)
        return index

    def ended(self, index: int, reason: str) -> None:
        """Say for the statistics how a choice ended, where the engine's own word for it is too coarse."""
        self.records[index].reason = reason

    def abort(self, index: int) -> None:
        """Stop one engine request whose output is no longer wanted; what it still says is dropped."""
        request_id = self._open.pop(index, None)
        if request_id is not None:
            self._engine.abort(request_id)

    def close(self) -> None:
        """Abort what still runs and free the job. May be called twice."""
        if self.closed:
            return
        self.closed = True
        for index in list(self._open):
            self.abort(index)
        if self._timer:
            self._timer.cancel()
        if self._watcher:
            self._watcher.cancel()
        now = monotonic()
        for record in self.records:
            self._timings.end(record, now)
        self._on_close(self)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # -- from the engine, the client, the server -------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End the job with ``error``, which ``events`` raises. Event loop only."""
        if self._error is None:
            self._error = error
            self._wake.set()

    def watch_client(self, receive: Callable) -> None:
        """Fail the job with ClientGone as soon as the client hangs up, whatever the engine is doing."""

        async def watch():
            while (await receive())["type"] != "http.disconnect":
                pass
            self.fail(ClientGone())

        self._watcher = self._loop.create_task(watch())

    async def events(self) -> list[tuple[int, Any]]:
        """The next events as (index, event), in order; [] means silence. All that has arrived comes at once, so a slow
        reader gets fewer and longer pieces.

        Raises EngineError for a request that the engine failed, ClientGone when the client hung up, ApiError when the
        server ends the job.
        """
        if self._tick_s and self._timer is None:
            self._start_timer()
        batch: list[tuple[int, Any]] = []
        while not batch:
            self._wake.clear()
            self._wake_sent = False  # from here on a new event wakes us again
            if self._error is not None:
                raise self._error
            if self._inbox:
                batch = self._drain()
            elif self._silent:
                self._silent = False
                self._start_timer()
                return []
            else:
                await self._wake.wait()
        return batch

    def _drain(self) -> list[tuple[int, Any]]:
        if self._tick_s:
            self._last_event = self._loop.time()
        batch = []
        while self._inbox:
            index, event, at = self._inbox.popleft()
            if index not in self._open:
                continue  # aborted by us
            record = self.records[index]
            tokens = len(event.token_ids)
            if tokens:
                self._timings.spoke(record, tokens, at)
            if event.finish_reason is not None:
                self._end(index, record, event)
            batch.append((index, event))
        return batch

    def _end(self, index: int, record: Record, event: Any) -> None:
        record.cached_tokens = event.cached_tokens
        record.admitted = event.admitted_at or 0.0
        record.reason = event.finish_reason
        if event.finish_reason == ERROR:
            record.corrupted = getattr(self._engine, "failed", None) is None and not event.refused
        if event.finish_reason in (ERROR, ABORT):
            raise _unwanted_end(event)
        del self._open[index]

    def _put(self, index: int, event: Any) -> None:
        """Any thread. The loop is woken once for however many events arrive before it runs."""
        self._inbox.append((index, event, monotonic()))
        if not self._wake_sent:
            self._wake_sent = True
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:
                log.debug("event for a closed loop dropped")

    def _start_timer(self) -> None:
        self._last_event = self._loop.time()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        """One timer for the whole job: it looks how long ago the last event was, instead of a timer for each event."""
        quiet = self._loop.time() - self._last_event
        if quiet < self._tick_s * 0.99:
            self._timer = self._loop.call_later(self._tick_s - quiet, self._tick)
            return
        self._silent = True
        self._wake.set()


def _unwanted_end(event: Any) -> Exception:
    if event.finish_reason == "abort":
        return ApiError(503, "the request was stopped by the server", code="aborted")
    if event.refused:
        return ApiError(
            400, f"the output could not be held to its grammar any longer: {event.error}", code="grammar_limit"
        )
    return EngineError(f"{event.request_id}: {event.error or 'unknown error'}")
