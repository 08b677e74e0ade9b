"""One log line an interval while there is work: what runs, what waits, how fast, how full."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from flint_jax.server.metrics import cache_usage
from flint_jax.server.state import ServerState

log = logging.getLogger("flint_jax.server")


class IntervalLog:
    """Writes a line every ``settings.log_stats_s`` seconds; none while idle."""

    def __init__(self, state: ServerState):
        self._state = state
        self._last: dict[str, Any] = {}
        self._at = time.monotonic()

    async def run(self) -> None:
        """Forever."""
        seconds = self._state.settings.log_stats_s
        while seconds:
            await asyncio.sleep(seconds)
            line = self.line(time.monotonic())
            if line:
                log.info(line)

    def line(self, now: float) -> str:
        """What to say of the time since the last call; "" when nothing ran."""
        if self._state.served is None:
            return ""
        stats = self._state.served.engine.stats()
        last, seconds = self._last, max(now - self._at, 1e-9)
        self._last, self._at = stats, now

        def since(key: str) -> float:
            return stats.get(key, 0) - last.get(key, 0)

        running, waiting = stats.get("running", 0), stats.get("waiting", 0)
        # What was computed, as it was computed: a long prompt that is being read is no standstill.
        prompt = since("prefilled_tokens" if "prefilled_tokens" in stats else "prompt_tokens")
        drawn, queries = since("generated_tokens"), since("prefix_queries")
        if not (running or waiting or prompt or drawn):
            return ""
        hits = f"{100 * since('prefix_hits') / queries:.1f} %" if queries else "-"
        return (
            f"running {running}, waiting {waiting}, KV cache {100 * cache_usage(stats):.1f} %, "
            f"prompt {prompt / seconds:.1f} tok/s, generation {drawn / seconds:.1f} tok/s, prefix cache hits {hits}"
        )
