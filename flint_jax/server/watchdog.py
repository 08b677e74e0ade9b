"""Notices an engine that has work and does nothing: a step that never comes back raises no error."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("flint_jax.server")

# Counters of the engine that only its own thread moves: whatever it does moves one of them.
_MOVES = ("prefilled_tokens", "generated_tokens", "prompt_tokens", "free_slots", "running", "preemptions")


class Watchdog:
    """Whether the engine stands still. limit_s: seconds without a move after which it does; 0 never."""

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._seen: tuple | None = None
        self._since = 0.0
        self.stalled_s = 0.0  # how long it has stood still by now, 0 while it has not for too long

    def look(self, stats: dict[str, Any], now: float) -> None:
        """Compare ``engine.stats()`` with the last look. now: seconds of time.monotonic."""
        seen = tuple(stats.get(key, 0) for key in _MOVES)
        idle = not (stats.get("running", 0) or stats.get("waiting", 0))
        if idle or seen != self._seen:
            self._seen, self._since = None if idle else seen, now
            if self.stalled_s:
                log.warning("the engine moves again, after %.0f s", self.stalled_s)
                self.stalled_s = 0.0
            return
        quiet = now - self._since
        if not self._limit_s or quiet < self._limit_s:
            return
        if not self.stalled_s:
            log.error(
                "the engine has done nothing for %.0f s: %d requests run and %d wait; /health answers 503 until it "
                "moves. Restart the process if it does not (--stall-timeout)",
                quiet,
                stats.get("running", 0),
                stats.get("waiting", 0),
            )
        self.stalled_s = quiet
