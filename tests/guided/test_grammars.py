"""Grammars from requests: whatever tokens are drawn under the masks, the output is what was asked for."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_jax.errors import RequestError
from flint_jax.grammar import State
from flint_jax.guided import Compiler, Vocabulary
from flint_jax.server.forced import Forced
from loaders.tokenizer import Tokenizer
from tests.guided.schemas import fits
from tests.guided.walk import ROWS, after, allowed, compiler, read, roll, structured, tokenizer, tool, wish

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"type": "number"},
        "ok": {"type": "boolean"},
        "when": {"enum": ["now", "later", 3]},
        "tags": {"type": "array"},
        "maybe": {"type": ["null", "object"]},
    },
    "required": ["city", "days"],
}
TOOLS = (tool("get_weather", WEATHER), tool("get", {"type": "object", "properties": {}}), tool("noargs"))
STRICT = tool(
    "book",
    {
        "$defs": {"guest": {"type": "object", "properties": {"age": {"type": "integer", "minimum": 18}}}},
        "type": "object",
        "properties": {
            "who": {"$ref": "#/$defs/guest"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"},
            "note": {"type": "string", "maxLength": 4},
            "nights": {"type": "integer", "minimum": 1, "maximum": 9},
            "room": {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]},
        },
        "required": ["code", "nights", "room"],
        "additionalProperties": False,
    },
    strict=True,
)
IDS = tokenizer().added_tokens
ENDS = sorted(tokenizer().eog_ids)


def seeds(count):
    return pytest.mark.parametrize("seed", range(count))


# -- calls -------------------------------------------------------------------------------------------------------------


def check_call(call, tools):
    """A call of one of the tools, whose arguments have the right names and types."""
    function = next(t["function"] for t in tools if t["function"]["name"] == call.name)
    arguments, schema = json.loads(call.arguments), function["parameters"] or {}
    properties = schema.get("properties")
    if properties:
        assert arguments.keys() <= properties.keys()
        assert all(fits(v, properties[k], schema) for k, v in arguments.items()), arguments
    if function.get("strict"):
        assert fits(arguments, schema), arguments


@seeds(12)
def test_required_is_one_call_or_more(seed):
    out, ended = roll(wish(*TOOLS, STRICT, choice="required"), seed)
    message = read(out, (*TOOLS, STRICT), ended=ended)
    assert message.calls
    assert message.content is None
    for call in message.calls if ended else message.calls[:-1]:
        check_call(call, (*TOOLS, STRICT))
    if ended:
        assert message.problems == ()


@seeds(6)
def test_a_named_function_is_called_once(seed):
    out, ended = roll(wish(*TOOLS, STRICT, choice="named", name="book"), seed)
    assert ended
    message = read(out, (*TOOLS, STRICT))
    assert [c.name for c in message.calls] == ["book"]
    check_call(message.calls[0], (STRICT,))


@seeds(6)
def test_without_parallel_calls_there_is_one(seed):
    out, ended = roll(wish(*TOOLS, choice="required", parallel=False), seed)
    assert ended
    assert len(read(out, TOOLS).calls) == 1


@seeds(8)
def test_auto_with_a_strict_tool_lets_text_through(seed):
    out, ended = roll(wish(STRICT, TOOLS[2]), seed, limit=400)
    message = read(out, (STRICT, TOOLS[2]), ended=ended)
    for call in message.calls if ended else message.calls[:-1]:
        check_call(call, (STRICT, TOOLS[2]))
    assert not [p for p in message.problems if p.kind == "unknown_tool"]


def test_auto_with_a_strict_tool_without_parallel_calls():
    state = after(wish(STRICT, TOOLS[2], parallel=False), "so ", "<tool_call>", "noargs", "</tool_call>")
    assert allowed(state) == ENDS


def test_auto_without_a_strict_tool_is_free():
    assert compiler()(wish(*TOOLS)) is None
    assert compiler()(wish()) is None
    assert compiler()(wish(STRICT, choice="none")) is None


@seeds(8)
def test_beside_tools_a_format_is_an_alternative(seed):
    out, ended = roll(wish(*TOOLS, format={"type": "json_object"}), seed)
    assert ended
    message = read(out, TOOLS)
    assert (message.content is None) == bool(message.calls)
    for call in message.calls:
        check_call(call, TOOLS)
    assert message.calls or isinstance(json.loads(message.content), dict)


def test_names_keys_and_repetition():
    required = wish(*TOOLS, choice="required")
    assert allowed(after(required, "<tool_call>")) == [tokenizer().encode("g")[0], tokenizer().encode("n")[0]]
    short = after(required, "<tool_call>", "get")
    assert set(allowed(short)) >= {IDS["</tool_call>"], tokenizer().encode("_")[0]}
    assert IDS["<arg_key>"] not in allowed(after(required, "<tool_call>", "noargs", "</tool_call>"))
    once = ("<tool_call>", "get_weather", "\n", "<arg_key>", "ok", "</arg_key>", "\n", "<arg_value>", "true")
    again = after(required, *once, "</arg_value>", "\n", "<arg_key>")
    assert tokenizer().encode("c")[0] in allowed(again)
    assert tokenizer().encode("o")[0] not in allowed(again)


def test_strict_asks_for_the_required_arguments():
    def argument(key, value):
        return ("<arg_key>", key, "</arg_key>", "<arg_value>", value, "</arg_value>")

    head = ("<tool_call>", "book", *argument("room", "null"), *argument("code", "AB7"))
    forced = wish(STRICT, choice="required")
    assert IDS["</tool_call>"] not in allowed(after(forced, *head))
    assert IDS["</tool_call>"] in allowed(after(forced, *head, *argument("nights", "9")))
    assert allowed(after(forced, *head, "<arg_key>", "nights", "</arg_key>", "<arg_value>", "9")) == [
        IDS["</arg_value>"]
    ]


def test_more_keys_than_bits_come_in_order():
    many = {"type": "object", "properties": {f"k{i}": {"type": "boolean"} for i in range(70)}, "required": ["k1"]}
    forced = wish(tool("f", many, strict=True), choice="named", name="f")
    head = ("<tool_call>", "f", "<arg_key>")
    assert tokenizer().encode("2")[0] not in allowed(after(forced, *head, "k"))
    out, ended = roll(forced, 0, limit=5000)
    assert ended
    assert fits(json.loads(read(out, forced.tools).calls[0].arguments), many)


def test_open_schemas_leave_keys_and_values_alone():
    for schema in (None, {}, {"$ref": "#/$defs/x"}, WEATHER | {"additionalProperties": True}):
        state = after(wish(tool("f", schema), choice="required"), "<tool_call>", "f", "<arg_key>", "q-1", "</arg_key>")
        assert allowed(state)
    more = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}}
    forced = wish(tool("f", more, strict=True), choice="required")
    other = after(forced, "<tool_call>", "f", "<arg_key>", "b", "</arg_key>", "<arg_value>")
    assert tokenizer().encode("7")[0] in allowed(other)
    assert tokenizer().encode("x")[0] not in allowed(other)


_PLAIN = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer"},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["integer", "null"]},
        {"type": ["string", "null"]},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        {"enum": ["x", "y z", 1, None]},
        {"type": "string", "enum": ["one", "only"]},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"anyOf": [{"type": "integer"}, {"type": "array"}]},
        {"anyOf": [{"type": "string", "pattern": "^k[0-9]$"}, {"type": "null"}]},
    ]
)
_NAMES = st.text("ab_é \"\\/'", min_size=1, max_size=6).filter(lambda s: s == s.strip())


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(_NAMES, _PLAIN, min_size=1, max_size=5), st.booleans(), _NAMES, st.data())
def test_any_tool_is_called_with_arguments_of_its_types(properties, strict, name, data):
    required = data.draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    schema = {"type": "object", "properties": properties, "required": required}
    tools = (tool(name, schema, strict=strict), tool("other"))
    out, ended = roll(wish(*tools, choice="named", name=name), data.draw(st.integers(0, 99)))
    assert ended
    message = read(out, tools)
    assert message.problems == ()
    arguments = json.loads(message.calls[0].arguments)
    assert arguments.keys() <= properties.keys()
    if strict:
        assert fits(arguments, schema), arguments
    else:
        kinds = {k: {w: v[w] for w in ("type", "enum") if w in v} for k, v in properties.items() if "anyOf" not in v}
        assert all(fits(v, kinds.get(k, True)) for k, v in arguments.items()), arguments


# -- formats -----------------------------------------------------------------------------------------------------------


@seeds(8)
def test_json_object(seed):
    out, ended = roll(wish(format={"type": "json_object"}), seed)
    assert ended
    assert isinstance(json.loads(read(out).content), dict)


@seeds(8)
def test_json_schema(seed):
    schema = STRICT["function"]["parameters"]
    out, ended = roll(wish(format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}), seed)
    assert ended
    assert fits(json.loads(read(out).content), schema)


@pytest.mark.parametrize(
    ("kind", "value", "check"),
    [
        ("json", {"type": "array", "items": {"enum": [1, 2]}}, lambda s: set(json.loads(s)) <= {1, 2}),
        ("json", '{"type": "boolean"}', lambda s: s in ("true", "false")),
        ("json", True, lambda s: json.loads(s) or True),
        ("json_object", True, lambda s: isinstance(json.loads(s), dict)),
        ("regex", r"^[a-c]{2}/\d\d$", lambda s: len(s) == 5 and s[2] == "/" and s[3:].isascii() and s[3:].isdigit()),
        ("choice", ["yes", "no", 'say "é"\n', "yes, but"], lambda s: s in ("yes", "no", 'say "é"\n', "yes, but")),
        ("grammar", 'start: A "!"+\nA: /[xy]/', lambda s: s[0] in "xy" and s[1:] and not s[1:].strip("!")),
        ("grammar", 'root ::= "a" ("b" | "c")', lambda s: s in ("ab", "ac")),
    ],
)
@seeds(3)
def test_vllms_formats(kind, value, check, seed):
    out, ended = roll(structured(kind, value), seed)
    assert ended
    assert check(read(out).content)


# -- thoughts, tags, ends ----------------------------------------------------------------------------------------------


@seeds(4)
@pytest.mark.parametrize("start", [State.CONTENT, State.REASONING])
def test_rules_wait_for_the_end_of_the_thought(start, seed):
    forced = Forced(format={"type": "json_object"}, start=start, thinking=True)
    out, ended = roll(forced, seed)
    assert ended
    message = read(out, start=start, thinking=True)
    assert isinstance(json.loads(message.content), dict)


def test_what_a_thought_may_hold():
    forced = Forced(format={"type": "json_object"}, start=State.REASONING, thinking=True)
    thought = set(allowed(after(forced, "so {")))
    assert thought & set(IDS.values()) == {IDS["</think>"]}
    assert allowed(after(forced, "so {", "</think>")) == [tokenizer().encode("{")[0]]
    opened = Forced(format={"type": "json_object"}, start=State.CONTENT, thinking=True)
    assert set(allowed(after(opened))) == {IDS["<think>"], tokenizer().encode("{")[0]}
    closed = Forced(format={"type": "json_object"}, start=State.CONTENT, thinking=False)
    assert allowed(after(closed)) == [tokenizer().encode("{")[0]]


def test_a_forced_call_may_end_the_thought():
    forced = Forced(tools=TOOLS, choice=wish(*TOOLS, choice="required").choice, start=State.REASONING, thinking=True)
    assert IDS["<tool_call>"] in allowed(after(forced, "so "))
    assert IDS["</tool_call>"] in allowed(after(forced, "so ", "<tool_call>", "noargs"))


def test_tags_are_no_text_and_text_is_no_tag():
    value = ("<tool_call>", "get_weather", "<arg_key>", "city", "</arg_key>", "<arg_value>")
    forced = wish(*TOOLS, choice="required")
    inside = allowed(after(forced, *value))
    assert set(inside) & set(IDS.values()) == {IDS["</arg_value>"]}
    assert len(inside) > 300
    assert tokenizer().encode(">")[0] in allowed(after(forced, *value, "</arg_valu"))
    # the reader of the output would end the value at these characters
    assert tokenizer().encode(">")[0] not in allowed(after(forced, *value, "a </arg_value"))


def test_rows_without_a_token_never_come():
    text = Compiler(Vocabulary(tokenizer(), 520, tokenizer().eog_ids))(structured("regex", "(?s:.*)"))
    found = allowed(text.begin(), 520)
    assert len(found) > 390
    assert max(found) < tokenizer().vocab_size
    assert set(found) & set(IDS.values()) == set(ENDS)


def test_the_end_comes_where_it_may_and_only_there():
    forced = structured("regex", "ab?")
    assert set(ENDS) & set(allowed(after(forced))) == set()
    assert set(allowed(after(forced, "a"))) == {*ENDS, tokenizer().encode("b")[0]}
    done = after(forced, "ab")
    assert done.done
    assert allowed(done) == ENDS
    assert not after(forced, "a").done


def test_a_vocabulary_without_tags_is_held_by_their_characters():
    plain = Tokenizer.of_bytes()
    made = Compiler(Vocabulary(plain, 257, [256]))
    forced = Forced(tools=TOOLS, choice=wish(*TOOLS, choice="required").choice, start=State.REASONING, thinking=True)
    tracker = made(forced).begin()
    said = (
        "hm</think>\n<tool_call>get_weather\n<arg_key>city</arg_key><arg_value>a < b</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
    )
    for byte in said.encode():
        assert byte in allowed(tracker, 257)
        tracker.push(byte)
    assert 256 in allowed(tracker, 257)
    with pytest.raises(RequestError, match="token that ends it"):
        Vocabulary(plain, 256, [256])


def test_compiled_grammars_are_kept_and_shared():
    forced = wish(*TOOLS, choice="required")
    made = compiler()(forced)
    assert compiler()(wish(*TOOLS, choice="required")) is made
    first, second = made.begin(), made.begin()
    first.push(IDS["<tool_call>"])
    assert IDS["<tool_call>"] in allowed(second)
    assert IDS["<tool_call>"] not in allowed(first)


@pytest.mark.parametrize(
    "wanted",
    [structured("regex", r) for r in ("[a-z ]{1,40}x", "[a-z]{3} [a-z ]{2}", r"[^\n]{4,9}", r"\w+ [A-Z ]*")]
    + [wish(*TOOLS, choice="required")],
)
def test_tokens_that_are_let_through_together_are_those_let_through_one_by_one(wanted):
    plain = Vocabulary(tokenizer(), ROWS, tokenizer().eog_ids)
    plain.tokens = plain.tokens.with_slices([])
    trackers, draw = [made(wanted).begin() for made in (compiler(), Compiler(plain))], random.Random(0)
    for _ in range(60):
        ids, one_by_one = map(allowed, trackers)
        assert ids == one_by_one
        going_on = [i for i in ids if i not in ENDS]
        if not going_on:
            break
        token = draw.choice(going_on)
        for tracker in trackers:
            tracker.push(token)
