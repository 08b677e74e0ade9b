"""The tools of a request, and how the values of their arguments are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flint_jax.errors import RequestError
from flint_jax.grammar.readers import Reader
from flint_jax.grammar.schemas import STRING, Document, argument_schema, schema_types

__all__ = ["STRING", "Tool", "schema_types"]


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: JSON schema of its arguments, or None.

    strict: the output is held to the whole schema; how it is read does not depend on that.
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
        """JSON types allowed for an argument; string alone where the schema does not speak of it."""
        return self.reader(key).types

    def reader(self, key: str) -> Reader:
        """What makes JSON of the argument's text."""
        return Reader(argument_schema(self.parameters, key), Document(self.parameters))
