"""The tools of a request, and the types that their schemas allow for an argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flint_jax.errors import RequestError

STRING = frozenset({"string"})

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
    """A function that the model may call. parameters: JSON schema of its arguments, or None."""

    name: str
    parameters: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, definition: Mapping[str, Any]) -> Tool:
        """From a request: ``{"function": {"name", "parameters"}}``, ``{"name", "parameters"}`` or ``input_schema``."""
        inner = definition.get("function", definition)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(name, str):
            raise RequestError(f"a tool needs a name, got {definition!r:.200}", param="tools")
        return cls(name, inner.get("parameters", inner.get("input_schema")))

    def types(self, key: str) -> frozenset[str]:
        """JSON types allowed for an argument; string alone where the schema does not say."""
        schema = self.parameters
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return schema_types(properties.get(key)) if isinstance(properties, Mapping) else STRING


def schema_types(schema: Any) -> frozenset[str]:
    """Union of ``type``, the types of ``enum`` values, and those of ``anyOf``, ``oneOf`` and ``allOf``, at any depth.

    Nothing known in there, also a ``$ref``, means string.
    """
    found: set[str] = set()
    todo = [schema]
    while todo:
        part = todo.pop()
        if not isinstance(part, Mapping):
            continue
        names = part.get("type")
        names = names if isinstance(names, list | tuple) else [names]
        found |= {_TYPE_OF[n.lower()] for n in names if isinstance(n, str) and n.lower() in _TYPE_OF}
        found |= {_VALUE_TYPES[type(v)] for v in _list(part.get("enum")) if type(v) in _VALUE_TYPES}
        for word in ("anyOf", "oneOf", "allOf"):
            todo += _list(part.get(word))
    return frozenset(found) or STRING


def _list(value: Any) -> list | tuple:
    return value if isinstance(value, list | tuple) else ()
