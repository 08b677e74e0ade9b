"""Grammar of one argument: its value as the reader of the output will type it, bare text or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flint_jax.errors import RequestError
from flint_jax.grammar.readers import spelled
from flint_jax.grammar.schemas import STRING, Document, check_resolved, members, schema_types
from flint_jax.grammar.tags import END_VALUE
from flint_jax.guided.keywords import say_once, standalone
from flint_jax.guided.terms import INTEGER, NUMBER, Rules, json_rule, one_of, why_not

_BARE = {"integer": INTEGER, "number": NUMBER, "boolean": '"true" | "false"', "null": '"null"'}
_PLAIN = {"type", "enum", "const", "$defs"}
_STRING = _PLAIN | {"pattern", "minLength", "maxLength", "format"}
_DATE, _CLOCK = (
    r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?",
)
_ZONE = r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_NAME = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _CLOCK + _ZONE,
    "date-time": f"{_DATE}T{_CLOCK}{_ZONE}",
    "duration": r"P([0-9]{1,9}W|([0-9]{1,9}[YMD]){1,3}(T([0-9]{1,9}[HMS]){1,3})?|T([0-9]{1,9}[HMS]){1,3})",
    "email": rf"[A-Za-z0-9._%+'-]{{1,64}}@{_NAME}(\.{_NAME}){{1,8}}",
    "hostname": rf"{_NAME}(\.{_NAME}){{0,8}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]{0,31}:[^\s<>\"{}|^`\\]{1,2000}",
}


class Unsatisfiable(RequestError):
    """No value fits a schema."""


def value_rule(rules: Rules, schema: Any, root: Document, *, strict: bool, where: str = "parameters") -> str:
    """What may stand between ``<arg_value>`` and ``</arg_value>``, the latter included.

    Loose, a bare value has one of its basic types or is in its enum, and an object or array fits as much of its schema
    as can be enforced. Strict, it fits the whole schema. Where a string is allowed that nothing restricts, any text is:
    the reader takes what it can as the other types. where: path of the schema, for errors.

    Raises RequestError for a strict schema that cannot be enforced, Unsatisfiable for one that nothing fits.
    """
    if not strict:
        return _loose(rules, schema, root, where)
    given = standalone(schema, root, where, strict=True)
    own = Document(given)
    schema = _joined(given, own)
    branches = [b for b in _branches(schema, own) if not _empty(b, given)]
    texts = [b for b in branches if "string" in schema_types(b, own)]
    # JSON and bare text cannot be alternatives of one place, so structured types beside a free string stay free
    bodies = [_string(b, own, where) if b in texts else _bare(b, own) for b in branches]
    why = why_not(json_rule(given)) or ("" if branches else "Unsatisfiable schema: no branch fits a value")
    if why:
        raise (Unsatisfiable if "Unsatisfiable" in why else RequestError)(f"{where}: {why}")
    plain = all(isinstance(b, Mapping) and b.keys() <= _PLAIN for b in branches if b not in texts)
    if not texts and (None in bodies or not plain):
        return f"{json_rule(given)} {rules.tag(END_VALUE)}"
    free = any(body is None for b, body in zip(branches, bodies, strict=True) if b in texts)
    if free or not rules.is_token(END_VALUE):
        return rules.value()
    if None in bodies or not plain:
        raise RequestError(
            f"{where} allows a restricted string beside a value of another kind, which cannot be told apart between "
            "the tags; free the string, or leave strict out"
        )
    return rules.value(" | ".join(f"({body})" for body in bodies))


def resolved(schema: Any, root: Document) -> Any:
    """The schema behind a ``$ref`` into the same document. Raises RequestError when there is none."""
    found = root.resolve(schema)
    check_resolved(schema, found)
    return found


def _joined(schema: Any, root: Document) -> Any:
    """The schema behind a ``$ref``, with the keywords beside it."""
    if resolved(schema, root) is schema:
        return schema
    beside = {k: v for k, v in schema.items() if k not in ("$ref", "$defs")}
    found = _joined(root.find(schema["$ref"]), root)
    if not beside:
        return found
    if not isinstance(found, Mapping) or found.keys() & beside.keys():
        return {"allOf": [found, beside]}
    return {**found, **beside}


def _loose(rules: Rules, schema: Any, root: Document, where: str) -> str:
    types, given = schema_types(schema, root), schema
    allowed = members(root.resolve(schema))
    if allowed is not None:
        return rules.value(one_of(spelled(v) for v in allowed))
    if "string" in types:
        return rules.value()
    if types <= _BARE.keys():
        return rules.value(" | ".join(_BARE[t] for t in sorted(types)))
    try:
        rule = json_rule(standalone(given, root, where, strict=False), lenient=True)
        why = why_not(rule)
    except RequestError as error:
        why = str(error)
    if why:
        say_once(f"only the type of an argument is enforced: {where}: {why}")
        rule = json_rule({"type": sorted(types)})
    return f"{rule} {rules.tag(END_VALUE)}"


def _branches(schema: Any, root: Document):
    """The alternatives of a schema, each of one type where types are listed."""
    if not isinstance(schema, Mapping):
        yield schema
        return
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            rest = {k: v for k, v in schema.items() if k != word}
            for part in schema[word]:
                part = _joined(part, root)
                yield from _branches({**rest, **part} if isinstance(part, Mapping) else part, root)
            return
    types = schema.get("type")
    for one in types if isinstance(types, list) and types else (types,):
        yield schema if one is types else {**schema, "type": one}


def _empty(schema: Any, whole: Any) -> bool:
    """Whether nothing fits a branch."""
    definitions = whole.get("$defs") if isinstance(whole, Mapping) else None
    if isinstance(schema, Mapping) and definitions:
        schema = {**schema, "$defs": definitions}
    return "Unsatisfiable" in why_not(json_rule(schema))


def _members(schema: Any) -> list[Any] | None:
    """Values of ``enum`` or ``const`` that the other keywords let through; None where neither is."""
    allowed = members(schema)
    if allowed is None or schema.keys() <= {"enum", "const", "$defs"}:
        return allowed
    rest = {k: v for k, v in schema.items() if k not in ("enum", "const")}
    if rest.get("type") == "string" and rest.keys() <= {"type", "$defs"}:  # the usual case, however many there are
        return [v for v in allowed if isinstance(v, str)]
    return _fitting(allowed, rest)


def _fitting(allowed: list[Any], rest: Mapping[str, Any]) -> list[Any]:
    return [v for v in allowed if not why_not(json_rule({**rest, "const": v}))]


def _string(schema: Any, root: Document, where: str) -> str | None:
    """Regular expression of a string's text; None when anything goes."""
    allowed = _members(schema)
    if allowed is not None:
        return one_of(spelled(v) for v in allowed)
    if not isinstance(schema, Mapping):
        return None
    others = [w for w in schema if w not in _STRING]
    if schema_types(schema, root) == STRING:
        others = [w for w in others if w in ("allOf", "anyOf", "oneOf", "$ref")]
    if others:
        raise RequestError(f"{where}.{others[0]} cannot be enforced where a string is allowed; leave strict out")
    parts = []
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        parts.append(f"/{_searched(pattern)}/")
    if schema.get("format") is not None:
        if schema["format"] not in _FORMATS:
            raise RequestError(f"{where}.format {schema['format']!r:.60} cannot be enforced; leave strict out")
        parts.append(f"/{_FORMATS[schema['format']]}/")
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
    allowed = _members(schema)
    if allowed is not None:
        return one_of(spelled(v) for v in allowed)
    kinds = schema_types(schema, root)
    return " | ".join(_BARE[t] for t in sorted(kinds)) if kinds <= _BARE.keys() else None
