"""A judge of JSON values, small and independent of the library that makes the grammars."""

from __future__ import annotations

import re
from typing import Any

_KINDS = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def fits(value: Any, schema: Any, root: Any = None) -> bool:
    """Whether a value fits a schema of the keywords used in these tests."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return fits(value, target, root)
    kinds = schema.get("type")
    if kinds is not None and not any(_KINDS[k](value) for k in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if "anyOf" in schema and not any(fits(value, s, root) for s in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, str):
        return _string(value, schema)
    if isinstance(value, list):
        return all(fits(v, schema.get("items", True), root) for v in value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        more = schema.get("additionalProperties", True)
        return set(schema.get("required", ())) <= value.keys() and all(
            fits(v, known.get(k, more), root) for k, v in value.items()
        )
    return schema.get("minimum", value) <= value <= schema.get("maximum", value) if _KINDS["number"](value) else True


def _string(value: str, schema: dict) -> bool:
    return (
        schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        and re.search(schema.get("pattern", ""), value) is not None
    )
