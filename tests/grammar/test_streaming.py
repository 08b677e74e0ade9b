"""When things are said, and that any output gives the same message at every split."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_jax.grammar import CallArguments, CallEnd, Calls, CallStart, Content, Lexer, Reasoning, State, collect
from tests.grammar.outputs import (
    ARGUMENT,
    BLOCK,
    TEXT,
    TOKENS,
    TOOLS,
    WEATHER,
    WORD,
    call,
    in_ones,
    in_pieces,
    run,
    tokens,
    whole,
)

LIGHT = settings(max_examples=80, deadline=None, database=None, derandomize=True)


def said(output, tags=TOKENS, **options):
    """(characters in, delta) pairs when the output comes one character or tag at a time, and is not ended."""
    lexer = Lexer(State.CONTENT, tags, TOOLS, new_id=lambda: "id", **options)
    block = tags is TOKENS
    at, out = 0, []
    for token_id, text in tokens(output, in_ones, block_tags=block, argument_tags=block):
        at += len(text)
        out += [(output[:at], delta) for delta in lexer.push(token_id, text)]
    return out


def test_a_call_is_said_whole_and_at_its_end():
    output = call("get_weather", days="12", city='P"é', ok="true")
    seen = said(output)
    assert [d for _, d in seen] == [
        CallStart(0, "id", "get_weather"),
        CallArguments(0, '{"days": 12, "city": "P\\"é", "ok": true}'),
        CallEnd(0),
    ]
    assert {at for at, _ in seen} == {output}
    assert [d for _, d in said(call("noargs"))] == [CallStart(0, "id", "noargs"), CallArguments(0, "{}"), CallEnd(0)]


def test_nothing_of_a_call_is_said_before_it_is_closed():
    assert said(call("get_weather", city="x" * 500)[:-1], TEXT) == []
    assert said("<tool_call>get_weather") == []


def test_a_word_that_may_be_a_tool_waits_for_the_next():
    assert said("the get_wea") == [("t", Content("t")), ("th", Content("h")), ("the", Content("e"))]
    assert "".join(d.text for _, d in said("the get_weird x")) == "the get_weird x"
    assert "".join(d.text for _, d in said("the target_weather")) == "the target_weather"


def test_a_tag_is_held_back_only_as_long_as_it_may_be_one():
    assert said("a</thin", TEXT) == [("a", Content("a"))]
    assert said("a</thinx", TEXT)[1:] == [("a</thinx", Content("</thinx"))]
    assert said("a</thi<", TEXT)[1:] == [("a</thi<", Content("</thi"))]


def test_what_no_tag_of_this_place_begins_with_is_not_held_back():
    assert said("a<x", TOKENS)[1:] == [("a<", Content("<")), ("a<x", Content("x"))]
    assert said("a<a", TEXT)[1:] == [("a<a", Content("<a"))]  # no <arg_key> outside of a call
    assert said("a</t", TEXT, thinking=False)[1:] == [("a</", Content("</")), ("a</t", Content("t"))]


def test_white_space_waits_for_text():
    assert [d for _, d in said("<think>a \n")] == [Reasoning("a")]
    assert said("<think>a \nb")[-1] == ("<think>a \nb", Reasoning(" \nb"))
    assert [d for _, d in said("a \n")] == [Content("a")]


def test_neighbours_become_one_delta():
    pairs = [(WORD, "a</think></think>b<tool"), (WORD, "x")]
    assert run(pairs, TEXT)[:2] == [Reasoning("a"), Content("b")]
    big = [(WORD, call("get_weather", city="A", days="2") + call("noargs"))]
    assert [type(d).__name__ for d in run(big, TEXT)] == ["CallStart", "CallArguments", "CallEnd"] * 2


# -- any output ------------------------------------------------------------------------------------------------------

words = ["get_weather", "noargs", "city", "days", " ", "\n", "<", "</", "<tool_", "</arg_value", "é", '"']
fragments = st.sampled_from([*BLOCK, *ARGUMENT, *words]) | st.text(max_size=6)
outputs = st.lists(fragments, max_size=24).map("".join)
options = st.fixed_dictionaries(
    {
        "start": st.sampled_from([State.REASONING, State.CONTENT]),
        "thinking": st.booleans(),
        "calls": st.sampled_from(Calls),
        "reason": st.sampled_from(["stop", "length"]),
        "tools": st.sampled_from([TOOLS, (), None]),
    }
)


@LIGHT
@given(outputs, options, st.integers())
def test_any_output_gives_the_same_message_at_every_split(output, how, seed):
    message = collect(run(tokens(output, whole), **how))
    for cut in (in_ones, in_pieces(seed)):
        for argument_tags in (True, False):
            assert collect(run(tokens(output, cut, argument_tags=argument_tags), **how)) == message
        by_text = tokens(output, cut, block_tags=False, argument_tags=False)
        assert collect(run(by_text, TEXT, **how)) == message


@LIGHT
@given(outputs, options, st.integers())
def test_lookalikes_give_the_same_message_at_every_split(output, how, seed):
    """Block tags are tokens of the vocabulary, but the output spells them with others."""
    messages = [
        collect(run(tokens(output, cut, block_tags=False, argument_tags=False), TOKENS, **how))
        for cut in (whole, in_ones, in_pieces(seed))
    ]
    assert messages[0] == messages[1] == messages[2]
    assert messages[0].calls == ()
    seen = (messages[0].reasoning or "") + (messages[0].content or "")
    assert seen.rstrip() == output.rstrip()


@LIGHT
@given(outputs, options)
def test_any_output_keeps_its_promises(output, how):
    message = collect(run(tokens(output, whole), **how))  # run checks names, order and JSON
    assert len(message.calls) <= {Calls.ALL: 24, Calls.FIRST: 1, Calls.NONE: 0}[how["calls"]]
    if how["tools"] is not None:
        assert {c.name for c in message.calls} <= {t.name for t in how["tools"]}
    assert message.reasoning is None or message.reasoning == message.reasoning.rstrip() != ""
    if message.calls and message.content:
        assert message.content == message.content.rstrip()
    json.dumps([c.arguments for c in message.calls]).encode()


plain = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=12)
said_calls = st.lists(
    st.fixed_dictionaries({}, optional={"city": plain, "days": st.integers(), "ok": st.booleans()}), max_size=3
)


@LIGHT
@given(plain, plain, said_calls, st.integers())
def test_a_well_formed_output_comes_back(thought, answer, arguments, seed):
    written = [{k: v if k == "city" else json.dumps(v) for k, v in a.items()} for a in arguments]
    output = f"{thought}</think>{answer}" + "\n".join(call("get_weather", **w) for w in written)
    message = collect(run(tokens(output, in_pieces(seed)), tools=[WEATHER]))
    assert (message.reasoning or "") == thought.rstrip()
    content = message.content or ""
    assert content.strip() == answer.strip()
    assert content == (answer if not arguments else answer.rstrip())
    assert [json.loads(c.arguments) for c in message.calls] == arguments
    assert message.problems == ()


@pytest.mark.parametrize(
    ("head", "char"),
    [
        ("</think>a", " "),
        ("</think><tool_call>", "n"),
        ("</think><tool_call>get_weather<arg_key>days</arg_key><arg_value>", "1"),
        ("</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>", "x"),
    ],
)
def test_time_grows_with_the_length_and_no_faster(head, char):
    def seconds(n):
        lexer = Lexer(State.REASONING, TEXT, TOOLS)
        lexer.push(WORD, head)
        begin = time.process_time()
        for _ in range(n):
            lexer.push(WORD, char)
        return time.process_time() - begin

    # 16 times the length; copying all that is held at each push takes 70 times as long or more
    assert seconds(160_000) < 40 * min(seconds(10_000) for _ in range(3))
