"""Every tag of a call left out or doubled: as tokens and as text, at every split, streamed and whole."""

import json
import re
import time

import pytest

from flint_jax.grammar import State, Tool, collect
from tests.grammar.outputs import TEXT, TOKENS, WORD, in_ones, read, run, tokens, whole

GOOD = (
    "<think>plan</think>Look:\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>how many days left</arg_value>\n"
    "<arg_key>limit</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
TIGHT = GOOD.replace("\n", "")
TOOLS = (
    Tool("search", {"properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}),
    Tool("html", {"properties": {"html": {"type": "string"}}}),
)
ARGUMENTS = {"query": "how many days left", "limit": 3}
PLACES = [m.span() for m in re.finditer("<[^>]*>", GOOD)]
TIGHT_PLACES = [m.span() for m in re.finditer("<[^>]*>", TIGHT)]
NO_CALL = 11  # without the last </tool_call> the call may have been cut: it is none


def rows():
    for name, text, places in (("lines", GOOD, PLACES), ("tight", TIGHT, TIGHT_PLACES)):
        for n, (a, b) in enumerate(places):
            yield pytest.param(text[:a] + text[b:], n, "missing", id=f"{name}-{n}-missing {text[a:b]}")
            yield pytest.param(text[:b] + text[a:], n, "doubled", id=f"{name}-{n}-doubled {text[a:b]}")


@pytest.mark.parametrize(("output", "place", "what"), list(rows()))
def test_one_tag_missing_or_doubled(output, place, what):
    message = read(output, start=State.CONTENT, tools=TOOLS)
    if what == "missing" and place == NO_CALL:
        assert message.calls == ()
        assert message.content.strip() == output[output.index("Look") :].strip()
        return
    assert [(c.name, json.loads(c.arguments)) for c in message.calls] == [("search", ARGUMENTS)]
    seen = (message.reasoning or "") + (message.content or "")
    assert not re.search("</?(arg|tool)_", seen)  # no raw mark-up of the call
    assert seen.replace("\n", "") == "planLook:"


@pytest.mark.parametrize(("output", "place", "what"), list(rows()))
def test_the_same_before_another_call(output, place, what):
    """The next call comes whole, and the broken one does not leak into it."""
    message = read(output + "\n" + TIGHT[TIGHT.index("<tool_call>") :], start=State.CONTENT, tools=TOOLS)
    assert [json.loads(c.arguments) for c in message.calls] == [ARGUMENTS] * 2


@pytest.mark.parametrize("cut", [whole, in_ones])
def test_a_value_may_hold_the_tags_themselves(cut):
    value = "html = '</arg_value>'\nprint('<arg_key>')\n</arg_key><arg_value> <tool_call></tool_call>"
    head, tail = "<tool_call>html<arg_key>html</arg_key><arg_value>", "</arg_value></tool_call>"
    pairs = [*tokens(head, cut), *((WORD, p) for p in cut(value)), *tokens(tail, cut)]
    message = collect(run(pairs, TOKENS, start=State.CONTENT, tools=TOOLS))
    assert [json.loads(c.arguments) for c in message.calls] == [{"html": value}]


def test_a_closer_that_is_text_counts_only_where_the_call_goes_on():
    value = "html = '</arg_value>'\nprint(html)\n"
    output = f"<tool_call>html<arg_key>html</arg_key><arg_value>{value}</arg_value></tool_call>"
    message = read(output, start=State.CONTENT, tools=TOOLS)
    assert [json.loads(c.arguments) for c in message.calls] == [{"html": value}]


@pytest.mark.parametrize(
    "output",
    [
        "<tool_call>search<arg_value>x</arg_value></tool_call>",  # a value without a key
        "<tool_call>search<arg_key>queryhow many</arg_value></tool_call>",  # key and value are one text
        "<tool_call>searching</arg_key><arg_value>x</arg_value></tool_call>",  # a name of no tool
    ],
)
def test_what_cannot_be_told_apart_is_no_call(output):
    message = read(output, start=State.CONTENT, tools=TOOLS)
    assert (message.calls, message.content) == ((), output)


@pytest.mark.parametrize(
    "middle",
    [
        "<arg_key>query</arg_key><arg_value>x</arg_value>",
        "</arg_value>",
        "<arg_key>",
        "<arg_key>query</arg_key>",
        "x</arg_value>",
        "<arg_value>",
    ],
)
@pytest.mark.parametrize("as_tokens", [True, False])
def test_reading_a_long_block_takes_time_in_proportion(middle, as_tokens):
    def seconds(n):
        output = "<tool_call>search<arg_key>query</arg_key><arg_value>" + middle * n + "</tool_call>"
        pairs = list(tokens(output, whole, block_tags=as_tokens, argument_tags=as_tokens))
        begin = time.process_time()
        run(pairs, TOKENS if as_tokens else TEXT, start=State.CONTENT, tools=TOOLS)
        return time.process_time() - begin

    assert min(seconds(4000) for _ in range(3)) < 40 * min(seconds(500) for _ in range(3))  # 8 times the length


def test_an_optional_thought_of_a_request_that_does_not_think_is_left_out():
    message = read("<think>x</think>y", start=State.CONTENT, thinking=False)
    assert (message.reasoning, message.content) == (None, "y")
    message = read("<think>x", start=State.CONTENT, thinking=False)
    assert (message.reasoning, message.content) == (None, "<think>x")
