"""Grammar of tool calls in the model's own form: name, keys and values between tags, no quotes around strings."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from flint_jax.errors import RequestError
from flint_jax.grammar.tags import CALL, END_CALL, END_KEY, KEY, VALUE
from flint_jax.guided.terms import Rules, literal, one_of
from flint_jax.guided.values import resolved, value_rule

_FREE_KEY = r"/[^<>\s]{1,64}/"
_MAX_UNORDERED = 64  # the grammar counts in 64 bits which keys were there; more keys come in the schema's order
_OPEN = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")


def one_call(rules: Rules, tools: Sequence[Mapping[str, Any]]) -> str:
    """A call of one of the tools, without the tag that opens it.

    tools: ``{"function": {"name", "parameters", "strict"}}`` each.
    """
    return rules.rule(" | ".join(_tool(rules, t["function"]) for t in tools))


def calls(rules: Rules, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
    """One call or, when ``parallel``, several; at most a line break between them."""
    call = rules.rule(f"{rules.tag(CALL)} {one_call(rules, tools)}")
    return f"{call} ({_gap(rules)} {call})*" if parallel else call


def _gap(rules: Rules) -> str:
    r"""A line break, or nothing: templates write calls both ways."""
    return rules.rule(rf"{rules.terminal(literal(chr(10)))}?")


def _tool(rules: Rules, function: Mapping[str, Any]) -> str:
    name, gap = function["name"], _gap(rules)
    try:
        arguments = _arguments(rules, function)
    except RequestError as error:
        raise RequestError(f"the tool {name!r:.64}: {error}", param="tools", code="invalid_value") from None
    return rules.rule(f"{literal(name)} {gap} {arguments} {rules.tag(END_CALL)}")


def _arguments(rules: Rules, function: Mapping[str, Any]) -> str:
    """All arguments of a call, each followed by a gap."""
    strict = function.get("strict") is True
    schema = function.get("parameters", function.get("input_schema"))
    root = schema if isinstance(schema, Mapping) else {}
    if strict:
        schema = resolved(root, root)
        if not isinstance(schema, Mapping) or any(word in schema for word in _OPEN):
            raise RequestError(
                f"strict needs parameters that are a plain object with properties, without {', '.join(_OPEN)} beside "
                "them; write them so, or leave strict out"
            )
    else:
        schema = root
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    more = schema.get("additionalProperties") not in (None, False)
    if not strict and (more or not properties or any(word in schema for word in _OPEN)):
        return f"({_argument(rules, rules.terminal(_FREE_KEY), rules.value())} {_gap(rules)})*"
    required = schema.get("required") if strict else None
    required = [k for k in required if isinstance(k, str)] if isinstance(required, list) else []
    if unknown := [k for k in required if k not in properties]:
        raise RequestError(f"requires {unknown[0]!r:.64}, which is not among its properties")
    known = [(k, value_rule(rules, v, root, strict=strict)) for k, v in properties.items()]
    extra = None
    if strict and more:
        keys = rules.terminal(f"{_FREE_KEY} & ~({one_of(properties)})" if properties else _FREE_KEY)
        extra = _argument(rules, keys, value_rule(rules, schema["additionalProperties"], root, strict=True))
    arguments = [(k in required, _argument(rules, literal(k), v)) for k, v in known]
    arguments.sort(key=lambda a: not a[0])  # required ones first: the grammar asks for a range of bits
    return _selection(rules, arguments, extra)


def _argument(rules: Rules, key: str, value: str) -> str:
    tag, gap = rules.tag, _gap(rules)
    return rules.rule(f"{tag(KEY)} {key} {tag(END_KEY)} {gap} {tag(VALUE)} {value}")


def _selection(rules: Rules, arguments: Sequence[tuple[bool, str]], extra: str | None) -> str:
    """Each argument at most once, the required ones exactly once, in any order; extras any number of times."""
    gap = _gap(rules)
    required = sum(needed for needed, _ in arguments)
    if not 1 <= len(arguments) <= _MAX_UNORDERED:
        parts = [f"({a} {gap}){'' if needed else '?'}" for needed, a in arguments]
        return " ".join([*parts, f"({extra} {gap})*"] if extra else parts)
    return f"{rules.counted(functools.partial(_next, arguments, required, extra, gap))}::0x0"


def _next(arguments, required: int, extra: str | None, gap: str, name: str) -> str:
    done = f'"" %if is_ones([0:{required}])' if required else '""'
    options = [done]
    options += [f"{a} {gap} {name}::set_bit({i}) %if bit_clear({i})" for i, (_, a) in enumerate(arguments)]
    options += [f"{extra} {gap} {name}::_"] if extra else []
    return "\n  | ".join(options)
