"""JSON on the wire: compact, UTF-8 as it is, never NaN or Infinity."""

from __future__ import annotations

import json
from json.encoder import encode_basestring as quoted
from typing import Any

from starlette.responses import Response

__all__ = ["JsonReply", "quoted", "to_json", "to_text"]

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def to_text(value: Any) -> str:
    """Compact JSON. Raises ValueError for NaN and Infinity, which JSON does not have."""
    return _encode(value)


def to_json(value: Any) -> bytes:
    """The same as UTF-8."""
    return _encode(value).encode()


class JsonReply(Response):
    """A JSON response."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None):
        super().__init__(content, status_code, headers)

    def render(self, content: Any) -> bytes:
        """The body."""
        return to_json(content)
