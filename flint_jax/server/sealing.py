"""Thoughts that travel in a field which clients hand back unread: readable, not encrypted."""

from __future__ import annotations

import base64
from typing import Any

_SEALED = "flint:"  # begins a sealed thought of ours; those of other servers begin otherwise


def sealed(thought: str) -> str:
    """A thought as ``encrypted_content`` or as a signature."""
    return _SEALED + base64.b64encode(thought.encode()).decode()


def unsealed(given: Any) -> str:
    """The thought in what ``sealed`` made; nothing for that of another server."""
    if not isinstance(given, str) or not given.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return ""
