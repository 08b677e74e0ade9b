"""JSON on the wire: compact, UTF-8 as it is, never NaN or Infinity."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


def to_json(value: Any) -> bytes:
    """UTF-8 bytes. Raises ValueError for NaN and Infinity, which JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class JsonReply(Response):
    """A JSON response."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None):
        super().__init__(content, status_code, headers)

    def render(self, content: Any) -> bytes:
        """The body."""
        return to_json(content)


class NoReply(Response):
    """Nothing at all, for a client that has hung up."""

    async def __call__(self, scope, receive, send) -> None:
        """Send nothing."""
