"""Grammar of one argument: its value as the reader of the output will type it, bare text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flint_jax.errors import RequestError
from flint_jax.grammar.tags import END_VALUE
from flint_jax.grammar.readers import spelled
from flint_jax.grammar.schemas import Document, check_resolved, members, schema_types
from flint_jax.guided.terms import INTEGER, NUMBER, Rules, json_rule, one_of

_BARE = {"integer": INTEGER, "number": NUMBER, "boolean": '"true" | "false"', "null": '"null"'}
_PLAIN = {"type", "enum", "const", "title", "description", "default", "examples", "deprecated", "$comment"}
_DEFINITIONS = ("$defs", "definitions")


def value_rule(rules: Rules, schema: Any, root: Document, *, strict: bool) -> str:
    """What may stand between ``<arg_value>`` and ``</arg_value>``, the latter included.

    Loose, the value has one of its basic types or is in its enum; strict, it fits the whole schema. Where a string is
    allowed that nothing restricts, any text is: the reader takes what it can as the other types.
    """
    if not strict:
        return _loose(rules, schema, root)
    schema = resolved(schema, root)
    branches = list(_branches(schema, root))
    texts = [b for b in branches if "string" in schema_types(b, root)]
    # JSON and bare text cannot be alternatives of one place, so structured types beside a string stay free
    bodies = [_string(b) if b in texts else _bare(b, root) for b in branches]
    if not texts and (None in bodies or any(b.keys() - _PLAIN for b in branches)):
        return f"{json_rule(_whole(schema, root), lenient=True)} {rules.tag(END_VALUE)}"
    if None in bodies or not rules.is_token(END_VALUE):
        return rules.value()
    return rules.value(" | ".join(f"({body})" for body in bodies))


def resolved(schema: Any, root: Document) -> Any:
    """The schema behind a ``$ref`` into the same document. Raises RequestError when there is none."""
    found = root.resolve(schema)
    check_resolved(schema, found)
    return found


def _loose(rules: Rules, schema: Any, root: Document) -> str:
    types, schema = schema_types(schema, root), root.resolve(schema)
    allowed = members(schema)
    if allowed is not None:
        return rules.value(one_of(spelled(v) for v in allowed))
    if "string" in types:
        return rules.value()
    if types <= _BARE.keys():
        return rules.value(" | ".join(_BARE[t] for t in sorted(types)))
    return f"{json_rule({'type': sorted(types)})} {rules.tag(END_VALUE)}"


def _branches(schema: Any, root: Document):
    """The alternatives of a schema, each of one type where types are listed."""
    if not isinstance(schema, Mapping):
        yield schema
        return
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            rest = {k: v for k, v in schema.items() if k != word}
            for part in schema[word]:
                part = resolved(part, root)
                yield from _branches({**rest, **part} if isinstance(part, Mapping) else part, root)
            return
    types = schema.get("type")
    for one in types if isinstance(types, list) and types else (types,):
        yield schema if one is types else {**schema, "type": one}


def _string(schema: Any) -> str | None:
    """Regular expression of a string's text; None when anything goes."""
    allowed = members(schema)
    if allowed is not None:
        return one_of(v for v in allowed if isinstance(v, str)) or None
    if not isinstance(schema, Mapping):
        return None
    parts = []
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        parts.append(f"/{_searched(pattern)}/")
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if low or high is not None:
        parts.append(f"/(?s:.{{{_count(low)},{'' if high is None else _count(high)}}})/")
    return " & ".join(parts) or None


def _searched(pattern: str) -> str:
    """A pattern that must be found somewhere, as one that takes the whole text."""
    from llguidance import regex_to_lark

    body = regex_to_lark(pattern.removeprefix("^"), "dw")
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    body = body.removesuffix("$") if ends else body
    return f"{'' if pattern.startswith('^') else '(?s:.*)'}({body}){'' if ends else '(?s:.*)'}"


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 20:
        raise RequestError(f"minLength and maxLength need whole numbers below {1 << 20}, got {value!r:.40}")
    return value


def _bare(schema: Any, root: Document) -> str | None:
    """Regular expression of a value that needs no JSON parser; None for the others."""
    allowed = members(schema)
    if allowed is not None:
        return one_of(spelled(v) for v in allowed)
    kinds = schema_types(schema, root)
    return " | ".join(_BARE[t] for t in sorted(kinds)) if kinds <= _BARE.keys() else None


def _whole(schema: Any, root: Document) -> Any:
    """The schema with the definitions that it may refer to."""
    if not isinstance(schema, Mapping):
        return schema
    return {**{word: root.root[word] for word in _DEFINITIONS if word in root.root}, **schema}
