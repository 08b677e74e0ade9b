"""Where the seconds of a start go: every second from the start of the process to ready belongs to one phase."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


class Phases:
    """Phases one after the other; what runs beside them is told, not added.

    age: seconds that the process had lived when this was made; default: the process' own age.
    """

    def __init__(self, age: float | None = None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._start = self._last = clock() - (process_age() if age is None else age)
        self._phases: list[tuple[str, float, str]] = []

    def done(self, name: str, detail: str = "") -> None:
        """The phase ``name`` ends now; it began where the one before ended. detail: more about it, for people."""
        now = self._clock()
        self._phases.append((name, now - self._last, detail))
        self._last = now

    @property
    def seconds(self) -> dict[str, float]:
        """Phase -> seconds. The sum is ``total``."""
        return {name: seconds for name, seconds, _ in self._phases}

    @property
    def total(self) -> float:
        """Seconds from the start of the process to the end of the last phase."""
        return self._last - self._start

    def __str__(self) -> str:
        parts = [f"{name} {seconds:.1f} s{f' ({more})' if more else ''}" for name, seconds, more in self._phases]
        return f"ready after {self.total:.1f} s: {', '.join(parts)}"


def process_age() -> float:
    """Seconds since this process was started; 0 where the system does not say (only Linux does)."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
