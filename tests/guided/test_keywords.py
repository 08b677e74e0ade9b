"""Each keyword of JSON schema that is enforced, through strict tools, formats and the arguments of forced calls."""

import json

import pytest

from flint_jax.errors import RequestError
from flint_jax.grammar.readers import spelled
from tests.guided.walk import after, allowed, compiler, tokenizer, tool, wish

END_VALUE = tokenizer().added_tokens["</arg_value>"]
ENDS = tokenizer().eog_ids

# (schema, values that fit, values that do not)
CASES = {
    "type": ({"type": "integer"}, [0, -7, 120], ["x", True, None]),
    "types": ({"type": ["integer", "null"]}, [3, None], [True, "a"]),
    "alias": ({"type": "int"}, [3], ["x"]),
    "enum": ({"enum": ["a", "b c", 1]}, ["a", "b c", 1], ["d", 2]),
    "const": ({"const": "only"}, ["only"], ["other"]),
    "const object": ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
    "minimum": ({"type": "integer", "minimum": 5}, [5, 70], [4, -1]),
    "maximum": ({"type": "integer", "maximum": 5}, [5, -3], [6]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 5}, [6], [5]),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 5}, [4], [5]),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, [10, 15], [11]),
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", ""]),
    "unanchored pattern": ({"type": "string", "pattern": "b"}, ["abc"], ["acc"]),
    "minLength": ({"type": "string", "minLength": 2}, ["ab"], ["a"]),
    "maxLength": ({"type": "string", "maxLength": 2}, ["ab"], ["abc"]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "now"]),
    "uuid": ({"type": "string", "format": "uuid"}, ["00000000-0000-0000-0000-00000000000a"], ["0-0"]),
    "items": ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"]]),
    "items alone": ({"type": "array", "items": False}, [[]], [[1]]),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, [[None]], [[1]]),
    "minItems": ({"type": "array", "minItems": 2}, [[1, 2]], [[1]]),
    "maxItems": ({"type": "array", "maxItems": 1}, [[1]], [[1, 2]]),
    "properties": ({"type": "object", "properties": {"a": {"type": "null"}}}, [{"a": None}, {}], [{"a": 1}]),
    "required": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]},
        [{"b": 1}, {"a": 1, "b": 1}],
        [{}, {"a": 1}],
    ),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        [{"a": 1}],
        [{"c": 1}],
    ),
    "typed extras": ({"type": "object", "additionalProperties": {"type": "null"}}, [{"c": None}], [{"c": 1}]),
    "patternProperties": ({"type": "object", "patternProperties": {"^x": {"type": "null"}}}, [{"x": None}], [{"x": 1}]),
    "minProperties": ({"type": "object", "minProperties": 1}, [{"x": 1}], [{}]),
    "enum and type": ({"type": "string", "enum": ["a", 1]}, ["a"], [1]),
    "enum and numbers": ({"type": "integer", "enum": [1, 2, "a"]}, [1, 2], ["a", 3]),
    "enum and maximum": ({"enum": [1, 20], "maximum": 5}, [1], [20]),
    "enum and pattern": ({"type": "string", "enum": ["ab", "b"], "pattern": "^a"}, ["ab"], ["b"]),
    "empty branch": ({"anyOf": [{"enum": []}, {"type": "null"}]}, [None], ["a", 1]),
    "false branch": ({"anyOf": [False, {"type": "null"}]}, [None], ["a", 1]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], [True]),
    "oneOf": ({"oneOf": [{"type": "array"}, {"type": "null"}]}, [[1], None], [1]),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, [5], [4, "a"]),
    "allOf of one": ({"allOf": [{"type": "string", "maxLength": 2}], "description": "x"}, ["ab"], ["abc"]),
    "$ref": ({"$ref": "#/$defs/small"}, [3], [10, "a"]),
    "$ref into a list": ({"$ref": "#/$defs/many/anyOf/1"}, [None], [3]),
    "$ref with escapes": ({"$ref": "#/$defs/a~1b%20c"}, [True], [3]),
    "$anchor": ({"$ref": "#low"}, [3], [10]),
    "$id": ({"$ref": "https://x.example/text"}, ["ab"], ["abc"]),
    "$ref beside a keyword": ({"$ref": "#/$defs/whole", "maximum": 3}, [3], [4]),
    "$ref beside its own keyword": ({"$ref": "#/$defs/small", "maximum": 3}, [3], [5, 10]),
    "$ref of a string beside a keyword": ({"$ref": "#/$defs/word", "maxLength": 2}, ["ab"], ["abc", "a1"]),
    "$ref behind a $ref": ({"$ref": "#/$defs/few"}, [3], [4]),
    "$ref behind a $ref, inside": ({"type": "array", "items": {"$ref": "#/$defs/few"}}, [[3]], [[4]]),
    "$ref in a branch": ({"anyOf": [{"$ref": "#/$defs/whole", "maximum": 3}, {"type": "null"}]}, [3, None], [4]),
    "$ref inside": ({"type": "array", "items": {"$ref": "#/$defs/small"}}, [[3]], [[10]]),
    "recursive": ({"$ref": "#/$defs/tree"}, [{"kids": [{"kids": []}]}], [{"kids": [1]}]),
    "annotations": ({"type": "null", "title": "t", "default": 1, "x-any": 2, "deprecated": True}, [None], [1]),
}
DEFS = {
    "small": {"$anchor": "low", "type": "integer", "maximum": 9},
    "many": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "a/b c": {"type": "boolean"},
    "text": {"$id": "https://x.example/text", "type": "string", "maxLength": 2},
    "whole": {"type": "integer"},
    "few": {"$ref": "#/$defs/whole", "maximum": 3},
    "word": {"type": "string", "pattern": "^[a-z]*$"},
    "tree": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
}
REFUSED = {
    "not": {"not": {"type": "null"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {}},
    "if": {"if": {}, "then": {}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 1}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "a typing error": {"type": "string", "maxlength": 3},
    "type": {"type": "frob"},
    "one of the types": {"type": ["string", "frob"]},
    "format": {"type": "string", "format": "unheard-of"},
    "reference": {"$ref": "#/$defs/gone"},
    "elsewhere": {"$ref": "https://elsewhere.example/x"},
    "circle": {"$ref": "#/$defs/circle"},
    "empty enum": {"enum": []},
    "false": False,
    "empty range": {"type": "integer", "minimum": 5, "maximum": 4},
    "inside items": {"type": "array", "items": {"not": {}}},
    "inside a branch": {"anyOf": [{"type": "null"}, {"type": "string", "frob": 1}]},
}
CASES_BY_VALUE = [
    pytest.param(schema, value, fits, id=f"{name}-{json.dumps(value)}")
    for name, (schema, good, bad) in CASES.items()
    for value, fits in [*((v, True) for v in good), *((v, False) for v in bad)]
]


def may_come(forced, *parts, end):
    """Whether the whole text may come and be the end."""
    try:
        return bool(set(end) & set(allowed(after(forced, *parts))))
    except AssertionError:
        return False


def parameters(schema):
    return {"$defs": DEFS | {"circle": {"$ref": "#/$defs/circle"}}, "properties": {"k": schema}, "required": ["k"]}


def in_call(schema, value, *, strict):
    forced = wish(tool("f", parameters(schema), strict=strict), choice="required")
    head = ("<tool_call>", "f", "<arg_key>", "k", "</arg_key>", "<arg_value>")
    return may_come(forced, *head, spelled(value), end=[END_VALUE])


def formatted(schema, *, strict=True, **more):
    whole = parameters(schema) | {"type": "object", "additionalProperties": False}
    return wish(format={"type": "json_schema", "json_schema": {"schema": whole, "strict": strict}, **more})


@pytest.mark.parametrize(("schema", "value", "fits"), CASES_BY_VALUE)
def test_a_strict_tool_takes_what_fits_and_nothing_else(schema, value, fits):
    assert in_call(schema, value, strict=True) == fits


@pytest.mark.parametrize(("schema", "value", "fits"), CASES_BY_VALUE)
def test_a_format_takes_what_fits_and_nothing_else(schema, value, fits):
    text = json.dumps({"k": value})
    assert may_come(formatted(schema), text, end=ENDS) == fits
    assert may_come(formatted(schema, strict=False), text, end=ENDS) == fits


@pytest.mark.parametrize(("schema", "value", "fits"), [c for c in CASES_BY_VALUE if c.values[2]])
def test_a_loose_forced_call_takes_what_fits(schema, value, fits):
    assert in_call(schema, value, strict=False)


@pytest.mark.parametrize("name", ["items", "required", "additionalProperties", "$ref inside", "recursive"])
def test_a_loose_forced_call_holds_objects_and_arrays(name):
    schema, _, bad = CASES[name]
    assert not any(in_call(schema, value, strict=False) for value in bad)


@pytest.mark.parametrize("schema", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_enforced_is_refused_under_strict_and_open_else(schema):
    with pytest.raises(RequestError, match=r"k\b") as caught:
        compiler()(wish(tool("f", parameters(schema), strict=True)))
    assert caught.value.param == "tools"
    with pytest.raises(RequestError) as caught:
        compiler()(formatted(schema, param="text.format"))
    assert caught.value.param == "text.format"
    assert "response_format" not in str(caught.value)
    assert compiler()(wish(tool("f", parameters(schema)), choice="required"))


def test_what_is_left_out_is_said_with_its_path(caplog):
    compiler()(wish(tool("f", parameters({"type": "array", "items": {"frob": 1}})), choice="required"))
    assert "parameters.properties.k.items.frob" in caplog.text


def test_references_to_the_whole_document_stay_whole_in_an_argument():
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/properties/tree"}}}}
    tree |= {"required": ["kids"], "additionalProperties": False}
    schema = {"type": "object", "properties": {"tree": tree}, "required": ["tree"], "additionalProperties": False}
    head = ("<tool_call>", "f", "<arg_key>", "tree", "</arg_key>", "<arg_value>")
    for strict in (True, False):
        forced = wish(tool("f", schema, strict=strict), choice="required")
        assert may_come(forced, *head, '{"kids": [{"kids": []}]}', end=[END_VALUE])
        assert not may_come(forced, *head, '{"kids": [{}]}', end=[END_VALUE])


def test_an_argument_that_nothing_fits_is_never_given_where_it_is_not_required():
    schema = {"properties": {"a": {"enum": []}, "b": {"type": "null"}}}
    forced = wish(tool("f", schema, strict=True), choice="required")
    keys = allowed(after(forced, "<tool_call>", "f", "<arg_key>"))
    assert [tokenizer().token_bytes(i) for i in keys] == [b"b"]


def test_a_restricted_string_beside_an_object_is_refused_under_strict():
    schema = {"anyOf": [{"type": "string", "pattern": "^a$"}, {"type": "object"}]}
    with pytest.raises(RequestError, match="free the string"):
        compiler()(wish(tool("f", parameters(schema), strict=True)))


def test_a_keyword_over_all_arguments_is_refused_under_strict():
    schema = {"properties": {"a": {"type": "null"}}, "minProperties": 1}
    with pytest.raises(RequestError, match=r"parameters\.minProperties"):
        compiler()(wish(tool("f", schema, strict=True)))
    assert compiler()(wish(tool("f", schema), choice="required"))


def chained(count):
    chain = {f"c{n}": {"type": "array", "items": {"$ref": f"#/$defs/c{n + 1}"}} for n in range(count)}
    return {"$defs": chain | {f"c{count}": {"type": "null"}}, "$ref": "#/$defs/c0"}


def test_a_chain_of_references_compiles_and_an_endless_one_is_refused_before_the_compiler_overflows():
    for count, strict in ((300, True), (300, False), (5000, False)):
        schema = {"$defs": chained(count)["$defs"], "properties": {"k": {"$ref": "#/$defs/c0"}}, "required": ["k"]}
        assert compiler()(wish(tool("f", schema, strict=strict), choice="required"))
    assert compiler()(wish(format={"type": "json_schema", "json_schema": {"schema": chained(300)}}))
    for strict in (True, False):
        with pytest.raises(RequestError, match="levels"):
            compiler()(wish(format={"type": "json_schema", "json_schema": {"schema": chained(5000), "strict": strict}}))


def test_a_schema_that_is_too_deep_is_refused_under_strict_and_open_else():
    deep = {"type": "null"}
    for _ in range(150):
        deep = {"type": "array", "items": deep}
    assert compiler()(wish(tool("f", parameters(deep)), choice="required"))
    with pytest.raises(RequestError, match="deeper than 100"):
        compiler()(wish(tool("f", parameters(deep), strict=True)))
