"""Which thoughts of earlier turns the model is shown: Anthropic's ``context_management``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flint_jax.server.body import Fields, log_once

_EDIT = "clear_thinking_20251015"


def kept_turns(fields: Fields) -> int | None:
    """How many of the last assistant turns that thought keep their thoughts: 0 for the template's own way, None for
    all of them. Raises ApiError for an edit that is malformed; other edits are left out with a word in the log.
    """
    given = Fields(fields.object("context_management") or {}, prefix="context_management.")
    kept: int | None = 0
    for n, edit in enumerate(given.array("edits") or []):
        if not isinstance(edit, dict):
            raise given.error(f"edits[{n}]", "must be an object with a type", "invalid_type")
        if edit.get("type") != _EDIT:
            log_once(f"context_management: edits of the type {edit.get('type')!r:.64} are not made")
            continue
        keep = edit.get("keep")
        if keep is None:
            kept = 1  # as Anthropic's servers do
        elif keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all"):
            kept = None
        elif isinstance(keep, dict) and keep.get("type") == "thinking_turns":
            kept = Fields(keep, prefix=f"context_management.edits[{n}].keep.").integer("value", 1, 1)
        else:
            raise given.error(f"edits[{n}].keep", 'must be "all" or {"type": "thinking_turns", "value": N}')
    return kept


def keep_last(messages: Sequence[dict[str, Any]], turns: int | None) -> dict[str, Any]:
    """The template's arguments for that; thoughts of turns before the last ``turns`` are taken out of the messages.

    A turn is all that the assistant does between two messages of the user's.
    """
    if turns == 0:
        return {}
    left, in_turn, done = turns, False, False
    for message in reversed(messages if turns is not None else []):
        if message["role"] == "user":
            if in_turn:
                left, in_turn = left - 1, False
                done = left == 0
        elif message.get("reasoning_content"):
            if done:
                del message["reasoning_content"]
            else:
                in_turn = True
    return {"clear_thinking": False}
