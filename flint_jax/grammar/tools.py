"""The tools of a request, and the types that their schemas allow for an argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flint_jax.errors import RequestError

STRING = frozenset({"string"})
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
_TYPE_OF = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}
_VALUE_TYPES = {
    type(None): "null",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
    str: "string",
}


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: JSON schema of its arguments, or None.

    strict: the output is held to the schema, so a ``$ref`` in it is followed; else a reference means a string.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @classmethod
    def of(cls, definition: Mapping[str, Any]) -> Tool:
        """From a request: ``{"function": {"name", "parameters"}}``, ``{"name", "parameters"}`` or ``input_schema``."""
        inner = definition.get("function", definition)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(name, str):
            raise RequestError(f"a tool needs a name, got {definition!r:.200}", param="tools")
        return cls(name, inner.get("parameters", inner.get("input_schema")), inner.get("strict") is True)

    def types(self, key: str) -> frozenset[str]:
        """JSON types allowed for an argument; string alone where the schema does not say."""
        root = self.parameters if self.strict else None
        schema = resolve(self.parameters, root)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return schema_types(properties.get(key), root) if isinstance(properties, Mapping) else STRING


def resolve(schema: Any, root: Any) -> Any:
    """The schema behind a ``$ref`` into the document ``root``; without a root, or when nothing is there, itself."""
    given = schema
    for _ in range(_MAX_REFS):
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if root is None or not isinstance(ref, str):
            return schema
        found: Any = root if ref.startswith("#") else None
        for name in ref.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:
            return given
        schema = found
    return given


def schema_types(schema: Any, root: Any = None) -> frozenset[str]:
    """Union of ``type``, types of ``enum`` and ``const``, those of ``anyOf``, ``oneOf`` and ``allOf``, at any depth.

    root: the document in which a ``$ref`` is looked up. Nothing known in there, also a ``$ref`` without a root, means
    string.
    """
    found: set[str] = set()
    todo, steps = [schema], 0
    while todo and steps < _MAX_PARTS:
        part, steps = resolve(todo.pop(), root), steps + 1
        if not isinstance(part, Mapping):
            continue
        names = part.get("type")
        names = names if isinstance(names, list | tuple) else [names]
        found |= {_TYPE_OF[n.lower()] for n in names if isinstance(n, str) and n.lower() in _TYPE_OF}
        values = [*_list(part.get("enum")), *([part["const"]] if "const" in part else ())]
        found |= {_VALUE_TYPES[type(v)] for v in values if type(v) in _VALUE_TYPES}
        for word in ("anyOf", "oneOf", "allOf"):
            todo += _list(part.get(word))
    return frozenset(found) or STRING


def _list(value: Any) -> list | tuple:
    return value if isinstance(value, list | tuple) else ()
