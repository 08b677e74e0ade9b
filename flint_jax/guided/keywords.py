"""A part of a schema made to stand alone, of keywords that can be enforced: every grammar is made of one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from flint_jax.errors import RequestError
from flint_jax.grammar.schemas import TYPE_OF, Document, check_resolved
from flint_jax.guided.terms import LOOKS

_log = logging.getLogger(__name__)

_ONE = frozenset({"items", "additionalProperties", "additionalItems"})  # hold a schema
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties"})
_VALUES = frozenset(
    [
        "const",
        "enum",
        "required",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
    ]
)
_SAID = frozenset(  # to a reader, not about the value
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "nullable",
        "optional",
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$comment",
        "$vocabulary",
        "$defs",
        "definitions",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "discriminator",
        "xml",
        "externalDocs",
        "errorMessage",
        "markdownDescription",
        "enumNames",
        "enumDescriptions",
        "propertyOrdering",
    ]
)
_UNENFORCED = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "propertyNames",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
    ]
)
_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
_MAX_DEPTH = 100
_MAX_LEVELS = 1000  # of all definitions together: the compiler's native stack overflows at less than 3,000


def standalone(schema: Any, document: Document, where: str, *, strict: bool, complete: bool = False) -> Any:
    """The schema with all that it refers to in its own ``$defs``, and without what says nothing about a value.

    where: path of the schema, for errors. strict: a keyword that is unknown or cannot be enforced, and a reference to
    nothing, is a RequestError that names its path; else it is left out, with a line in the log. complete: a reference
    to nothing is an error in any case.
    """
    walk = _Walk(document, strict, complete)
    made = walk.part(schema, where, 0)
    walk.define()
    if not walk.definitions:
        return made
    return {**made, "$defs": walk.definitions} if isinstance(made, dict) else made


@functools.lru_cache(1000)
def say_once(said: str) -> None:
    """A line in the log; an agent sends the same tools every turn."""
    _log.warning(said)


class _Walk:
    def __init__(self, document: Document, strict: bool, complete: bool):
        self._document, self._strict, self._complete = document, strict, complete or strict
        self._targets: dict[int, str] = {}  # id of a schema in the document -> its name in the definitions
        self.definitions: dict[str, Any] = {}
        self._deepest = 0
        self._todo: list[tuple[str, Any, str]] = []  # (name, schema, where it was referred to)

    def define(self) -> None:
        """Make what was referred to, one by one: a chain of references may be long."""
        levels = self._deepest
        while self._todo:
            name, schema, where = self._todo.pop()
            self._deepest = 0
            self.definitions[name] = self.part(schema, where, 1)
            levels += self._deepest
            if levels > _MAX_LEVELS:
                raise RequestError(f"{where[:80]} leads to more than {_MAX_LEVELS} levels of schemas; need fewer")

    def part(self, schema: Any, where: str, depth: int) -> Any:
        if not isinstance(schema, Mapping):
            if isinstance(schema, bool) or self._strict:
                return schema  # the compiler refuses what is no schema
            return True
        if depth > _MAX_DEPTH:
            raise RequestError(f"{where[:80]}... is nested deeper than {_MAX_DEPTH} schemas; need a flatter one")
        self._deepest = max(self._deepest, depth)
        made: dict[str, Any] = {}
        for word, value in schema.items():
            self._keyword(made, word, value, f"{where}.{word}", depth)
        return _folded(made)

    def _keyword(self, made: dict[str, Any], word: str, value: Any, where: str, depth: int) -> None:
        if word == "$ref" and isinstance(value, str):
            self._reference(made, value, where)
        elif word == "type":
            self._type(made, value, where)
        elif word in _ONE or (word in _LISTS and not isinstance(value, list)):
            many = isinstance(value, list)
            made[word] = self._list(value, where, depth) if many else self.part(value, where, depth + 1)
        elif word in _LISTS:
            made[word] = self._list(value, where, depth)
        elif word in _NAMED and isinstance(value, Mapping):
            made[word] = {k: self.part(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
        elif word == "format" and isinstance(value, str):
            if value in _FORMATS:
                made[word] = value
            else:
                self._unable(f"{where} is the format {value!r:.60}, which cannot be enforced")
        elif word == "pattern" and isinstance(value, str) and LOOKS.search(value) and not self._strict:
            self._unable(f"{where} looks around or back, which cannot be enforced")
        elif word in _VALUES or word in _NAMED:
            made[word] = value
        elif word == "x-guidance" and depth == 0:
            made[word] = value  # options of the compiler
        elif word in _SAID or word.startswith("x-") or (word == "uniqueItems" and value is False):
            pass
        elif word in _UNENFORCED:
            self._unable(f"{where}: the keyword {word} cannot be enforced")
        else:
            self._unable(f"{where}: the keyword {word!r:.60} is unknown")

    def _list(self, parts: list, where: str, depth: int) -> list:
        return [self.part(p, f"{where}.{n}", depth + 1) for n, p in enumerate(parts)]

    def _type(self, made: dict[str, Any], value: Any, where: str) -> None:
        names = value if isinstance(value, list) else [value]
        found = [TYPE_OF.get(n.lower()) if isinstance(n, str) else None for n in names]
        if None in found:
            self._unable(f"{where} names the type {names[found.index(None)]!r:.60}, which does not exist")
            return
        made["type"] = list(dict.fromkeys(found)) if isinstance(value, list) else found[0]

    def _reference(self, made: dict[str, Any], ref: str, where: str) -> None:
        given = {"$ref": ref}
        found = self._document.resolve(given)
        try:
            check_resolved(given, found)
        except RequestError as error:
            if self._complete:
                raise RequestError(f"{where}: {error}") from None
            self._unable(f"{where}: {error}")
            return
        found = self._document.find(ref)  # one step: a reference on the way may have keywords beside it
        name = self._targets.get(id(found))
        if name is None:
            name = self._targets[id(found)] = f"d{len(self._targets)}"
            self._todo.append((name, found, where))
        made["$ref"] = f"#/$defs/{name}"

    def _unable(self, said: str) -> None:
        if self._strict:
            raise RequestError(f"{said}; leave it out, or leave strict out")
        say_once(f"left out of a schema: {said}")


def whole(schema: Any, where: str, *, strict: bool) -> Any:
    """``standalone`` of a document by itself, in which every reference must lead somewhere."""
    return standalone(schema, Document(schema), where, strict=strict, complete=True)


def _folded(made: dict[str, Any]) -> dict[str, Any]:
    """Without an ``allOf`` whose only part can stand in its place."""
    parts = made.get("allOf")
    if isinstance(parts, list):
        parts = [p for p in parts if p not in ({}, True)]
        rest = {k: v for k, v in made.items() if k != "allOf"}
        if not parts:
            return rest
        if len(parts) == 1 and not rest and isinstance(parts[0], dict):
            return parts[0]
    return made
