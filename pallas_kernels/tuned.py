"""Measured kernel configurations: which number of warps, splits or stages the present device wants.

A kernel's rule proposes a configuration from shapes and the device's core count; ``tuned/<device>.json``, written by
``python -m pallas_kernels.tune``, overrides it where something else was measured to be faster. What a caller asks for
explicitly goes before both. Read at trace time only.

Without a file of its own a Hopper or Blackwell part with at least as many cores as the H200 takes the H200's entries
(untested there: the grid that fitted the H200 fits, but nobody timed it); any other part goes by the rules.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from pallas_kernels import device

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).with_name("tuned")
MODEL = device.Device("NVIDIA H200", (9, 0), 132, device.BANDWIDTH["H200"])  # whose file stands in for others

_forced: contextvars.ContextVar[dict | None] = contextvars.ContextVar("forced_configuration", default=None)
_asked: contextvars.ContextVar[list | None] = contextvars.ContextVar("asked_configurations", default=None)


def lookup(op: str, key: str, rule: dict[str, int]) -> dict[str, int]:
    """The configuration of ``op`` for the case ``key``: the measured one, else ``rule``.

    rule: the default, all options by name. An entry may leave options out and may not add any.
    """
    asked, forced = _asked.get(), _forced.get()
    if asked is not None:
        asked.append((op, key, rule))
    if forced is not None:
        return rule | forced
    return rule | _entry(_path(device.current()), op, key, frozenset(rule))


@contextlib.contextmanager
def force(config: dict[str, int]) -> Iterator[None]:
    """Within the block, every lookup gives its rule's options with these replaced."""
    token = _forced.set(config)
    try:
        yield
    finally:
        _forced.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[str, str, dict[str, int]]]]:
    """Within the block, note what is looked up: (op, key, rule) in order."""
    asked: list = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def path_of(kind: str) -> Path:
    """The file of a device by the vendor's name for it."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json")


def _path(dev: device.Device) -> Path | None:
    own = path_of(dev.kind)
    if own.exists():
        return own
    if dev.capability[0] not in (9, 10) or dev.cores < MODEL.cores:
        return None
    _say(
        f"no kernel configurations were measured on {dev.kind}; it takes those of {MODEL.kind} (untested here)",
        logging.INFO,
    )
    return path_of(MODEL.kind)


def _entry(path: Path | None, op: str, key: str, options: frozenset[str]) -> dict[str, int]:
    found = {} if path is None else _read(path).get(op, {}).get(key, {})
    config = found.get("config", {}) if isinstance(found, dict) else None
    if not isinstance(config, dict) or not config.keys() <= options or not all(map(_positive, config.values())):
        _say(f"{path}: the entry {op} / {key} is not a configuration of {sorted(options)}; it is ignored")
        return {}
    return config


def _positive(value) -> bool:
    return type(value) is int and value > 0


@functools.cache
def _read(path: Path) -> dict[str, dict]:
    """The entries of a file, {} when there is none or it cannot be read."""
    try:
        ops = json.loads(path.read_text())["ops"]
        if isinstance(ops, dict) and all(isinstance(entries, dict) for entries in ops.values()):
            return ops
        reason = '"ops" is not {op: {key: entry}}'
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    _say(f"{path} is not a table of kernel configurations ({reason}); the rules' defaults are used")
    return {}


@functools.cache
def _say(message: str, level: int = logging.WARNING) -> None:
    """Once."""
    logger.log(level, message)
