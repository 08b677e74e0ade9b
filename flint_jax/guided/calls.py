"""Grammar of tool calls in the model's own form: name, keys and values between tags, no quotes around strings."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from flint_jax.errors import RequestError
from flint_jax.grammar.schemas import Document
from flint_jax.grammar.tags import CALL, END_CALL, END_KEY, KEY, VALUE
from flint_jax.guided.keywords import say_once, standalone
from flint_jax.guided.terms import Rules, literal, one_of
from flint_jax.guided.values import Unsatisfiable, resolved, value_rule

_FREE_KEY = r"/[^<>\s]{1,64}/"
_MAX_UNORDERED = 64  # the grammar counts in 64 bits which keys were there; more keys come in the schema's order
_MAX_ALTERNATIVES = 16  # flat objects made of one schema
_MAX_STEPS = 200  # schemas looked at for them: more can only be a circle
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
    schema = function.get("parameters", function.get("input_schema"))
    root = Document(schema if isinstance(schema, Mapping) else {})
    if function.get("strict") is True:
        return _strict(rules, root)
    sets = list(_alternatives(root.root, root))
    return rules.rule(" | ".join(dict.fromkeys(_loose(rules, part, root) for part in sets)))


def _strict(rules: Rules, root: Document) -> str:
    schema = resolved(root.root, root)
    if not isinstance(schema, Mapping) or any(word in schema for word in _OPEN):
        raise RequestError(
            f"strict needs parameters that are a plain object with properties, without {', '.join(_OPEN)} beside "
            "them; write them so, or leave strict out"
        )
    others = {k: v for k, v in schema.items() if k not in ("properties", "additionalProperties")}
    held = standalone(others, root, "parameters", strict=True)
    if unheld := [word for word in held if word not in ("type", "required")]:
        raise RequestError(f"parameters.{unheld[0]} cannot be enforced over all arguments; leave it or strict out")
    properties, required = _properties(schema), _required(schema)
    if unknown := [k for k in required if k not in properties]:
        raise RequestError(f"requires {unknown[0]!r:.64}, which is not among its properties")
    values = {}
    for key, part in properties.items():
        try:
            values[key] = value_rule(rules, part, root, strict=True, where=f"parameters.properties.{key}")
        except Unsatisfiable as error:
            if key in required:
                raise
            say_once(f"an argument of a strict tool is never given: {error}")
    extra = None
    if schema.get("additionalProperties") not in (None, False):
        keys = _other_keys(rules, properties)
        where = "parameters.additionalProperties"
        extra = _argument(
            rules, keys, value_rule(rules, schema["additionalProperties"], root, strict=True, where=where)
        )
    return _set(rules, values, required, extra)


def _loose(rules: Rules, schema: Mapping[str, Any], root: Document) -> str:
    """Known keys with values of their types, the required ones among them; any other key where the schema is open."""
    properties, required = _properties(schema), _required(schema)
    where = "parameters.properties."
    values = {k: value_rule(rules, v, root, strict=False, where=where + k) for k, v in properties.items()}
    values |= {k: rules.value() for k in required if k not in properties}
    extra = None
    if not properties or schema.get("additionalProperties") not in (None, False) or "patternProperties" in schema:
        extra = _argument(rules, _other_keys(rules, values), rules.value())
    return _set(rules, values, required, extra)


def _alternatives(schema: Any, root: Document, steps: Iterator[int] | None = None) -> Iterator[dict]:
    """Flat objects, of which a call fits one: references followed, parts of ``allOf`` joined, branches told apart.

    Where there are too many branches only what is required anyway counts.
    """
    steps = steps or iter(range(_MAX_STEPS))
    schema = root.resolve(schema)
    if not isinstance(schema, Mapping) or "$ref" in schema or next(steps, None) is None:
        yield {"additionalProperties": True}
        return
    flat = {k: v for k, v in schema.items() if k not in ("$ref", "allOf", "anyOf", "oneOf")}
    found = [flat]
    for word in ("allOf", "anyOf", "oneOf"):
        parts = schema.get(word)
        if not isinstance(parts, list) or not parts:
            continue
        sets = [list(_alternatives(part, root, steps)) for part in parts[:_MAX_ALTERNATIVES]]
        for choices in sets if word == "allOf" else [[one for several in sets for one in several]]:
            if len(found) * len(choices) <= _MAX_ALTERNATIVES and len(parts) <= _MAX_ALTERNATIVES:
                found = [_joined(one, other) for one in found for other in choices]
            else:
                found = [one | {"additionalProperties": True} for one in found]
    yield from found


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both objects at once."""
    more = [s["additionalProperties"] for s in (one, other) if "additionalProperties" in s]
    patterns = {"patternProperties": {}} if "patternProperties" in one or "patternProperties" in other else {}
    return {
        "properties": {**_properties(one), **_properties(other)},
        "required": [*_required(one), *_required(other)],
        **({"additionalProperties": all(m is not False for m in more)} if more else {}),
        **patterns,
    }


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required")
    return [k for k in required if isinstance(k, str)] if isinstance(required, list) else []


def _other_keys(rules: Rules, known: Collection[str]) -> str:
    return rules.terminal(f"{_FREE_KEY} & ~({one_of(known)})" if known else _FREE_KEY)


def _set(rules: Rules, values: Mapping[str, str], required: Collection[str], extra: str | None) -> str:
    arguments = [(k in required, _argument(rules, literal(k), v)) for k, v in values.items()]
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
