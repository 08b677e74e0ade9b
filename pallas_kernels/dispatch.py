"""One rule that picks an implementation of an op, at trace time.

An op offers implementations by name, fastest first, and always a ``reference`` in plain jnp. On a GPU the first one
that does not raise ``KernelUnsupported`` runs; elsewhere the reference does. The choice depends on the device and on
static shapes only, never on values.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator, Mapping

from pallas_kernels import device

logger = logging.getLogger(__name__)

REFERENCE = "reference"
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("forced_kernels", default=None)
_said: set[tuple[str, str, str]] = set()


class KernelUnsupported(Exception):
    """This implementation does not take this shape, dtype or device; another one does."""


@contextlib.contextmanager
def force(choice: str | None) -> Iterator[None]:
    """Within the block: "reference" for plain jnp everywhere, "kernels" to let an unsupported kernel raise,
    None for the usual rule."""
    if choice not in (None, REFERENCE, "kernels"):
        raise ValueError(f"force({choice!r}): expected 'reference', 'kernels' or None")
    token = _forced.set(choice)
    try:
        yield
    finally:
        _forced.reset(token)


def run(op: str, implementations: Mapping[str, Callable], *args, **kwargs):
    """Call the first implementation that takes the arguments. ``implementations`` ends with the reference."""
    forced = _forced.get()
    kernels = [name for name in implementations if name != REFERENCE]
    if forced != REFERENCE and (forced == "kernels" or device.current().kernels):
        for name in kernels:
            try:
                return implementations[name](*args, **kwargs)
            except KernelUnsupported as reason:
                if forced == "kernels" and name == kernels[-1]:
                    raise
                _say(op, name, str(reason))
    return implementations[REFERENCE](*args, **kwargs)


def _say(op: str, name: str, reason: str) -> None:
    if (op, name, reason) not in _said:
        _said.add((op, name, reason))
        logger.info("%s: the %s kernel does not take this (%s); using the next implementation", op, name, reason)
