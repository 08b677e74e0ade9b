"""Requests of every chat protocol with parts replaced by junk: refused or answered, never an internal error."""

import copy
import json
import random

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.harness import call, running

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION = {"name": "weather", "description": "d", "parameters": PARAMETERS}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"days": 3}'}}
CHAT = {
    "model": "x",
    "messages": [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x"}]},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "reasoning": {"effort": "low", "enabled": True},
    "thinking": {"type": "enabled"},
    "chat_template_kwargs": {"enable_thinking": True},
    "response_format": {"type": "text"},
    "structured_outputs": {},
    "stop": ["zz"],
    "max_tokens": 9,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "logprobs": True,
    "top_logprobs": 2,
}
MESSAGES = {
    "max_tokens": 9,
    "system": [{"type": "text", "text": "S"}],
    "messages": [
        {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"days": 3}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}],
                },
                {"type": "text", "text": "<system-reminder>"},
            ],
        },
    ],
    "tools": [{"name": "weather", "description": "d", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "thinking": {"type": "enabled", "budget_tokens": 3},
    "output_config": {"effort": "low", "format": None},
    "output_format": None,
    "stop_sequences": ["zz"],
}
RESPONSES = {
    "instructions": "I",
    "input": [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}], "encrypted_content": "flint:eA=="},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}", "namespace": None},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "x"},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "d"}]},
    ],
    "tools": [
        {"type": "function"} | FUNCTION,
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function"} | FUNCTION]},
    ],
    "tool_choice": "auto",
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 9,
    "metadata": {},
}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/tokenize": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
}
JUNK = [
    *(None, True, False, 0, -1, 1.5, 10**40, "", "x", "none", "\x00", "<think>"),
    *([], {}, [1], ["a"], [None], [[]], {"a": 1}, {"name": []}, {"type": "text"}, {"type": "function"}),
    [{"type": "text", "text": 3}],
]


def places(value, path=()):
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def changed(body, path, junk):
    body = copy.deepcopy(body)
    inside = body
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = junk
    return body


@pytest.fixture(scope="module")
def roomy():
    with running(engine=FakeEngine(max_model_len=4096)) as server:
        server.says("<think>a</think>b" + call("weather", city="x"))
        yield server


@pytest.mark.parametrize("route", ROUTES)
def test_junk_is_never_an_internal_error(roomy, route):
    dice, body = random.Random(0), ROUTES[route]
    assert roomy.post(route, body).status_code == 200
    for path in places(body):
        for junk in dice.sample(JUNK, 3):
            sent = changed(body, path, junk) | {"stream": dice.random() < 0.3}
            reply = roomy.post(route, sent)
            assert reply.status_code in (200, 400), (json.dumps(sent), reply.text)
            assert "server_error" not in reply.text
            assert "api_error" not in reply.text
