"""Output held to a grammar and prompts scored, by a real model with random weights: in the engine and over HTTP.

One set of programs (a batch of 4, a chunk of 32) serves every test here, so neighbours and padding are always there.
"""

import contextlib
import dataclasses
import json
import re

import numpy as np
import openai
import pytest

from flint_jax import sampling
from flint_jax.budget import Budget
from flint_jax.engine import Engine
from flint_jax.grammar import State, Tags
from flint_jax.guided.constraint import ConstraintError
from flint_jax.sampling_params import SamplingParams
from flint_jax.server.forced import Forced, ToolChoice
from flint_jax.server.settings import ServerSettings
from tests.guided.schemas import fits
from tests.guided.walk import compiler, read, structured, tokenizer, tool, wish
from tests.model import golden
from tests.server.harness import Server, served_model

NAME = "T2-nvfp4"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
TOOLS = (tool("measure", SCHEMA, strict=True), tool("ping", {"type": "object", "properties": {}}, strict=True))
JSON = wish(format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
CALLS = wish(*TOOLS, choice="required", parallel=False)
THOUGHT = Forced(tools=TOOLS, choice=ToolChoice("named", "ping"), start=State.REASONING, thinking=True)
DRAWN = SamplingParams(temperature=1.0, max_tokens=150)
FREE = SamplingParams(temperature=1.0, top_k=20, top_p=0.95, max_tokens=40, ignore_eos=True, presence_penalty=0.5)


@pytest.fixture(scope="module")
def steps():
    return golden.steps(NAME, slots=4, pages=16, chunks=(32,), batches=(4,), max_context=512, snapshots=2)


@contextlib.contextmanager
def engine_over(steps, **options):
    made = Engine(steps, eos_ids=tokenizer().eog_ids, seed=5, **options)
    yield made
    while made.step():
        pass
    assert made.stats()["free_slots"] == 4
    assert not made._jobs


@pytest.fixture
def engine(steps):
    with engine_over(steps, prefix_caching=False) as made:
        yield made


class Sink(list):
    """Events of one request."""

    def __call__(self, event):
        self.append(event)

    @property
    def tokens(self):
        return [t for e in self for t in e.token_ids]

    @property
    def reason(self):
        return self[-1].finish_reason

    @property
    def scores(self):
        return [s.logprob for e in self for s in e.logprobs or ()]


def run(engine, *requests):
    """Events of (prompt, params, further arguments of submit) together."""
    sinks = [Sink() for _ in requests]
    for sink, (prompt, params, extras) in zip(sinks, requests, strict=True):
        engine.submit(prompt, params, on_event=sink, **extras)
    while engine.step():
        pass
    return sinks


def held(forced, prompt=(5, 6, 7), **settings):
    return prompt, DRAWN.replace(**settings), {"constraint": compiler()(forced)}


class Open:
    """A constraint that allows every token and breaks after ``breaks_after`` of them."""

    ends, free = True, 0

    def __init__(self, breaks_after=10**9):
        self.breaks_after, self.done, self.pushed = breaks_after, False, []

    def begin(self):
        return Open(self.breaks_after)

    def push(self, token_id):
        self.pushed.append(token_id)

    def fill(self, row):
        if len(self.pushed) >= self.breaks_after:
            raise ConstraintError("enough")
        row[:] = -1


# -- whatever the weights ----------------------------------------------------------------------------------------------


def check_json(tokens):
    assert fits(json.loads(read(tokens).content), SCHEMA)


def check_calls(tokens):
    message = read(tokens, TOOLS)
    assert len(message.calls) == 1
    assert message.problems == ()
    by_name = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}
    assert fits(json.loads(message.calls[0].arguments), by_name[message.calls[0].name])


def check_thought(tokens):
    assert [c.name for c in read(tokens, TOOLS, start=State.REASONING, thinking=True).calls] == ["ping"]


@pytest.mark.parametrize("seed", range(2))
def test_outputs_fit_and_neighbours_do_not_notice(engine, seed):
    free = ((9, 10, 11, 12), FREE.replace(seed=seed), {})
    alone = run(engine, free)[0].tokens
    wishes = ((JSON, check_json), (CALLS, check_calls), (THOUGHT, check_thought))
    solo = [run(engine, held(w, seed=seed))[0].tokens for w, _ in wishes]
    sinks = run(engine, free, *(held(w, seed=seed) for w, _ in wishes))
    assert sinks[0].tokens == alone
    for sink, (_, check), tokens in zip(sinks[1:], wishes, solo, strict=True):
        assert sink.tokens == tokens
        assert sink.reason in ("stop", "length")
        if sink.reason == "stop":
            check(sink.tokens)
    assert any(s.reason == "stop" for s in sinks[1:])


def test_choices_of_one_request_are_held_each_for_itself(engine):
    made = {"constraint": compiler()(JSON)}
    sinks = run(engine, *(((5, 6), p, made) for p in DRAWN.replace(n=4, seed=1, temperature=0.6).choices()))
    ended = [s.tokens for s in sinks if s.reason == "stop"]
    assert len(ended) >= 2
    assert len({tuple(t) for t in ended}) == len(ended)
    for tokens in ended:
        check_json(tokens)


def test_an_open_mask_changes_nothing(engine):
    """Drawing again takes back what the first draw counted: tokens under penalties and scores are the same."""
    params = FREE.replace(seed=3, frequency_penalty=0.7, repetition_penalty=1.2, logprobs=2)
    prompt = tuple(range(20, 60))
    plain, masked = (
        run(engine, (prompt, params.replace(ignore_eos=False), x))[0] for x in ({}, {"constraint": Open()})
    )
    assert plain.tokens == masked.tokens
    assert len(plain.tokens) > 10
    np.testing.assert_array_equal(plain.scores, masked.scores)


def test_a_token_drawn_again_counts_once(steps):
    row = sampling.slot_row(FREE, (5, 6, 7), 512, (), 0)
    steps.admit(1, row, 400)
    _, logits = steps.prefill([((5, 6, 7), 1, 0, True)])
    mask = np.zeros((logits.shape[0], 16), np.int32)
    mask[0, 3] = 1 << 9
    for _ in range(2):  # however often
        assert steps.redraw([1], logits, mask)[0] == 3 * 32 + 9
        state = steps.state.sampling
        assert (int(state.generated[1]), int(state.out_count[1].sum())) == (1, 1)
        assert int(state.out_count[1, 105]) == 1
        assert int(steps.state.position[1]) == 3
    steps.release(1)


def test_greedy_takes_the_best_of_what_is_allowed(engine):
    forced = structured("choice", ["yes", "no", "maybe"])
    first = run(engine, held(forced, temperature=0.0, logprobs=20))[0]
    assert tokenizer().decode(first.tokens) in ("yes", "no", "maybe")
    assert all(np.isfinite(first.scores))


def test_the_mask_wins_over_other_settings(engine):
    forced = structured("choice", ["yes"])
    other = tokenizer().encode("n")[0]
    settings = {"min_tokens": 40, "logit_bias": {other: 100.0}, "ignore_eos": True, "presence_penalty": 2.0}
    sink = run(engine, held(forced, **settings))[0]
    assert tokenizer().decode(sink.tokens) == "yes"
    assert sink.reason == "stop"


def test_a_complete_output_that_fills_its_limit_is_not_called_cut(engine):
    forced = structured("choice", ["yes"])
    length = len(run(engine, held(forced))[0].tokens)
    full, short = run(engine, held(forced, max_tokens=length), held(forced, max_tokens=length - 1))
    assert (full.reason, short.reason) == ("stop", "length")


def test_preemption_goes_on_where_the_grammar_was(engine):
    """16 pages of 64 tokens hold three requests of 270 tokens; four are sent."""
    forced = structured("regex", "([a-z]{1,9} ){100}[a-z]{9}")
    requests = [held(forced, prompt=tuple(range(k, 180 + k)), seed=k, max_tokens=90) for k in range(4)]
    solo = [run(engine, r)[0].tokens for r in requests[-2:]]
    before = engine.stats()["preemptions"]
    sinks = run(engine, *requests)
    assert engine.stats()["preemptions"] > before
    assert [s.tokens for s in sinks[-2:]] == solo
    for sink in sinks:
        assert sink.reason == "length"
        assert re.fullmatch("([a-z]{1,9} )+[a-z]{0,9}", tokenizer().decode(sink.tokens))


def test_a_grammar_that_breaks_ends_its_own_request_only(engine):
    free = ((9, 10, 11, 12), FREE.replace(seed=1), {})
    alone = run(engine, free)[0].tokens
    sinks = run(engine, free, *(((1, 2), FREE, {"constraint": Open(n)}) for n in (0, 1, 5)))
    assert sinks[0].tokens == alone
    assert [len(s.tokens) for s in sinks[1:]] == [0, 1, 5]
    assert [(s.reason, s[-1].error, s[-1].refused) for s in sinks[1:]] == [("error", "enough", True)] * 3


# -- budgets of thoughts -----------------------------------------------------------------------------------------------

THINK, END, CALL = (tokenizer().added_tokens[tag] for tag in ("<think>", "</think>", "<tool_call>"))
EOS = sorted(tokenizer().eog_ids)[0]


def budget(limit, *, start=State.REASONING, inner=None):
    return {"constraint": Budget(limit, Tags.of(tokenizer().added_tokens).block, start, inner)}


def test_a_thought_ends_with_its_budget_and_costs_nothing_else(engine, monkeypatch):
    """Each thought is what it would be without a budget, up to its last token; one mask a request closes it."""
    again, waits = [], []
    redraw, hold = engine.steps.redraw, Engine._redraw
    monkeypatch.setattr(engine.steps, "redraw", lambda *a: again.append(int((a[2] != -1).any(1).sum())) or redraw(*a))
    monkeypatch.setattr(Engine, "_redraw", lambda self, *a: waits.append(a[1]) or hold(self, *a))
    never = FREE.replace(logit_bias={END: -100.0, CALL: -100.0})  # left alone, these thoughts do not end
    free = ((9, 10, 11, 12), FREE.replace(seed=1), {})
    alone = [run(engine, ((5, 6, 7), never.replace(seed=k), {}))[0].tokens for k in range(3)]
    neighbour = run(engine, free)[0].tokens
    assert not again
    limits = (0, 1, 9)
    asked = [((5, 6, 7), never.replace(seed=k), budget(n)) for k, n in enumerate(limits)]
    sinks = run(engine, free, *asked)
    assert sinks[0].tokens == neighbour
    for sink, limit, other in zip(sinks[1:], limits, alone, strict=True):
        assert sink.tokens[:limit] == other[:limit]
        assert sink.tokens.index(END) == limit
        assert (len(sink.tokens), sink.reason) == (40, "length")
        assert read(sink.tokens, start=State.REASONING, thinking=True, ended=False).content
    assert sum(again) == len(limits)
    assert len(waits) < 15  # of 160 tokens


def test_thoughts_that_begin_again_are_closed_a_token_late_at_most(engine):
    """A model that always writes <think>: inside of a thought the tag is a token like any other."""
    stuck = FREE.replace(logit_bias={THINK: 100.0}, max_tokens=9, presence_penalty=0.0)
    requests = [((5, 6, 7), stuck, budget(n, start=State.CONTENT)) for n in (0, 1)]
    for sink, first in zip(run(engine, *requests), ([THINK, END], [THINK, THINK, END]), strict=True):
        assert sink.tokens == (first + [THINK, THINK, END] * 3)[:9]


def test_a_budget_leaves_the_end_to_the_request_and_a_grammar_does_not(engine):
    params = FREE.replace(logit_bias={EOS: 100.0}, max_tokens=5, presence_penalty=0.0)
    (letter,) = tokenizer().encode("a")
    wants = params.replace(max_tokens=60, logit_bias={letter: 100.0})
    grammar = ((5, 6, 7), wants, budget(4, inner=compiler()(THOUGHT)))
    plain, held_too = run(engine, ((5, 6, 7), params, budget(2)), grammar)
    assert (plain.tokens, plain.reason) == ([EOS, EOS, END, EOS, EOS], "length")
    assert [c.name for c in read(held_too.tokens, TOOLS, start=State.REASONING, thinking=True).calls] == ["ping"]
    assert held_too.tokens[:5] == [letter] * 4 + [END]
    assert held_too.reason == "stop"


# -- scores of the prompt ----------------------------------------------------------------------------------------------

LONG = [int(i) for i in np.random.default_rng(0).integers(0, 480, 75)]  # three chunks


def scores_of(prompt):
    return golden.language_model(NAME).score([(prompt[:1], prompt[1:])])[0]


def test_prompt_scores_are_those_of_the_model(engine):
    (sink,) = run(engine, (LONG, DRAWN.replace(max_tokens=3, seed=1), {"prompt_logprobs": 2}))
    told = [e.prompt_logprobs for e in sink]
    assert told[1:] == [None, None]
    assert told[0][0] is None
    found = told[0][1:]
    np.testing.assert_allclose([s.logprob for s in found], scores_of(LONG), rtol=1e-5, atol=1e-5)
    assert [s.token_id for s in found] == LONG[1:]
    for s in found:
        assert len(s.top) == 2
        assert (s.rank == 1) == (s.top[0][0] == s.token_id)
        assert s.top[0][1] >= s.top[1][1]
    assert sink.tokens == run(engine, (LONG, DRAWN.replace(max_tokens=3, seed=1), {}))[0].tokens


def test_a_prompt_that_is_only_read(engine):
    whole = [int(i) for i in np.random.default_rng(1).integers(0, 480, engine.max_model_len)]
    read_only = {"prompt_logprobs": 0, "generate": False}
    for sink, prompt in zip(
        run(engine, *((p, DRAWN, read_only) for p in (LONG, [7], whole))), (LONG, [7], whole), strict=True
    ):
        assert [(e.token_ids, e.finish_reason) for e in sink] == [((), "length")]
        found = [s.logprob for s in sink[0].prompt_logprobs[1:]]
        np.testing.assert_allclose(found, scores_of(prompt) if prompt != [7] else [], rtol=1e-5, atol=2e-5)


def test_scores_do_not_come_from_the_cache(steps):
    with engine_over(steps) as engine:
        run(engine, (LONG, DRAWN.replace(max_tokens=1), {}))
        again, scored = run(engine, (LONG, DRAWN.replace(max_tokens=1), {}), (LONG, DRAWN, {"prompt_logprobs": 0}))
        assert again[0].cached_tokens > 0
        assert scored[0].cached_tokens == 0
        found = [s.logprob for s in scored[0].prompt_logprobs[1:]]
        np.testing.assert_allclose(found, scores_of(LONG), rtol=1e-5, atol=1e-5)


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(steps):
    engine = Engine(steps, eos_ids=tokenizer().eog_ids, seed=5, prefix_caching=False)
    engine.slots = 4
    served = dataclasses.replace(served_model(engine), constrain=compiler())
    made = Server(ServerSettings(access_log=False, log_level="warning"), engine, served)
    made.start()
    yield made
    made.stop()


def ask(server, **fields):
    client = server.client(timeout=120)
    defaults = {"model": "x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "temperature": 0.7}
    extra = {"chat_template_kwargs": {"enable_thinking": False}} | fields.pop("extra_body", {})
    return client.chat.completions.create(**(defaults | fields), extra_body=extra)


def test_a_forced_call_through_the_official_client(server):
    named = {"type": "function", "function": {"name": "measure"}}
    reply = ask(server, tools=list(TOOLS), tool_choice=named, seed=2)
    choice = reply.choices[0]
    assert choice.finish_reason == "stop"
    assert [c.function.name for c in choice.message.tool_calls] == ["measure"]
    assert fits(json.loads(choice.message.tool_calls[0].function.arguments), SCHEMA)
    reply = ask(server, tools=list(TOOLS), tool_choice="required", parallel_tool_calls=False, seed=3)
    assert len(reply.choices[0].message.tool_calls) == 1
    assert reply.choices[0].finish_reason == "tool_calls"


def test_a_streamed_schema_of_two_choices(server):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    texts, ends = ["", ""], [None, None]
    for chunk in ask(server, response_format=form, n=2, seed=4, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert "stop" in ends
    assert all(fits(json.loads(t), SCHEMA) for t, end in zip(texts, ends, strict=True) if end == "stop")


def test_vllms_fields_in_both_routes(server):
    reply = ask(server, extra_body={"guided_choice": ["red", "green"]})
    assert reply.choices[0].message.content in ("red", "green")
    body = {"prompt": "n: ", "max_tokens": 20, "structured_outputs": {"regex": "[0-9]{3}"}, "echo": True, "logprobs": 0}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"][:3] == "n: "
    assert choice["text"][3:].isdigit()
    assert len(choice["text"]) == 6
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/no"}}}}, "response_format"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
        ({"extra_body": {"structured_outputs": {"structural_tag": "{}"}}}, "structured_outputs"),
        ({"tools": [tool("f", {"anyOf": []}, strict=True)]}, "tools"),
        ({"tools": [tool("f", {"anyOf": []}, strict=True)], "tool_choice": "required"}, "tools"),
    ],
)
def test_what_does_not_compile_is_a_400_before_anything_runs(server, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **fields)
    assert caught.value.body["param"] == param
    assert not server.state.jobs


@pytest.mark.parametrize("limit", [0, 1])
def test_harness_style_scores_over_http(server, limit):
    prompts = [LONG[:40], LONG[10:75], LONG[:1]]
    body = {"prompt": prompts, "max_tokens": limit, "temperature": 0, "echo": True, "logprobs": 1}
    choices = server.http.post("/v1/completions", json=body, timeout=120).json()["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        scores = choice["logprobs"]["token_logprobs"]
        assert scores[0] is None
        assert len(scores) == len(prompt) + limit
        wanted = scores_of(prompt) if len(prompt) > 1 else []
        np.testing.assert_allclose(scores[1 : len(prompt)], wanted, rtol=1e-5, atol=1e-5)
