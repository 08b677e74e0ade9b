"""From an argument's raw text to JSON of a type that its schema allows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from flint_jax.grammar.schemas import ANY, STRING, Document, alternatives, members, schema_types

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_EXACT = 2**53  # from here on not every whole number is a float, so a float stays one
_WHITE = " \t\n\r"  # of JSON
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_WHOLE = re.compile(r"-?(?:0|[1-9][0-9]*)\.0+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


class Reader:
    """Reads the values of one argument.

    A member of an ``enum`` or ``const`` is known by its text, before any type is tried.

    streams: whether a value can only be a string, so that its text can go out before it is whole.
    types: JSON types that the schema allows.
    """

    def __init__(self, schema: Any, document: Document | None = None):
        document = document or Document(schema)
        self.types = schema_types(schema, document)
        self.streams = self.types == STRING
        self._members = [] if self.streams else _all_members(schema, document)

    def __call__(self, raw: str) -> str:
        """JSON text of a value."""
        for same in (_spelled_so, _equal):
            for member in self._members:
                if same(member, raw):
                    return dumps(member)
        return typed_json(raw, self.types)


def _all_members(schema: Any, document: Document) -> list[Any]:
    return [m for part, _, _ in alternatives(schema, document) for m in members(part) or ()]


def _spelled_so(member: Any, raw: str) -> bool:
    return raw == spelled(member)


def _equal(member: Any, raw: str) -> bool:
    """Whether a text with other spaces, or JSON written in another way, is the member."""
    raw = raw.strip(_WHITE)
    if isinstance(member, str):
        return raw == member
    try:
        return same_json(json.loads(raw), member)
    except (ValueError, RecursionError):
        return False


def same_json(one: Any, other: Any) -> bool:
    """Whether two values are the same to JSON: 1 is 1.0 and not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(v, other[k]) for k, v in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return one == other


def spelled(value: Any) -> str:
    """How a model writes a value between the tags: a string bare, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def typed_json(raw: str, types: frozenset[str] | set[str]) -> str:
    """JSON text of an argument's raw text: the first of the allowed types that it can be read as.

    Numbers are those of JSON: no leading zeros, underscores or other digits; an integer has no exponent. Tried in fixed
    order: null, integer, number, boolean, object, array, string. If it is none of them, JSON of another type will do,
    but no number in an integer's place, and else it is a string. Where any type is allowed it is JSON if it can be.
    """
    if types == ANY:
        readers: list[Callable[[str], Any]] = [_number, json.loads]
    else:
        readers = [read for name, read in _READERS.items() if name in types]
        if "string" not in types:
            readers += [_digit_boolean] if "boolean" in types else []
            readers.append(_other_than_number if "integer" in types else json.loads)
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


def _integer(raw: str) -> int | float:
    raw = raw.strip(_WHITE)
    if _INTEGER.fullmatch(raw):
        return int(raw)  # exact, however long
    if _WHOLE.fullmatch(raw):
        return float(raw)
    raise ValueError(raw)


def _number(raw: str) -> int | float:
    raw = raw.strip(_WHITE)
    if _INTEGER.fullmatch(raw):
        return int(raw)
    if not _NUMBER.fullmatch(raw):
        raise ValueError(raw)
    number = float(raw)
    return int(number) if number.is_integer() and abs(number) < _EXACT else number


def _boolean(raw: str) -> bool:
    try:
        return {"true": True, "false": False}[raw.strip().lower()]
    except KeyError:
        raise ValueError(raw) from None


def _digit_boolean(raw: str) -> bool:
    try:
        return {"1": True, "0": False}[raw.strip()]
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


def _other_than_number(raw: str) -> Any:
    value = json.loads(raw)
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(raw)
    return value


_READERS = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _object,
    "array": _array,
}
