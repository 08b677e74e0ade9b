"""Arguments of one call: raw text between tags to JSON typed by the tool's schema, in pieces that are only appended."""

from __future__ import annotations

from flint_jax.grammar.readers import Reader, dumps, typed_json
from flint_jax.grammar.tools import Tool

__all__ = ["ArgumentWriter", "dumps", "typed_json"]


class ArgumentWriter:
    """Writes the JSON object of a call's arguments as its keys and values come in.

    Each method returns the JSON text that it makes certain; joined up to ``end`` that is always one valid object.
    A value that can only be a string is written as it comes. Any other is written when it is closed, key and all, since
    until then its type is open. Of a repeated key the first value counts: it may be with the client already.
    """

    def __init__(self, tool: Tool):
        self._tool = tool
        self._keys: set[str] = set()
        self._read: Reader | None = None
        self._before = "{"  # what comes before the next member
        self._member = ""
        self._parts: list[str] | None = None  # a value held until it is closed
        self._skip = False

    def has(self, key: str) -> bool:
        """Whether the key was there before."""
        return key in self._keys

    def open(self, key: str) -> str:
        """A value begins."""
        self._skip = key in self._keys
        if self._skip:
            return ""
        self._keys.add(key)
        self._read = self._tool.reader(key)
        self._member = f"{dumps(key)}: "
        if self._read.streams:
            self._parts = None
            return self._next(self._member + '"')
        self._parts = []
        return ""

    def write(self, text: str) -> str:
        """More of the value."""
        if self._skip:
            return ""
        if self._parts is None:
            return dumps(text)[1:-1]
        self._parts.append(text)
        return ""

    def close(self) -> str:
        """The value is complete."""
        if self._skip or self._parts is None:
            return self.cut()
        return self._next(self._member + self._read("".join(self._parts)))

    def cut(self) -> str:
        """The value will never be complete: a string keeps what was written of it, anything else is left out."""
        return "" if self._skip or self._parts is not None else '"'

    def end(self) -> str:
        """No more members."""
        return "{}" if self._before == "{" else "}"

    def _next(self, member: str) -> str:
        text, self._before = self._before + member, ", "
        return text
