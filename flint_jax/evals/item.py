"""One exercise: a conversation, what a right reply is, and how to tell."""

from __future__ import annotations

import dataclasses
import random
import zlib
from typing import Any

TRAIN, HELD_OUT = "train", "held-out"


@dataclasses.dataclass(frozen=True)
class Item:
    """messages and tools as a chat request has them; the model's reply should equal ``content`` and ``calls``.

    family: what is practised ("arithmetic", ...); detail: a finer name for tables ("add", "distance 2048").
    thinking: whether the template is asked to think; thought: what a taught model thinks.
    calls: (name, arguments) in order; a reply with calls has no content to check.
    """

    family: str
    detail: str
    messages: tuple[dict[str, Any], ...]
    content: str = ""
    thought: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = True

    def right(self, content: str | None, calls: list[tuple[str, Any]]) -> bool:
        """Whether a reply is exact: names, arguments with their types, and text but for white space around it."""
        if self.calls:
            return [(name, _typed(given)) for name, given in calls] == [(n, _typed(a)) for n, a in self.calls]
        return not calls and (content or "").strip() == self.content


def _typed(value: Any) -> Any:
    """Equal only when types are: 1, 1.0 and True are three things here. Order of keys does not count."""
    if isinstance(value, dict):
        return ("object", tuple(sorted((k, _typed(v)) for k, v in value.items())))
    if isinstance(value, list):
        return ("array", tuple(_typed(v) for v in value))
    return (type(value).__name__, value)


def user(text: str) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    """An assistant message of plain text."""
    return {"role": "assistant", "content": text}


def held_out(key: str, share: int = 8) -> bool:
    """Whether ``key`` belongs to the held-out part: one in ``share``, the same on every machine."""
    return zlib.crc32(key.encode()) % share == 0


def draw(rng: random.Random, split: str, make) -> Any:
    """The first of ``make(rng)`` (value, key) whose key belongs to the split."""
    while True:
        value, key = make(rng)
        if held_out(key) == (split == HELD_OUT):
            return value


def choose(rng: random.Random, split: str, options: tuple, kept: int = 1) -> Any:
    """One of a tuple whose last ``kept`` entries are for evaluation only (there, all but those are left out)."""
    return rng.choice(options[-kept:] if split == HELD_OUT else options[:-kept])
