"""Arguments of one call: raw text between tags to JSON typed by the tool's schema, in pieces that are only appended."""

from __future__ import annotations

import json
import re
from typing import Any

from flint_jax.grammar.tools import STRING, Tool

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_EXACT = 2**53  # from here on not every whole number is a float, so a float stays one


class ArgumentWriter:
    """Writes the JSON object of a call's arguments as its keys and values come in.

    Each method returns the JSON text that it makes certain; joined up to ``end`` that is always one valid object.
    A value that can only be a string is written as it comes. Any other is written when it is closed, key and all, since
    until then its type is open. Of a repeated key the first value counts: it may be with the client already.
    """

    def __init__(self, tool: Tool):
        self._tool = tool
        self._keys: set[str] = set()
        self._types = STRING
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
        self._types = self._tool.types(key)
        self._member = f"{dumps(key)}: "
        if self._types == STRING:
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
        return self._next(self._member + typed_json("".join(self._parts), self._types))

    def cut(self) -> str:
        """The value will never be complete: a string keeps what was written of it, anything else is left out."""
        return "" if self._skip or self._parts is not None else '"'

    def end(self) -> str:
        """No more members."""
        return "{}" if self._before == "{" else "}"

    def _next(self, member: str) -> str:
        text, self._before = self._before + member, ", "
        return text


def typed_json(raw: str, types: frozenset[str]) -> str:
    """JSON text of an argument's raw text: the first of the allowed types that it can be read as.

    Tried in fixed order: null, integer, number, boolean, object, array, string. If it is none of them, any JSON will
    do, and else it is a string.
    """
    readers = [read for name, read in _READERS.items() if name in types]
    if "string" not in types:
        readers.append(json.loads)
    for read in readers:
        try:
            return dumps(read(raw))
        except (ValueError, RecursionError):
            continue
    return dumps(raw)


def dumps(value: Any) -> str:
    """JSON with literal UTF-8. Half of a surrogate pair becomes U+FFFD: UTF-8 cannot hold it, and as an escape it would
    break clients that read the arguments as they come.

    Raises ValueError for infinity and NaN, which JSON cannot hold.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _LONE_SURROGATE.sub("\ufffd", text)


def _null(raw: str) -> None:
    if raw.strip().lower() != "null":
        raise ValueError(raw)


def _number(raw: str) -> int | float:
    try:
        return int(raw)  # exact, however long
    except ValueError:
        number = float(raw)
    return int(number) if number.is_integer() and abs(number) < _EXACT else number


def _boolean(raw: str) -> bool:
    try:
        return {"true": True, "1": True, "false": False, "0": False}[raw.strip().lower()]
    except KeyError:
        raise ValueError(raw) from None


def _object(raw: str) -> dict:
    return _only(dict, json.loads(raw))


def _array(raw: str) -> list:
    return _only(list, json.loads(raw))


def _only(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(value)
    return value


_READERS = {
    "null": _null,
    "integer": int,
    "number": _number,
    "boolean": _boolean,
    "object": _object,
    "array": _array,
}
