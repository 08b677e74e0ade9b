"""Named places of the forward pass where research may look or change something.

``site`` is the identity unless a recorder is active while a program is traced. What a recorder does not ask for leaves
no trace in the program; without a recorder the program is the one that serves.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

Recorder = Callable[[str, Any], Any]
_active: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("recorder", default=None)


def site(module: Any, name: str, value: Any) -> Any:
    """Show ``value`` to the recorder as ``module.path + name``; go on with what it gives back (by default, itself)."""
    recorder = _active.get()
    return value if recorder is None else recorder(module.path + name, value)


@contextlib.contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Make ``recorder(name, value)`` see every site that is passed, in this thread, until the end of the block."""
    token = _active.set(recorder)
    try:
        yield
    finally:
        _active.reset(token)
