"""What a history may hold that this model cannot read: told in words, since a refusal would end the session for good.

An agent sends its whole history with every turn. What the user sends for the first time is refused where it cannot be
read; what a tool returned, or what the model itself wrote, is in every request from then on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flint_jax.server.body import log_once

# types of parts and blocks in all protocols -> what they are
_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "input_audio": "audio",
    "audio_url": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "document": "document",
    "file": "file",
    "input_file": "file",
    "container_upload": "file",
    "resource": "resource",
}


def left_out(part: Any) -> str | None:
    """The line that stands for a picture, sound or file in a tool's result; None for what is none of these."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    what = _MEDIA.get(kind) if isinstance(kind, str) else None
    if what is None:
        return None
    log_once(f"leaving out parts of the type {kind} in tool results: this model reads text only")
    return f"[{what} left out: this model reads text only]"


def earlier_arguments(given: Any) -> dict[str, Any]:
    """Arguments of a call in the history as an object, whatever they are.

    Nothing, JSON's null and blanks are ``{}``. Text that is no JSON (a call that was cut off), and JSON that is no
    object, become the one argument ``arguments``, as they were written.
    """
    value = given
    if isinstance(given, str):
        if not given.strip():
            return {}
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            log_once("arguments of earlier calls that are not JSON are told as they are")
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": value}
