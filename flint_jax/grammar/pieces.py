"""Small helpers of the lexer: white space that waits, and deltas that grow."""

from __future__ import annotations

from collections.abc import Iterable

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


class LastWord:
    """The last word of a text, held while it may be a name: of a tool whose call lacks ``<tool_call>``.

    names: the names; none holds nothing. text: what is held, up to a few characters of white space included.
    """

    _SPACE = 8

    def __init__(self, names: Iterable[str]):
        self._names = frozenset(names)
        self._longest = max(map(len, self._names), default=0)
        self._begins = frozenset(name[:n] for name in self._names for n in range(1, len(name) + 1))
        self._inside = False  # whether the text before what is held ends within a word
        self.text = ""

    @property
    def whole(self) -> bool:
        """Whether what is held is a name."""
        return self.text.rstrip() in self._names

    def pass_on(self, text: str) -> str:
        """The text after what had waited, up to a word that may be a name."""
        if not self._names:
            return text
        text = self.take() + text
        shown = text.rstrip()
        at = len(shown)
        while at and len(shown) - at <= self._longest and _in_word(shown[at - 1]):
            at -= 1
        word = shown[at:]
        fits = word in self._begins and len(text) - len(shown) <= self._SPACE
        if len(text) > len(shown) and word not in self._names:
            fits = False
        if not fits or (at == 0 and self._inside) or (at and _in_word(shown[at - 1])):
            self._inside = _in_word(text[-1]) if text else self._inside
            return text
        self.text = text[at:]
        if at:
            self._inside = _in_word(text[at - 1])
        return text[:at]

    def take(self) -> str:
        """What waits; then nothing does."""
        text, self.text = self.text, ""
        return text


def _in_word(char: str) -> bool:
    return char.isalnum() or char in "_-"
