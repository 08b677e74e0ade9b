"""Small helpers of the lexer: white space that waits, and deltas that grow."""

from __future__ import annotations

from flint_jax.grammar.deltas import Delta


class Gap:
    """White space that waits for text to follow."""

    def __init__(self):
        self._parts: list[str] = []

    def pass_on(self, text: str) -> str:
        """The text up to its last visible character, after what had waited."""
        shown = text.rstrip()
        if not shown:
            self._parts.append(text)
            return ""
        out = self.take() + shown
        self._parts.append(text[len(shown) :])
        return out

    def take(self) -> str:
        """What waits; then nothing does."""
        parts, self._parts = self._parts, []
        return "".join(parts)


class Pieces:
    """Deltas of one push; neighbours of one kind become one."""

    def __init__(self):
        self._items: list[Delta | tuple] = []

    def put(self, delta: Delta) -> None:
        """A delta that stays as it is."""
        self._items.append(delta)

    def add(self, kind: type, text: str, *index: int) -> None:
        """Text for a delta ``kind(*index, text)``."""
        if not text:
            return
        last = self._items[-1] if self._items else None
        if isinstance(last, tuple) and last[:2] == (kind, index):
            last[2].append(text)
        else:
            self._items.append((kind, index, [text]))

    def take(self) -> list[Delta]:
        """All so far; then there are none."""
        items, self._items = self._items, []
        return [i[0](*i[1], "".join(i[2])) if isinstance(i, tuple) else i for i in items]
