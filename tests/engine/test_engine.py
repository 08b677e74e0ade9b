"""The engine over a golden model: transformers' greedy tokens, company that never matters, nothing leaked.

One pair of programs (a batch of 8, a chunk of 32) serves every test here, so neighbours and padding are always there.
"""

import random

import numpy as np
import pytest

from flint_jax.engine import Engine
from flint_jax.errors import RequestError
from flint_jax.sampling_params import SamplingParams
from tests.model import golden

NAME = "T2-nvfp4"
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def steps():
    return golden.steps(NAME, slots=8, pages=16, chunks=(32,), batches=(8,), max_context=512, snapshots=6)


@pytest.fixture
def engine(steps):
    """A fresh engine over the shared programs and device state; everything must be given back at the end."""
    yield from _engine(steps, prefix_caching=False)


@pytest.fixture
def caching(steps):
    """The same with the prefix cache."""
    yield from _engine(steps, prefix_caching=True)


def _engine(steps, **how):
    made = Engine(steps, eos_ids=(483, 487, 489), seed=5, **how)
    yield made
    while made.step():
        pass
    stats = made.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert (stats["free_slots"], stats["free_pages"]) == (8, 16)
    assert not made._jobs


class Sink(list):
    """Events of one request."""

    def __call__(self, event):
        self.append(event)

    @property
    def tokens(self):
        return tuple(t for e in self for t in e.token_ids)

    @property
    def last(self):
        return self[-1]


def run(engine, prompt, params=GREEDY, others=()):
    sinks = [Sink() for _ in (prompt, *others)]
    for sink, p in zip(sinks, (prompt, *others), strict=True):
        engine.submit(p, params, on_event=sink)
    while engine.step():
        pass
    return sinks[0] if not others else sinks


def prompt_of(case):
    return golden.arrays(NAME)[f"{case}.input_ids"]


@pytest.mark.parametrize("case", ["greedy_a", "greedy_b"])
def test_greedy_tokens(engine, case):
    sink = run(engine, prompt_of(case))
    assert sink.tokens == tuple(golden.arrays(NAME)[f"{case}.tokens"])
    assert sink.last.finish_reason == "length"
    assert sink.last.prompt_tokens == len(prompt_of(case))
    assert [e.finish_reason for e in sink[:-1]] == [None] * (len(sink) - 1)


def test_greedy_batch(engine):
    g = golden.arrays(NAME)
    lengths = golden.cases(NAME)["cases"]["greedy_batch"]["lengths"]
    prompts = [ids[len(ids) - n :] for ids, n in zip(g["greedy_batch.input_ids"], lengths, strict=True)]
    sinks = run(engine, prompts[0], others=prompts[1:])
    for sink, tokens in zip(sinks, g["greedy_batch.tokens"], strict=True):
        assert sink.tokens == tuple(tokens)


def test_logprobs_are_the_goldens(engine):
    g = golden.arrays(NAME)
    sink = run(engine, prompt_of("greedy_a"), GREEDY.replace(logprobs=3))
    scores = [s for e in sink for s in e.logprobs]
    np.testing.assert_allclose([s.logprob for s in scores], g["greedy_a.logprob"], atol=2e-4)
    for s, token in zip(scores, sink.tokens, strict=True):
        assert s.rank == 1
        assert s.token_id == s.top[0][0] == token
        assert len(s.top) == 3


def test_a_seeded_reply_never_depends_on_its_neighbours(engine):
    params = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, seed=11, max_tokens=24, ignore_eos=True)
    prompt = prompt_of("greedy_a")
    alone = run(engine, prompt, params).tokens
    rng = np.random.default_rng(0)
    others = [rng.integers(0, 480, n) for n in (1, 3, 9, 17, 33, 40, 64)]
    assert run(engine, prompt, params, others)[0].tokens == alone
    assert run(engine, prompt, params.replace(seed=12)).tokens != alone


def test_requests_without_a_seed_differ(engine):
    params = SamplingParams(temperature=1.5, max_tokens=16, ignore_eos=True)
    first, second = run(engine, (5, 6, 7), params, [(5, 6, 7)])
    assert first.tokens != second.tokens


def test_stop_ids_end_a_request_and_are_not_part_of_it(engine):
    tokens = golden.arrays(NAME)["greedy_a.tokens"]
    stop = int(tokens[5])
    first = list(tokens).index(stop)
    sink = run(engine, prompt_of("greedy_a"), GREEDY.replace(stop_token_ids=(stop,)))
    assert sink.tokens == tuple(tokens[:first])
    assert (sink.last.finish_reason, sink.last.stop_token) == ("stop", stop)
    later = run(engine, prompt_of("greedy_a"), GREEDY.replace(stop_token_ids=(stop,), min_tokens=first + 2))
    assert len(later.tokens) >= first + 2


def test_one_token(engine):
    sink = run(engine, prompt_of("greedy_a"), GREEDY.replace(max_tokens=1))
    assert sink.tokens == (golden.arrays(NAME)["greedy_a.tokens"][0],)
    assert sink.last.finish_reason == "length"


def test_pages_run_out_and_nothing_is_lost(engine):
    """16 pages of 64 tokens hold four requests of 200; eight are sent."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 480, n) for n in (150, 30, 60, 100, 90, 10, 120, 64)]
    params = GREEDY.replace(max_tokens=110)
    alone = [run(engine, p, params).tokens for p in prompts[:3]]
    sinks = run(engine, prompts[0], params, prompts[1:])
    assert engine.scheduler.preemptions > 0
    for sink in sinks:
        assert len(sink.tokens) == 110
    for sink, want in zip(sinks, alone, strict=False):
        assert sink.tokens == want


def test_penalties_survive_a_preemption(engine):
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 480, n) for n in (150, 100, 90, 120, 64, 80, 70)]
    params = GREEDY.replace(max_tokens=110, presence_penalty=1.5, frequency_penalty=0.5)
    alone = run(engine, prompts[-1], params).tokens
    before = engine.scheduler.preemptions
    sinks = run(engine, prompts[0], params, prompts[1:])
    assert engine.scheduler.preemptions > before
    assert sinks[-1].tokens == alone


# Window 33, ring 128: shorter than the window, than the ring, and longer; on a page's edge and inside.
@pytest.mark.parametrize("lengths", [(5, 3, 4), (20, 30, 64), (64, 32, 1), (150, 45, 70)])
def test_a_conversation_is_what_it_is_without_the_cache(engine, caching, lengths):
    """Tokens and log-probabilities of three turns, and what they cost.

    Measured: 2e-6 (other chunks, other summation order); tolerance 1e-4.
    """
    rng = np.random.default_rng(sum(lengths))
    params = GREEDY.replace(max_tokens=9, logprobs=0)
    history, cost, warm = [], [], {}
    for length in lengths:
        history += rng.integers(0, 480, length).tolist()
        before = caching.stats()["prefilled_tokens"]
        sink = warm[tuple(history)] = run(caching, history, params)
        cost.append(caching.stats()["prefilled_tokens"] - before)
        history += sink.tokens
    first, second, third = lengths
    assert cost == [first, second + 1, third + 1]
    assert [s.last.cached_tokens for s in warm.values()] == [0, first + 8, first + 9 + second + 8]
    for prompt, sink in warm.items():  # both engines share one device: the other one comes after
        cold = run(engine, prompt, params)
        assert cold.last.cached_tokens == 0
        assert sink.tokens == cold.tokens
        scores = [[s.logprob for e in each for s in e.logprobs] for each in (sink, cold)]
        np.testing.assert_allclose(*scores, atol=1e-4)


def test_a_cached_seeded_reply_among_seven_others(engine, caching):
    """The seed decides, not where the prefix came from nor who else runs."""
    params = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, seed=11, max_tokens=24, ignore_eos=True)
    prompt = np.random.default_rng(9).integers(0, 480, 100).tolist()
    alone = run(engine, prompt, params).tokens
    run(caching, prompt[:90], params.replace(max_tokens=1))
    others = [[*prompt[: 15 * i], *range(i)] for i in range(1, 7)]
    sinks = run(caching, prompt, params, [*others, prompt])
    assert sinks[0].last.cached_tokens == 90
    assert sinks[0].tokens == sinks[-1].tokens == alone
    assert all(s.last.finish_reason == "length" for s in sinks)


def test_random_aborts_leak_nothing(engine):
    rng = random.Random(0)
    waiting = []
    for round_ in range(40):
        if rng.random() < 0.7:
            sink = Sink()
            prompt = [rng.randrange(480) for _ in range(rng.randint(1, 90))]
            name = engine.submit(prompt, GREEDY.replace(max_tokens=rng.randint(1, 20)), on_event=sink)
            waiting.append((name, sink))
        if waiting and rng.random() < 0.4:
            engine.abort(rng.choice(waiting)[0])
        engine.step()
        if round_ % 20 == 0:
            engine.abort("no such request")
    while engine.step():
        pass
    for _, sink in waiting:
        assert [e.finish_reason is not None for e in sink].count(True) == 1
        assert sink.last.finish_reason in ("length", "abort")
    sink = run(engine, prompt_of("greedy_a"))
    assert sink.tokens == tuple(golden.arrays(NAME)["greedy_a.tokens"])


def test_nan_fails_that_request_only(engine, steps):
    import jax.numpy as jnp

    victim, healthy = Sink(), Sink()
    name = engine.submit(prompt_of("greedy_b"), GREEDY, on_event=victim)
    engine.submit(prompt_of("greedy_a"), GREEDY, on_event=healthy)
    for _ in range(8):
        engine.step()
    import dataclasses

    page = engine._jobs[name].request.pages[0]
    cache = steps.state.cache
    poisoned = dataclasses.replace(cache, k_pages=cache.k_pages.at[:, page].set(jnp.nan))
    steps.state = dataclasses.replace(steps.state, cache=poisoned)
    while engine.step():
        pass
    assert victim.last.finish_reason == "error"
    assert "NaN" in victim.last.error
    assert healthy.tokens == tuple(golden.arrays(NAME)["greedy_a.tokens"])


@pytest.mark.parametrize(
    ("prompt", "params", "match", "code"),
    [
        ((), {}, "at least one", "invalid_value"),
        ((512,), {}, "outside the vocabulary", "invalid_value"),
        ((-1,), {}, "outside the vocabulary", "invalid_value"),
        (tuple(range(512)), {}, "maximum context length is 512", "context_length_exceeded"),
        ((1,), {"logit_bias": {512: 1.0}}, "logit_bias", "invalid_value"),
    ],
)
def test_bad_requests_are_refused_at_once(engine, prompt, params, match, code):
    with pytest.raises(RequestError, match=match) as caught:
        engine.submit(prompt, GREEDY.replace(**params), on_event=Sink())
    assert caught.value.code == code


def test_max_tokens_is_clamped_to_the_context(engine):
    sink = run(engine, tuple(range(400)), GREEDY.replace(max_tokens=10_000))
    assert len(sink.tokens) == 112
    assert sink.last.finish_reason == "length"


def test_the_thread_runs_fails_and_stops(steps):
    engine = Engine(steps)
    engine.start()
    assert engine.ready
    sink, done = Sink(), __import__("threading").Event()

    def watch(event):
        sink(event)
        if event.finish_reason:
            done.set()

    engine.submit(prompt_of("greedy_a"), GREEDY, on_event=watch)
    assert done.wait(120)
    assert sink.tokens == tuple(golden.arrays(NAME)["greedy_a.tokens"])
    broken, done = Sink(), __import__("threading").Event()

    def boom(*_):
        raise ValueError("injected")

    original, engine.steps = engine.steps, type("Broken", (), {"__getattr__": lambda self, name: boom})()

    def watch_broken(event):
        broken(event)
        done.set()

    engine.submit((1, 2, 3), GREEDY, on_event=watch_broken)
    assert done.wait(30)
    assert broken.last.finish_reason == "error"
    assert "injected" in str(engine.failed)
    assert not engine.ready
    with pytest.raises(RuntimeError, match="injected"):
        engine.submit((1,), GREEDY, on_event=sink)
    engine.steps = original
    engine.stop()
