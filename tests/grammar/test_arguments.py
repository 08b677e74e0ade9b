"""Arguments typed by the tool's schema."""

import json

import pytest

from flint_jax.errors import RequestError
from flint_jax.grammar import State, Tool
from flint_jax.grammar.arguments import typed_json
from flint_jax.grammar.tools import schema_types
from tests.grammar.outputs import call, collect, parts, run, tokens, whole


def argument(schema, raw):
    """JSON text of the only argument, read from a call at every split."""
    tool = Tool("f", {"type": "object", "properties": {"k": schema}})
    text = parts(call("f", k=raw), start=State.CONTENT, tools=[tool])[2][0][1]
    assert text.startswith('{"k": ')
    return text[len('{"k": ') : -1]


INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "string"}]}]}


@pytest.mark.parametrize(
    ("schema", "raw", "expected"),
    [
        ({"type": "string"}, '{"a":1}', r'"{\"a\":1}"'),
        ({"type": "string"}, "5", '"5"'),
        ({"type": "string"}, "  Paris \n", r'"  Paris \n"'),
        ({"type": "string"}, "", '""'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "integer"}, "3", "3"),
        ({"type": "integer"}, " 3 ", "3"),
        ({"type": "integer"}, "3.0", "3.0"),
        ({"type": "integer"}, "three", '"three"'),
        ({"type": "integer"}, "1_000", '"1_000"'),
        ({"type": "integer"}, "", '""'),
        ({"type": "integer"}, "9" * 40, "9" * 40),
        ({"type": "number"}, "2.50", "2.5"),
        ({"type": "number"}, "2.0", "2"),
        ({"type": "number"}, "1e3", "1000"),
        ({"type": "number"}, "1e300", "1e+300"),
        ({"type": "number"}, "1e999", '"1e999"'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "-Infinity", '"-Infinity"'),
        ({"type": "number"}, "-0.0", "0"),
        ({"type": "number"}, "9007199254740993", "9007199254740993"),
        ({"type": "number"}, "9007199254740991.0", "9007199254740991"),
        ({"type": "number"}, "9007199254740992.0", "9007199254740992.0"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "1", "true"),
        ({"type": "boolean"}, " False ", "false"),
        ({"type": "boolean"}, "0", "false"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": "boolean"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, " NULL ", "null"),
        ({"enum": ["on", None]}, "null", "null"),
        ({"type": ["string", "null"]}, '"q"', r'"\"q\""'),
        ({"type": ["integer", "boolean"]}, "1", "1"),
        ({"type": ["object", "array", "string"]}, "[1]", "[1]"),
        ({"type": ["object", "string"]}, "[1]", '"[1]"'),
        ({"type": ["object", "string"]}, '{"a": 1}', '{"a": 1}'),
        (INT_OR_STRING, "7", "7"),
        (INT_OR_STRING, "12a", '"12a"'),
        (INT_OR_STRING, "7.5", '"7.5"'),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["1", "2"]}, "2", '"2"'),
        ({"enum": [True, None]}, "true", "true"),
        ({"enum": [1.5]}, "1.5", "1.5"),
        ({"type": "object", "properties": {"n": {"type": "integer"}}}, '{"n":"5"}', '{"n": "5"}'),
        ({"type": "object"}, "{'n': 5}", "\"{'n': 5}\""),
        ({"type": "object"}, "[1, 2]", "[1, 2]"),
        ({"type": "object"}, '{"é": 1.50}\n', '{"é": 1.5}'),
        ({"type": "object"}, '{"a": 1e999}', r'"{\"a\": 1e999}"'),
        ({"type": "object"}, '{"a": NaN}', r'"{\"a\": NaN}"'),
        ({"type": "object"}, r'{"a": "\ud800"}', '{"a": "\ufffd"}'),
        ({"type": "array", "items": {"type": "integer"}}, '["1"]', '["1"]'),
        ({"type": "array"}, "one, two", '"one, two"'),
        ({"type": "int"}, "3", "3"),
        ({"type": "float"}, "3.5", "3.5"),
        ({"type": "bool"}, "true", "true"),
        ({"type": "dict"}, "{}", "{}"),
        ({"type": "list"}, "[]", "[]"),
        ({"type": ["str", "int"]}, "x", '"x"'),
        ({"type": ["str", "int"]}, '"x"', r'"\"x\""'),
        ({"type": "Integer"}, "3", "3"),
        ({"$ref": "#/$defs/n"}, "3", "3"),
        ({"type": "strnig"}, "3", '"3"'),
        ({}, "3", "3"),
        (True, "3", "3"),
        (None, "3", "3"),
        # no type said
        ({}, '{"a": [1]}', '{"a": [1]}'),
        ({}, "a b", '"a b"'),
        ({}, "1e3", "1000"),
        ({}, "True", '"True"'),
        ({}, "007", '"007"'),
        ({"description": "x"}, "8", "8"),
        ({"items": {"type": "integer"}}, "[1]", "[1]"),
        ({"items": {}}, "a", '"a"'),
        ({"properties": {"a": {}}}, '{"a": 1}', '{"a": 1}'),
        ({"anyOf": [{}, {"type": "null"}]}, "8", "8"),
        ({"type": "string", "anyOf": [{"minLength": 1}, {"format": "uri"}]}, "8", '"8"'),
        ({"allOf": [{"type": "string"}, {"description": "x"}]}, "8", '"8"'),
        # members before types
        ({"enum": ["01", 1]}, "01", '"01"'),
        ({"enum": ["01", 1]}, "1", "1"),
        ({"enum": ["01", 1]}, "1.0", "1"),
        ({"enum": [True, "1"]}, "1", '"1"'),
        ({"enum": [True, "1"]}, "true", "true"),
        ({"enum": [1, "1"]}, "1", "1"),
        ({"enum": ["null", None]}, "null", '"null"'),
        ({"const": "5"}, "5", '"5"'),
        ({"const": {"a": [1, True]}}, '{"a":[1,true]}', '{"a": [1, true]}'),
        ({"anyOf": [{"const": "1"}, {"type": "integer"}]}, "1", '"1"'),
        ({"anyOf": [{"const": "1"}, {"type": "integer"}]}, "2", "2"),
        ({"enum": [1, True]}, "1", "1"),
        # numbers of JSON
        ({"type": "integer"}, "1e3", '"1e3"'),
        ({"type": "integer"}, "3.5", '"3.5"'),
        ({"type": "integer"}, "٣", '"٣"'),
        ({"type": "integer"}, "+3", '"+3"'),
        ({"type": "integer"}, "007", '"007"'),
        ({"type": "integer"}, "-0", "0"),
        ({"type": "number"}, "1_0.5", '"1_0.5"'),
        ({"type": "number"}, ".5", '".5"'),
        ({"type": "number"}, "5.", '"5."'),
        ({"type": "number"}, "\u0663.\u0665", '"\u0663.\u0665"'),
        ({"type": ["integer", "string"]}, "007", '"007"'),
        ({"type": ["integer", "string"]}, "1e3", '"1e3"'),
        ({"type": ["integer", "string"]}, "7", "7"),
        ({"type": ["boolean", "string"]}, "1", '"1"'),
    ],
)
def test_typing(schema, raw, expected):
    assert argument(schema, raw) == expected


DEFINED = {
    "$defs": {
        "when": {"type": "object", "properties": {"kind": {"type": "string"}}},
        "ids": {"type": "array", "items": {"type": "integer"}},
        "n": {"$anchor": "count", "type": "integer"},
        "text": {"$id": "https://x.example/text", "type": "string"},
        "a/b~c d": {"type": "boolean"},
        "many": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
        "circle": {"$ref": "#/$defs/circle"},
    }
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("schema", "raw", "expected"),
    [
        ({"$ref": "#/$defs/when"}, '{"kind": "week"}', '{"kind": "week"}'),
        ({"$ref": "#/$defs/ids"}, "[1]", "[1]"),
        ({"$ref": "#/$defs/n"}, "3", "3"),
        ({"$ref": "#count"}, "3", "3"),
        ({"$ref": "#/$defs/text"}, "12345", '"12345"'),
        ({"$ref": "https://x.example/text"}, "12345", '"12345"'),
        ({"$ref": "text"}, "12345", '"12345"'),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, "true", "true"),
        ({"$ref": "#/$defs/many/anyOf/1"}, "3", "3"),
        ({"$ref": "#/properties/other"}, "3", '"3"'),
        ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, "12345", '"12345"'),
        ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, "null", "null"),
        ({"allOf": [{"$ref": "#/$defs/when"}], "description": "x"}, '{"kind": "day"}', '{"kind": "day"}'),
        ({"$ref": "#/$defs/circle"}, "3", "3"),
        ({"$ref": "https://elsewhere.example/x"}, "3", "3"),
        ({"$ref": "https://elsewhere.example/x"}, "a", '"a"'),
    ],
)
def test_references_are_followed_strict_or_not(schema, raw, expected, strict):
    tool = Tool("f", DEFINED | {"properties": {"k": schema, "other": {"type": "string"}}}, strict)
    assert parts(call("f", k=raw), start=State.CONTENT, tools=[tool])[2] == [("f", f'{{"k": {expected}}}')]


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/p", "$defs": {"p": {"properties": {"k": {"type": "integer"}}}}},
        {"allOf": [{"properties": {"k": {"type": "integer"}}}, {"properties": {"x": {"type": "string"}}}]},
        {"anyOf": [{"properties": {"k": {"type": "integer"}}}, {"properties": {"x": {"type": "string"}}}]},
        {"patternProperties": {"^k": {"type": "integer"}}},
        {"properties": {"x": {}}, "additionalProperties": {"type": "integer"}},
        {"additionalProperties": True},
    ],
)
def test_an_argument_is_found_wherever_the_schema_has_it(parameters):
    assert parts(call("f", k="3"), tools=[Tool("f", parameters)])[2] == [("f", '{"k": 3}')]


def test_more_digits_than_python_reads_are_a_string():
    for types in ("integer", "number", "object"):
        assert typed_json("9" * 5000, {types}) == f'"{"9" * 5000}"'


def test_types_of_all_branches_are_joined():
    schema = {"type": ["null"], "enum": [1], "allOf": [{"type": "array"}, {"anyOf": [{"oneOf": [{"type": "object"}]}]}]}
    assert schema_types(schema) == {"null", "integer", "array", "object"}


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "null"),
        (True, "boolean"),
        (1, "integer"),
        (1.5, "number"),
        ("a", "string"),
        ({}, "object"),
        ([], "array"),
    ],
)
def test_types_of_enum_values(value, name):
    assert schema_types({"enum": [value]}) == {name}
    assert schema_types({"enum": [value], "type": "array"}) == {name, "array"}


def test_deep_nesting_is_no_error():
    raw = "[" * 100_000
    tool = Tool("f", {"properties": {"k": {"type": "array"}}})
    message = collect(run(tokens(call("f", k=raw), whole), start=State.CONTENT, tools=[tool]))
    assert json.loads(message.calls[0].arguments) == {"k": raw}
    schema = {"type": "integer"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert schema_types(schema) == {"integer"}


@pytest.mark.parametrize("parameters", [None, {}, {"properties": None}, {"properties": {"x": {"type": "integer"}}}])
def test_an_argument_without_schema_is_a_string(parameters):
    assert parts(call("f", k="3"), tools=[Tool("f", parameters)])[2] == [("f", '{"k": "3"}')]


def test_keys_are_trimmed_and_escaped():
    assert parts(call("f", **{' a"\n': "x"}), tools=[Tool("f")])[2] == [("f", '{"a\\"": "x"}')]


@pytest.mark.parametrize(
    "definition",
    [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"k": {"type": "integer"}}}}},
        {"type": "function", "name": "f", "parameters": {"properties": {"k": {"type": "integer"}}}},
        {"name": "f", "input_schema": {"properties": {"k": {"type": "integer"}}}},
    ],
)
def test_tools_of_each_protocol(definition):
    tool = Tool.of(definition)
    assert (tool.name, tool.types("k")) == ("f", {"integer"})


@pytest.mark.parametrize("definition", [{}, {"function": None}, {"function": {"name": 3}}])
def test_a_tool_needs_a_name(definition):
    with pytest.raises(RequestError, match="needs a name"):
        Tool.of(definition)
