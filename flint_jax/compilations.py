"""Counts what XLA compiles in this process, so that a server can show that nothing compiles after it is ready."""

from __future__ import annotations

import functools
import threading

_EVENT = "/jax/core/compile/backend_compile_duration"  # one for each program, also when it is read from the disk cache


class Compilations:
    """Compilations by function, from the moment of ``watch`` on. Thread-safe; holds no jax object."""

    def __init__(self):
        self._lock = threading.Lock()
        self._functions: dict[str, list[float]] = {}  # name -> [count, seconds]
        self._ready = 0.0

    def add(self, function: str, seconds: float) -> None:
        """One more."""
        with self._lock:
            entry = self._functions.setdefault(function, [0, 0.0])
            entry[0] += 1
            entry[1] += seconds

    def mark_ready(self) -> None:
        """From now on a compilation is one too many: ``after_ready`` counts it."""
        with self._lock:
            self._ready = self._total()

    def snapshot(self) -> dict[str, tuple[int, float]]:
        """Function -> (compilations, seconds they took)."""
        with self._lock:
            return {name: (int(count), seconds) for name, (count, seconds) in self._functions.items()}

    @property
    def after_ready(self) -> int:
        """Compilations since ``mark_ready``."""
        with self._lock:
            return int(self._total() - self._ready)

    def _total(self) -> float:
        return sum(count for count, _ in self._functions.values())


@functools.cache
def watch() -> Compilations:
    """The count of this process. jax keeps its listeners for good, so there is one."""
    import jax.monitoring

    counted = Compilations()

    def listen(event: str, seconds: float, **facts: str | int) -> None:
        if event == _EVENT:
            counted.add(str(facts.get("fun_name", "?")), seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counted
