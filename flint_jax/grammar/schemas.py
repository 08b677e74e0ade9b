"""JSON schemas inside their document: references followed, and what a value of a schema may be."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from flint_jax.errors import RequestError

STRING = frozenset({"string"})
ANY = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_MAX_REFS = 32  # references followed in a row, and parts of one schema looked at: more can only be a circle
_MAX_PARTS = 10_000

# schemas made from Python signatures and from SQL-like catalogues use these for the names of JSON schema
_ALIASES = {
    "null": ("null", "none", "nonetype"),
    "integer": ("integer", "int", "int32", "int64", "long"),
    "number": ("number", "float", "float32", "float64", "double", "decimal"),
    "boolean": ("boolean", "bool"),
    "object": ("object", "dict", "map"),
    "array": ("array", "list", "tuple"),
    "string": ("string", "str", "text"),
}
TYPE_OF = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}
_VALUE_TYPES = {
    type(None): "null",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
    str: "string",
}
# a schema without a type that has one of these is about values of one type
_IMPLIED = {
    "properties": "object",
    "required": "object",
    "additionalProperties": "object",
    "patternProperties": "object",
    "items": "array",
    "prefixItems": "array",
}
_DATA = frozenset({"const", "default", "enum", "example", "examples"})  # hold values, not schemas


class Document:
    """A whole schema, in which its parts refer to each other.

    A reference is a JSON pointer (``#/$defs/a``, also into lists and percent-encoded), the name of an ``$anchor``, or
    the ``$id`` of a part with either behind it. Nothing outside of the document is ever fetched.
    """

    def __init__(self, root: Any):
        self.root = root
        self._names: dict[str, Any] | None = None

    def resolve(self, schema: Any) -> Any:
        """The schema behind a ``$ref``; the given one, with its ``$ref``, when nothing is there or it is a circle."""
        given = schema
        for _ in range(_MAX_REFS):
            ref = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(ref, str):
                return schema
            try:
                schema = self.find(ref)
            except LookupError:
                return given
        return given

    def find(self, ref: str) -> Any:
        """What a reference is to. Raises LookupError when nothing is there."""
        base, _, fragment = ref.partition("#")
        found = self._named(base) if base else self.root
        fragment = urllib.parse.unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._named(f"{base}#{fragment}")
        for name in fragment.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and re.fullmatch("0|[1-9][0-9]{0,5}", name):
                name = int(name)
            elif not isinstance(found, Mapping):
                raise LookupError(ref)
            found = found[name]
        return found

    def _named(self, name: str) -> Any:
        if self._names is None:
            self._names = {}
            for part in _parts(self.root):
                for word, mark in (("$id", ""), ("$anchor", "#"), ("$dynamicAnchor", "#")):
                    if isinstance(part.get(word), str):
                        self._names.setdefault(mark + part[word].removesuffix("#"), part)
        if name in self._names:
            return self._names[name]
        base, mark, anchor = name.partition("#")
        if mark and base and base in self._names:  # an anchor of a part with an address
            return Document(self._names[base]).find(f"#{anchor}")
        tails = [k for k in self._names if not mark and k.endswith(f"/{name}")]  # an address that is relative
        if len(tails) == 1:
            return self._names[tails[0]]
        raise LookupError(name)


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """All objects inside a schema, breadth first, but those in values."""
    todo = [schema]
    for steps, part in enumerate(todo):
        if steps >= _MAX_PARTS:
            return
        if isinstance(part, Mapping):
            yield part
            todo += [v for k, v in part.items() if k not in _DATA and isinstance(v, Mapping | list)]
        elif isinstance(part, list):
            todo += part


def schema_types(schema: Any, document: Document | None = None) -> frozenset[str]:
    """JSON types that a value may have: those of ``type``, ``enum`` and ``const``, at any depth of references,
    ``anyOf``, ``oneOf`` and ``allOf``.

    Where none of them says anything, ``items`` means an array and ``properties`` an object; else any type. A type that
    does not exist counts as a string. document: where references are looked up; nothing found is any type.
    """
    found: set[str] = set()
    for _, own, free in alternatives(schema, document):
        if free:
            return ANY
        found |= own
    return frozenset(found) or ANY


def alternatives(
    schema: Any, document: Document | None = None
) -> Iterator[tuple[Mapping[str, Any], frozenset[str], bool]]:
    """The parts of a schema: (part, types that it names itself, whether it lets any type in)."""
    document = document or Document(schema)
    todo, steps = [(schema, False)], 0  # (schema, whether something says its type already)
    while todo and steps < _MAX_PARTS:
        given, typed = todo.pop()
        part, steps = document.resolve(given), steps + 1
        if not isinstance(part, Mapping):
            yield {}, frozenset(), part is not False and not typed
            continue
        own = _own_types(part)
        below = [(word, p) for word in ("anyOf", "oneOf", "allOf") for p in _list(part.get(word))]
        yield part, own, not own and not typed and not below
        settled = typed or bool(own)
        all_of = any(word == "allOf" for word, _ in below)
        todo += [
            (p, settled or (word == "allOf" and len(below) > 1) or (word != "allOf" and all_of)) for word, p in below
        ]


def _own_types(part: Mapping[str, Any]) -> frozenset[str]:
    names = part.get("type")
    names = names if isinstance(names, list | tuple) else [names]
    found = {TYPE_OF.get(n.lower(), "string") for n in names if isinstance(n, str)}
    found |= {_VALUE_TYPES[type(v)] for v in members(part) or () if type(v) in _VALUE_TYPES}
    if part.get("nullable") is True and found:
        found.add("null")
    if not found and not any(_list(part.get(word)) for word in ("anyOf", "oneOf", "allOf")):
        found = {kind for word, kind in _IMPLIED.items() if word in part}
    return frozenset(found)


def members(schema: Any) -> list[Any] | None:
    """Values of ``enum`` or ``const``; None where neither is."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    given = schema.get("enum")
    return list(given) if isinstance(given, list | tuple) and given else None


def argument_schema(parameters: Any, key: str) -> Any:
    """The schema of one argument of a call; of a key that nothing speaks of, a string's.

    parameters: schema of all arguments. The result may refer into it.
    """
    document, found = Document(parameters), []
    for part, _, _ in alternatives(parameters, document):
        for word in ("properties", "patternProperties"):
            known = part.get(word) if isinstance(part.get(word), Mapping) else {}
            found += [v for k, v in known.items() if (k == key if word == "properties" else _matches(k, key))]
    if not found:
        for part, _, _ in alternatives(parameters, document):
            if part.get("additionalProperties") not in (None, False):
                found.append(part["additionalProperties"])
    if not found:
        return {"type": "string"}
    return found[0] if len(found) == 1 else {"anyOf": found}


def _matches(pattern: str, key: str) -> bool:
    try:
        return re.search(pattern, key) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def check_resolved(schema: Any, found: Any) -> None:
    """Raise RequestError when ``found``, which ``Document.resolve`` made of ``schema``, is no schema."""
    ref = found.get("$ref") if isinstance(found, Mapping) else None
    if isinstance(ref, str):
        raise RequestError(f"the schema refers to {ref!r:.80}, which is not in it or leads back to itself")
    if found is not schema and not isinstance(found, Mapping | bool):
        raise RequestError(f"the schema refers to {schema['$ref']!r:.80}, where there is no schema but {found!r:.40}")


def _list(value: Any) -> list | tuple:
    return value if isinstance(value, list | tuple) else ()
