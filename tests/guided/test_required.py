"""A call that is held has the arguments that its schema requires, strict or not."""

import json

import pytest

from tests.guided.walk import after, allowed, read, roll, tokenizer, tool, wish

END_CALL = tokenizer().added_tokens["</tool_call>"]
PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}}
PART = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

SCHEMAS = {
    "closed": {"properties": PROPERTIES, "required": ["a", "b"], "additionalProperties": False},
    "plain": {"properties": PROPERTIES, "required": ["a", "b"]},
    "open": {"properties": PROPERTIES, "required": ["a", "b"], "additionalProperties": True},
    "typed extras": {"properties": PROPERTIES, "required": ["a", "b"], "additionalProperties": {"type": "integer"}},
    "patterns": {"properties": PROPERTIES, "required": ["a", "b"], "patternProperties": {"^x": {}}},
    "not among the properties": {"properties": {"a": {}}, "required": ["a", "b"]},
    "no properties": {"type": "object", "required": ["a", "b"]},
    "reference": {"$ref": "#/$defs/t", "$defs": {"t": {"properties": PROPERTIES, "required": ["a", "b"]}}},
    "all of": {"allOf": [PART, {"$ref": "#/$defs/t"}], "$defs": {"t": {"properties": PROPERTIES, "required": ["b"]}}},
    "any of": {"anyOf": [PART | {"required": ["a", "b"]}, {"properties": PROPERTIES, "required": ["b", "a"]}]},
}


def argument(key, value):
    return ("<arg_key>", key, "</arg_key>", "<arg_value>", value, "</arg_value>")


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_a_forced_call_has_its_required_arguments(schema, choice):
    forced = wish(tool("f", schema), choice=choice, name="f" if choice == "named" else None)
    for first, second in ((("a", "1"), ("b", "x")), (("b", "x"), ("a", "1"))):
        head = ("<tool_call>", "f", *argument(*first))
        assert END_CALL not in allowed(after(forced, "<tool_call>", "f"))
        assert END_CALL not in allowed(after(forced, *head))
        assert END_CALL in allowed(after(forced, *head, *argument(*second)))


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_whatever_is_drawn(schema):
    forced = wish(tool("f", schema), choice="named", name="f")
    for seed in range(4):
        out, ended = roll(forced, seed)
        assert not ended or json.loads(read(out, forced.tools).calls[0].arguments).keys() >= {"a", "b"}


def test_one_of_several_sets_is_enough():
    branches = [{"properties": {k: {"type": "integer"}}, "required": [k]} for k in "ab"]
    forced = wish(tool("f", {"type": "object", "anyOf": branches}), choice="required")
    assert END_CALL not in allowed(after(forced, "<tool_call>", "f"))
    for key in "ab":
        assert END_CALL in allowed(after(forced, "<tool_call>", "f", *argument(key, "1")))


def test_extras_come_beside_the_required_ones_and_do_not_stand_for_them():
    forced = wish(tool("f", SCHEMAS["open"]), choice="required")
    head = ("<tool_call>", "f", *argument("zz", "1"), *argument("a", "1"))
    assert END_CALL not in allowed(after(forced, *head))
    assert END_CALL in allowed(after(forced, *head, *argument("b", "1"), *argument("y", "2")))


def test_a_loose_tool_beside_a_strict_one():
    strict = tool("g", {"type": "object", "properties": {}}, strict=True)
    free = wish(strict, tool("f", SCHEMAS["plain"]))
    assert END_CALL not in allowed(after(free, "<tool_call>", "f", *argument("a", "1")))


@pytest.mark.parametrize("junk", [None, "a", [3], {"a": 1}])
def test_a_required_that_is_no_list_of_names_asks_for_nothing(junk):
    forced = wish(tool("f", {"properties": PROPERTIES, "required": junk}), choice="required")
    assert END_CALL in allowed(after(forced, "<tool_call>", "f"))


def test_circles_and_doublings_end():
    doubled = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    for schema in ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"allOf": [{"$ref": "#/$defs/d0"}], "$defs": doubled}):
        forced = wish(tool("f", schema | {"required": ["a"]}), choice="required")
        assert END_CALL in allowed(after(forced, "<tool_call>", "f", *argument("a", "1")))
