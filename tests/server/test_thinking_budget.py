"""The budget of a thought on the wire: who asks for it how, and what the engine gets."""

import dataclasses

import pytest

from flint_jax.budget import Budget
from flint_jax.grammar import State
from tests.server.harness import running, tokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
BODIES = {CHAT: {"messages": HI}, RESPONSES: {"input": "hi"}, MESSAGES: {"messages": HI, "max_tokens": 9}}
EACH = pytest.mark.parametrize("route", BODIES)


def held(server, route, **fields):
    """What the engine was given as constraint."""
    response = server.post(route, BODIES[route] | {"model": "x"} | fields)
    assert response.status_code == 200, response.text
    return server.engine.submitted[-1].constraint


@EACH
def test_every_protocol_takes_vllms_field(server, route):
    made = held(server, route, thinking_token_budget=7)
    assert isinstance(made, Budget)
    assert (made.limit, made.inner, made.start) == (7, None, State.CONTENT)
    assert held(server, route, thinking_token_budget=0).limit == 0
    assert held(server, route, thinking_token_budget=None) is None
    assert held(server, route) is None


@pytest.mark.parametrize(
    ("route", "fields", "limit"),
    [
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}, "thinking_token_budget": 5}, 5),
        (CHAT, {"reasoning": {"effort": "high", "max_tokens": 30}}, 30),
        (RESPONSES, {"reasoning": {"max_tokens": 30}}, 30),
    ],
)
def test_objects_that_name_a_budget(server, route, fields, limit):
    assert held(server, route, **fields).limit == limit


def test_who_does_not_think_needs_no_budget(server):
    assert held(server, MESSAGES, thinking={"type": "disabled", "budget_tokens": 5}) is None
    assert held(server, CHAT, thinking_token_budget=5, reasoning_effort="none") is None
    assert held(server, CHAT, thinking=True) is None


def test_the_prompt_says_where_the_output_begins(server):
    made = held(server, CHAT, thinking_token_budget=5, chat_template_kwargs={"enable_thinking": True})
    assert made.start is State.REASONING


@EACH
@pytest.mark.parametrize("value", [-1, 1.5, "7", True, [7], 2**70])
def test_bad_budgets_are_refused(server, route, value):
    response = server.post(route, BODIES[route] | {"model": "x", "thinking_token_budget": value})
    assert response.status_code == 400
    assert "thinking_token_budget" in response.text


@pytest.mark.parametrize(
    ("route", "fields", "name"),
    [
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens"),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": "all"}}, "thinking.budget_tokens"),
        (RESPONSES, {"reasoning": {"max_tokens": 0.5}}, "reasoning.max_tokens"),
    ],
)
def test_bad_budgets_in_objects_are_refused_by_name(server, route, fields, name):
    response = server.post(route, BODIES[route] | {"model": "x"} | fields)
    assert response.status_code == 400
    assert name in response.text


@EACH
def test_a_stop_id_that_the_budget_draws_is_not_forbidden_for_longer(server, route):
    """After the budget only </think> may come; where min_tokens forbade it nothing could be drawn, which was a 500."""
    end = tokenizer().added_tokens["</think>"]
    fields = {"stop_token_ids": [end], "thinking_token_budget": 5}
    assert held(server, route, **fields, min_tokens=5).limit == 5
    assert held(server, route, stop_token_ids=[end], min_tokens=6) is None
    assert held(server, route, stop_token_ids=[end + 1], thinking_token_budget=5, min_tokens=6).limit == 5
    asked = len(server.engine.submitted)
    response = server.post(route, BODIES[route] | {"model": "x"} | fields | {"min_tokens": 6})
    assert response.status_code == 400
    for words in (f"stop_token_ids has {end}, the token of </think>", "min_tokens 6", "budget of 5", "at most 5"):
        assert words in response.text
    assert len(server.engine.submitted) == asked


def test_a_grammar_lies_inside_and_a_vocabulary_without_the_tag_has_no_budget():
    with running() as server:
        grammar = type("Grammar", (), {"ends": True, "begin": lambda self: self})()
        server.state.served = dataclasses.replace(server.served, constrain=lambda forced: grammar)
        made = held(server, CHAT, thinking_token_budget=7)
        assert (made.limit, made.inner, made.ends) == (7, grammar, True)
        end = tokenizer().added_tokens["</think>"]  # a grammar decides where the output ends, so min_tokens is nothing
        assert held(server, CHAT, thinking_token_budget=1, stop_token_ids=[end], min_tokens=6).limit == 1
        tiny = dataclasses.replace(server.served, vocab_size=server.served.tokenizer.added_tokens["</think>"])
        server.state.served = tiny
        assert held(server, CHAT, thinking_token_budget=7) is None
