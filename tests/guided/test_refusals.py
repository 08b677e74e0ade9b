"""What cannot be compiled is refused with a reason, and the rest compiles: bad formats, bad tools, large ones, junk."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flint_jax.errors import RequestError
from flint_jax.guided.terms import json_rule
from tests.guided.schemas import fits
from tests.guided.walk import allowed, compiler, read, roll, structured, tool, wish


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("regex", "(", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", 7, "string"),
        ("json", {"type": "strnig"}, "strnig"),
        ("json", {"$ref": "#/nope"}, "nope"),
        ("json", {"type": "string", "format": "unheard-of"}, "unheard-of"),
        ("json", {"enum": []}, "empty"),
        ("json", False, "false"),
        ("json", "{", "not JSON"),
        ("json", 3, "object"),
        ("choice", [], "non-empty"),
        ("choice", "a", "list"),
        ("choice", ["a", 1], "strings"),
        ("grammar", "start: nowhere", "nowhere"),
        ("grammar", "", "string"),
        ("grammar", "((((((((", None),
        ("structural_tag", {"a": 1}, "not supported"),
        ("regex", "a" * (1 << 20), "at most"),
    ],
)
def test_bad_formats_say_why(kind, value, reason):
    with pytest.raises(RequestError, match=reason) as caught:
        compiler()(structured(kind, value))
    assert caught.value.param == f"guided_{kind}"
    assert caught.value.code == "invalid_value"
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "object", "properties": {"a": {"type": "strnig"}}}, r"parameters\.properties\.a\.type.*strnig"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "strnig"}}}}, "strnig"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}, "not in it"),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "itself"),
        ({"type": "object", "properties": {}, "required": ["b"]}, "requires 'b'"),
        ({"anyOf": [{"type": "object"}]}, "plain object"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "unclosed"),
        ({"type": "object", "properties": {"a": {"type": "string", "maxLength": -1}}}, "whole numbers"),
    ],
)
def test_bad_strict_tools_say_why(parameters, reason):
    forced = wish(tool("f", parameters, strict=True))
    with pytest.raises(RequestError, match=reason) as caught:
        compiler()(forced)
    assert caught.value.param == "tools"


def test_two_formats_are_one_too_many():
    with pytest.raises(RequestError, match="response_format"):
        compiler()(structured("regex", "a", format={"type": "json_object"}))


def test_large_and_deep_schemas_compile():
    many = {"enum": [f"choice number {i}" for i in range(1000)]}
    deep = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    for schema in (many, deep):
        assert compiler()(structured("json", schema))


def test_one_of_counts_as_any_of():
    out, ended = roll(structured("json", {"oneOf": [{"type": "null"}, {"enum": [None, 1]}]}), 1)
    assert ended
    assert json.loads(read(out).content) in (None, 1)


def test_tools_leave_out_what_cannot_be_enforced_unless_strict():
    unique = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": unique}, "required": ["a"]}
    with pytest.raises(RequestError, match=r"parameters\.properties\.a\.uniqueItems"):
        compiler()(wish(tool("f", schema, strict=True)))
    forced = wish(tool("f", schema), choice="required")
    out, ended = roll(forced, 0)
    assert ended
    assert set(json.loads(read(out, forced.tools).calls[0].arguments)["a"]) <= {1, 2}


def test_unsupported_keywords_are_left_out_unless_strict():
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    lenient = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    out, ended = roll(wish(format=lenient), 0)
    assert ended
    assert fits(json.loads(read(out).content), schema)
    lenient["json_schema"]["strict"] = True
    with pytest.raises(RequestError, match="uniqueItems") as caught:
        compiler()(wish(format=lenient))
    assert caught.value.param == "response_format"


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9]+\.)+[A-Za-z]{2,}$"  # of Zod


@pytest.mark.parametrize("pattern", [EMAIL, "(?<=a)b", "(?<!a)b", r"(a|b)\1", r"\\(?=a)"])
def test_a_pattern_that_looks_around_is_left_out_unless_strict(pattern):
    schema = {"type": "object", "properties": {"pattern": {"type": "string", "pattern": pattern}}}
    schema |= {"required": ["pattern"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    out, ended = roll(wish(format=form), 0)
    assert not ended or isinstance(json.loads(read(out).content)["pattern"], str)
    nested = {"type": "object", "properties": {"a": {"type": "array", "items": schema}}, "required": ["a"]}
    compiler()(wish(tool("f", nested), choice="required"))
    form["json_schema"]["strict"] = True
    with pytest.raises(RequestError, match="regex parse error"):
        compiler()(wish(format=form))


@pytest.mark.parametrize("pattern", ["^(?:a|b)$", r"\(\?=", "(?P<x>a)", r"\\\\1", "[(]?="])
def test_other_patterns_stay(pattern):
    schema = {"type": "string", "pattern": pattern}
    assert json.loads(json_rule(schema, lenient=True).removeprefix("%json "))["pattern"] == pattern
    kept = {"const": {"pattern": "(?=a)"}, "enum": [{"pattern": "(?=a)"}], "default": {"pattern": "(?=a)"}}
    assert json.loads(json_rule(kept, lenient=True).removeprefix("%json ")).items() >= kept.items()


_WORDS = (
    "type",
    "properties",
    "items",
    "enum",
    "const",
    "anyOf",
    "allOf",
    "$ref",
    "required",
    "pattern",
    "maxLength",
    "a",
)
_LEAVES = st.sampled_from(["string", "object", "null", "#", "#/properties/a", "(", "", True, None, -1, 2.5])
_JUNK = st.recursive(
    _LEAVES, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(_WORDS), part, max_size=4)
)


@settings(max_examples=150, deadline=None)
@example({"$ref": "#/properties/a", "type": "string", "properties": {"a": "string"}}, "", "")
@example({"$ref": "#/properties/a", "type": "string", "properties": {"a": True}}, "", "")
@given(st.dictionaries(st.sampled_from(_WORDS), _JUNK, max_size=5), _JUNK, st.text('([{.*+?)]}|\\ab:"/', max_size=9))
def test_junk_compiles_or_says_why(schema, value, text):
    tools = [tool("f", schema, strict=strict) for strict in (False, True)]
    wishes = [wish(t, choice="required") for t in tools]
    wishes += [wish(format={"type": "json_schema", "json_schema": {"schema": schema}}), structured("json", value)]
    wishes += [structured(kind, text) for kind in ("regex", "grammar")] + [structured("choice", value)]
    refused = []
    for forced in wishes:
        try:
            made = compiler()(forced)
        except RequestError as error:
            refused.append(error)
        else:
            assert allowed(made.begin())
    assert all(error.param and 0 < len(str(error)) < 1000 for error in refused)
