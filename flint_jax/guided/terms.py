"""Building blocks of grammars in llguidance's Lark: literals, tags, free text that ends at a tag."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flint_jax.grammar.tags import END_VALUE

ANY = "/(?s:.*)/"
INTEGER = "/-?(0|[1-9][0-9]{0,17})/"  # at most 18 digits: fits 64 bits, and ends
NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/"
WHITE = r"[ \n\r\t]{1,96}"  # between JSON tokens: enough for deep indentation, and a model cannot go on with it forever

_DATA = frozenset({"const", "default", "enum", "example", "examples"})  # hold values, not schemas
LOOKS = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9])")  # (?= (?! (?<= (?<! \1


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text)


def one_of(texts: Iterable[str]) -> str:
    """One of these texts."""
    return " | ".join(map(literal, dict.fromkeys(texts)))


def json_rule(schema: Any, *, lenient: bool = False) -> str:
    """JSON that fits a schema, without space around it. ``oneOf`` counts as ``anyOf``.

    lenient: leave out keywords that cannot be enforced, instead of refusing the schema.
    """
    if schema is True:
        schema = {}
    if lenient:
        schema = _without_look_around(schema)
    if isinstance(schema, Mapping):
        options = {"whitespace_pattern": WHITE, "coerce_one_of": True, "lenient": lenient}
        given = schema.get("x-guidance")
        schema = {**schema, "x-guidance": options | (given if isinstance(given, Mapping) else {})}
    return f"%json {json.dumps(schema)}"


@functools.lru_cache(512)
def why_not(rule: str) -> str:
    """Why a rule of ``json_rule`` does not compile or fits nothing; "" when it does."""
    from llguidance import LLMatcher

    return reason(LLMatcher.validate_grammar(f"start: {rule}", None))


def reason(error: str) -> str:
    """The library's reason on one line, without the lines of our grammar that it quotes."""
    lines = [line for line in error.splitlines() if not line.lstrip()[:1].isdigit() or "|" not in line]
    return " ".join(" ".join(lines).removesuffix("^").split())[:500]


def _without_look_around(schema: Any) -> Any:
    """The schema without patterns that look around or back, as the ones that Zod writes for e-mail addresses do: no
    automaton can follow them. (A property may be called ``pattern``; its schema is no string.)
    """
    if isinstance(schema, list):
        return [_without_look_around(s) for s in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        k: v if k in _DATA else _without_look_around(v)
        for k, v in schema.items()
        if not (k == "pattern" and isinstance(v, str) and LOOKS.search(v))
    }


class Rules:
    """A growing Lark grammar. ``added``: spelling -> id of the vocabulary's added tokens."""

    def __init__(self, added: Mapping[str, int]):
        self._added = added
        self._lines: dict[str, str] = {}  # left side -> right side
        self._names: dict[tuple[str, str, str], str] = {}
        self._count = itertools.count()

    def tag(self, tag: str) -> str:
        """A tag: its token, or its characters where the vocabulary has none."""
        return f"<[{self._added[tag]}]>" if self.is_token(tag) else literal(tag)

    def is_token(self, tag: str) -> bool:
        """Whether the vocabulary has the tag as one token."""
        return tag in self._added

    def rule(self, body: str, options: str = "") -> str:
        """The name of a rule with this body; equal ones are one."""
        return self._name("rule", body, options)

    def terminal(self, body: str) -> str:
        """The name of a terminal with this body: one regular expression."""
        return self._name("TERM", body, "")

    def counted(self, body: Callable[[str], str]) -> str:
        """The name of a rule with a 64-bit parameter. body: makes its body from its name."""
        name = f"rule_{next(self._count)}"
        self._lines[f"{name}::_"] = body(name)
        return name

    def until(self, tag: str) -> str:
        """Any text and the tag that ends it, the first one."""
        if not self.is_token(tag):
            return self.rule(ANY, f"[suffix={literal(tag)}]")
        return f"{self.terminal(ANY)} {self.tag(tag)}"

    def value(self, body: str | None = None) -> str:
        """An argument's text and the tag that ends it. body: regular expression, None for any text.

        The tag's characters are no part of the text: readers of the output end the value there.
        """
        if not self.is_token(END_VALUE):
            return self.until(END_VALUE)
        outside = r"~/(?s:.*)<\/arg_value>(?s:.*)/"
        return f"{self.terminal(f'({body or ANY}) & {outside}')} {self.tag(END_VALUE)}"

    def text(self, start: str) -> str:
        """The grammar, which begins with the rule body ``start``."""
        lines = (f"{head}: {body}" for head, body in self._lines.items())
        return "\n".join([f"start: {start}", *lines, ""])

    def _name(self, kind: str, body: str, options: str) -> str:
        key = (kind, body, options)
        if key not in self._names:
            self._names[key] = name = f"{kind}_{next(self._count)}"
            self._lines[name + options] = body
        return self._names[key]
