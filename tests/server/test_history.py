"""What clients send back of a conversation under their own names: none of it is lost, and results meet their calls."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flint_jax.server.history import in_call_order
from tests.server.harness import prompt_of, running

HI = {"role": "user", "content": "hi"}


def asked(server, *messages, **fields):
    """The conversation as the template saw it."""
    response = server.chat(messages=[HI, *messages], **fields)
    assert response.status_code == 200, response.text
    return prompt_of(server).removeprefix("[user]hi").removesuffix("<|assistant|>")


def calls(*ids):
    function = {"name": "f", "arguments": "{}"}
    return {"role": "assistant", "tool_calls": [{"id": i, "type": "function", "function": function} for i in ids]}


def result(call_id, content):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


# -- results of parallel calls -----------------------------------------------------------------------------------------


def test_results_of_parallel_calls_come_in_the_order_of_the_calls(show):
    said = asked(show, calls("a", "b", "c"), result("c", "C"), result("a", "A"), result("b", "B"), HI)
    assert said.endswith(";[tool]A[tool]B[tool]C[user]hi")
    said = asked(show, calls("a", "b"), result("b", "B"), result("a", "A"), calls("a", "b"), result("b", "b"))
    assert said.count("[tool]A[tool]B[assistant]") == 1
    assert said.endswith("[tool]b")


def test_the_same_in_the_other_protocols(show):
    use = [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in ("a", "b")]
    results = [{"type": "tool_result", "tool_use_id": i, "content": i.upper()} for i in ("b", "a")]
    turns = [HI, {"role": "assistant", "content": use}, {"role": "user", "content": results}]
    assert show.post("/v1/messages", {"max_tokens": 9, "messages": turns}).is_success
    assert prompt_of(show).endswith("[tool]A[tool]B<|assistant|>")
    items = [{"type": "function_call", "call_id": i, "name": "f", "arguments": "{}"} for i in ("a", "b")]
    outputs = [{"type": "function_call_output", "call_id": i, "output": i.upper()} for i in ("b", "a")]
    assert show.post("/v1/responses", {"input": [HI, *items, *outputs]}).is_success
    assert prompt_of(show).endswith("[tool]A[tool]B<|assistant|>")


@pytest.mark.parametrize(
    ("made", "ids"),
    [
        (("a", "b"), ("b", "zzz")),  # of a call that is not there
        (("a", "b"), ("b", "b")),
        (("a", "a"), ("a", "a")),
        (("a", "a", "b"), ("b", "a")),
        ((None, "b"), ("b", None, None)),
        (("a",), ("b", "a")),
    ],
)
def test_results_that_cannot_be_told_apart_stay_where_they_are(made, ids):
    messages = [calls(*made), *(result(i, str(n)) for n, i in enumerate(ids))]
    assert in_call_order(messages) == messages


IDS = st.sampled_from(["a", "b", "c", "", None, 3])
TURNS = st.one_of(
    st.builds(lambda ids: calls(*ids), st.lists(IDS, max_size=4)),
    st.builds(result, IDS, st.text(max_size=3)),
    st.just({"role": "tool", "content": "no id"}),
    st.just(HI),
)


@given(st.lists(TURNS, max_size=12))
def test_any_history_keeps_every_message_and_every_other_place(messages):
    ordered = in_call_order(messages)
    key = json.dumps
    assert sorted(map(key, ordered)) == sorted(map(key, messages))
    assert [m for m in ordered if m["role"] != "tool"] == [m for m in messages if m["role"] != "tool"]
    assert [m["role"] for m in ordered] == [m["role"] for m in messages]
    assert in_call_order(ordered) == ordered


# -- other names -------------------------------------------------------------------------------------------------------

BLOCKS = [{"type": "thinking", "thinking": "deep", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
DETAILS = [{"type": "reasoning.text", "text": "de"}, {"type": "reasoning.summary", "summary": "ep"}, {"type": "z"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "deep"},
        {"thinking_blocks": BLOCKS},
        {"thinking_blocks": BLOCKS, "reasoning_content": "deep"},
        {"reasoning_details": DETAILS},
        {"reasoning_details": [*DETAILS, 3, {"type": "reasoning.text", "text": None}]},
        {"content": [{"type": "reasoning", "text": "deep"}, {"type": "text", "text": "x"}]},
        {"content": [{"type": "reasoning", "reasoning": "deep"}, {"type": "text", "text": "x"}]},
        {"content": [{"type": "thinking", "thinking": "deep"}, {"type": "text", "text": "x"}]},
    ],
)
def test_thoughts_under_any_clients_name(show, fields):
    message = {"role": "assistant", "content": "x"} | fields
    assert asked(show, message, result("a", "A")) == "[assistant]x(thought deep);[tool]A"


def test_a_refusal_is_what_was_said(show):
    assert asked(show, {"role": "assistant", "content": None, "refusal": "No."}, HI) == "[assistant]No.;[user]hi"
    assert asked(show, {"role": "assistant", "content": "x", "refusal": None}, HI) == "[assistant]x;[user]hi"


def test_the_older_form_of_calls_is_refused_and_not_dropped(show):
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    error = show.chat(messages=[HI, old]).json()["error"]
    assert (error["param"], "use tool_calls" in error["message"]) == ("messages[1].function_call", True)
    assert asked(show, {"role": "assistant", "content": "x", "function_call": None}) == "[assistant]x;"


def test_a_prefix_is_continued(show):
    show.chat(messages=[HI, {"role": "assistant", "content": "The answer is (", "prefix": True}])
    assert prompt_of(show) == "[user]hi[assistant]The answer is ("
    show.chat(messages=[HI, {"role": "assistant", "content": "x", "prefix": False}])
    assert prompt_of(show) == "[user]hi[assistant]x;<|assistant|>"
    show.chat(messages=[HI, {"role": "assistant", "content": "x", "prefix": True}, HI])
    assert prompt_of(show).endswith("[user]hi<|assistant|>")


# -- tools and switches ------------------------------------------------------------------------------------------------


def test_marks_and_nulls_of_a_tool_are_not_for_the_model(show):
    function = {"name": "f", "description": None, "parameters": None, "strict": None, "cache_control": {"type": "x"}}
    tool = {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}
    assert asked(show, tools=[tool]).endswith('{tool {"name": "f"}}')
    words = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    assert asked(show, tools=[words]).endswith('{"name": "f", "description": "d", "parameters": {"type": "object"}}}')


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "web_search"}, "is of type 'web_search'"),
        ({"type": "custom", "custom": {"name": "x"}}, "is of type 'custom'"),
        ({"type": "function", "name": "f"}, "has no function object"),
        (3, "is of type 'number'"),
    ],
)
def test_tools_of_another_kind_are_named(server, tool, words):
    error = server.chat(tools=[tool]).json()["error"]
    assert f"tools[0] {words}; need " in error["message"]


def test_openrouters_way_to_leave_thoughts_out(server):
    server.says("<think>abc</think>def")
    message = server.chat(reasoning={"exclude": True}).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "def"}
    assert "reasoning" in server.chat(reasoning={"exclude": False}).json()["choices"][0]["message"]
    assert server.chat(reasoning={"exclude": 1}).json()["error"]["param"] == "reasoning.exclude"


def test_a_json_object_with_a_schema_has_to_fit_it():
    """llama.cpp's way to give one; any object would do without."""
    seen = []
    with running() as server:
        server.state.served = dataclasses.replace(server.served, constrain=seen.append)
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        server.chat(response_format={"type": "json_object", "schema": schema})
        server.chat(response_format={"type": "json_object", "schema": None})
    assert [f.format for f in seen] == [
        {"type": "json_schema", "json_schema": {"schema": schema}},
        {"type": "json_object"},
    ]
