"""The engine's conduct over steps of token ids: aborts, failures, bad listeners, fair turns. No model, no waiting."""

import asyncio
import random
import threading

import numpy as np
import pytest

from flint_jax.engine import Engine
from flint_jax.errors import RequestError
from flint_jax.plan import Prompt
from flint_jax.sampling_params import SamplingParams
from flint_jax.step import Sizes
from tests.engine.fake_steps import VOCABULARY, Drawn, FakeSteps, next_token, reply

WINDOW = 33
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def make(*, slots=4, pages=24, chunks=(16, 64), snapshots=6, **more):
    steps = FakeSteps(Sizes(slots, pages, 1024, (1, 2, slots), chunks, snapshots), window=WINDOW)
    return Engine(steps, **more)


class Sink(list):
    """Events of one request; ``done`` is set with the last."""

    def __init__(self):
        super().__init__()
        self.done = threading.Event()

    def __call__(self, event):
        self.append(event)
        if event.finish_reason is not None:
            self.done.set()

    @property
    def tokens(self):
        return [t for e in self for t in e.token_ids]

    @property
    def last(self):
        return self[-1]


def submit(engine, prompt, params=GREEDY, **how):
    sink = Sink()
    sink.id = engine.submit(prompt, params, on_event=sink, **how)
    sink.prompt = list(prompt)
    return sink


def run(engine, *sinks):
    while engine.step():
        pass
    return sinks[0] if len(sinks) == 1 else sinks


def idle(engine):
    """Nothing is in use: every slot and page is free or cached, and the books agree."""
    stats = engine.stats()
    engine.scheduler.check([])
    assert not engine._jobs
    assert not engine._inflight
    return {k: stats[k] for k in ("running", "waiting", "free_slots", "free_pages")} == {
        "running": 0,
        "waiting": 0,
        "free_slots": stats["slots"],
        "free_pages": stats["pages"],
    }


def prompts(rng, count, longest=400):
    """Prompts of all lengths, many with a common beginning."""
    stems = [[rng.randrange(VOCABULARY) for _ in range(longest)] for _ in range(3)]
    for _ in range(count):
        tail = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))]
        yield rng.choice(stems)[: rng.choice([0, 10, 60, 64, 130, rng.randrange(longest)])] + tail


# -- one thread --------------------------------------------------------------------------------------------------------


def test_the_second_turn_costs_its_new_tokens_only():
    engine = make()
    history, cost = [5, 6, 7], []
    for turn in range(3):
        before = engine.stats()
        sink = run(engine, submit(engine, history))
        after = engine.stats()
        assert sink.tokens == reply(history, 8, WINDOW)
        assert {e.cached_tokens for e in sink} == {0 if turn == 0 else len(history) - 60 - 1}
        assert after["prefix_hits"] - before["prefix_hits"] == sink.last.cached_tokens
        assert after["prefix_queries"] - before["prefix_queries"] == len(history)
        assert after["prompt_tokens"] - before["prompt_tokens"] == len(history)
        cost.append(after["prefilled_tokens"] - before["prefilled_tokens"])
        history = [*history, *sink.tokens, *range(turn, turn + 60)]
    assert cost == [3, 61, 61]
    assert engine.stats()["cached_tokens"] == engine.stats()["prefix_hits"]


def test_a_turn_that_ended_with_a_stop_id_is_taken_up_before_it():
    history = [5, 6, 7]
    tokens = reply(history, 8, WINDOW)
    engine = make(eos_ids=(tokens[5],))
    sink = run(engine, submit(engine, history, GREEDY.replace(ignore_eos=False)))
    assert (sink.last.finish_reason, sink.last.stop_token, sink.tokens) == ("stop", tokens[5], tokens[:5])
    sink = run(engine, submit(engine, [*history, *tokens[:6], 1, 2]))
    assert sink.last.cached_tokens == 3 + 5
    assert sink.tokens == reply([*history, *tokens[:6], 1, 2], 8, WINDOW)


def test_a_turn_that_was_aborted_is_taken_up_where_the_host_had_read():
    engine = make()
    sink = submit(engine, range(200), GREEDY.replace(max_tokens=100))
    while len(sink.tokens) < 20:
        engine.step()
    engine.abort(sink.id)
    run(engine)
    history = [*range(200), *sink.tokens, 3]
    again = run(engine, submit(engine, history))
    assert again.last.cached_tokens == 200 + len(sink.tokens) - 1
    assert again.tokens == reply(history, 8, WINDOW)


def test_salt_and_reuse_reach_the_cache():
    engine = make()
    run(engine, submit(engine, range(100), cache_salt="a"))
    assert run(engine, submit(engine, range(100))).last.cached_tokens == 0
    assert run(engine, submit(engine, range(100), cache_salt="a", reuse_prefix=False)).last.cached_tokens == 0
    assert run(engine, submit(engine, range(100), cache_salt="a")).last.cached_tokens == 99


def test_caching_can_be_left_off():
    engine = make(prefix_caching=False)
    for _ in range(2):
        assert run(engine, submit(engine, range(100))).last.cached_tokens == 0
    stats = engine.stats()
    assert (stats["snapshots"], stats["cached_pages"], stats["prefix_queries"]) == (0, 0, 0)
    assert not [op for op in engine.steps.log if op[0] in ("save", "restore", "copy")]


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_nan_fails_its_request_only_and_is_not_cached(when):
    engine = make()
    bad, good = submit(engine, range(150), GREEDY.replace(max_tokens=20)), submit(engine, range(200, 350))
    engine.step()
    if when == "decode":
        while not bad.tokens:
            engine.step()
    engine.steps.poison.add(engine._jobs[bad.id].request.slot)
    run(engine)
    assert bad.last.finish_reason == "error"
    assert "NaN" in bad.last.error
    assert good.tokens == reply(good.prompt, 8, WINDOW)
    again = run(engine, submit(engine, range(150)))
    assert again.last.cached_tokens == 0
    assert again.tokens == reply(range(150), 8, WINDOW)
    assert idle(engine)


def test_a_request_that_took_up_nan_is_computed_again_without_it():
    engine = make()
    run(engine, submit(engine, range(150)))
    again = submit(engine, [*range(150), 1], GREEDY.replace(max_tokens=20))
    while len(again.tokens) < 5:
        engine.step()
    assert again.last.cached_tokens == 150
    engine.steps.poison.add(engine._jobs[again.id].request.slot)
    run(engine)
    assert again.tokens == reply([*range(150), 1], 20, WINDOW)
    assert again.last.finish_reason == "length"
    assert idle(engine)


def test_pages_run_out_and_every_reply_is_whole():
    engine = make(pages=9, slots=4)
    rng = random.Random(1)
    sinks = [submit(engine, p, GREEDY.replace(max_tokens=120)) for p in prompts(rng, 10, 150)]
    run(engine)
    assert engine.stats()["preemptions"] > 0
    for sink in sinks:
        assert sink.tokens == reply(sink.prompt, 120, WINDOW)
        assert len({(e.cached_tokens, e.admitted_at) for e in sink}) == 1  # of the first admission
    assert idle(engine)


@pytest.mark.parametrize("snapshots", [1, 2, 5])
def test_results_may_be_read_in_the_middle_of_a_plan(snapshots):
    """As for masks, which follow from the tokens before them: a request then ends while the plan is carried out, and
    the snapshot it leaves must not take the place of one that the plan has yet to save."""
    engine = make(slots=3, snapshots=snapshots, chunks=(16,))
    engine.scheduler.interval = 64
    prefill = engine.steps.prefill

    def read_first(*args):
        out = prefill(*args)
        while engine._inflight:
            engine._read(engine._inflight.popleft())
        return out

    engine.steps.prefill = read_first
    rng = random.Random(3)
    for _ in range(12):
        sinks = [submit(engine, p, GREEDY.replace(max_tokens=rng.randint(1, 6))) for p in prompts(rng, 6, 200)]
        run(engine)
        for sink in sinks:
            assert sink.tokens == reply(sink.prompt, len(sink.tokens), WINDOW)
            again = run(engine, submit(engine, [*sink.prompt, *sink.tokens, 1], GREEDY.replace(max_tokens=2)))
            assert again.tokens == reply([*sink.prompt, *sink.tokens, 1], 2, WINDOW)


def test_between_two_tokens_of_a_stream_lies_one_budget_of_prefill():
    """A prompt of 900 tokens and some short ones join three streams."""
    engine = make(slots=8, pages=60)
    streams = [submit(engine, [i], GREEDY.replace(max_tokens=60)) for i in range(3)]
    for _ in range(6):
        engine.step()
    engine.steps.log.clear()
    submit(engine, range(400, 480), GREEDY.replace(max_tokens=1))
    submit(engine, [i % 400 for i in range(900)], GREEDY.replace(max_tokens=1))
    submit(engine, range(300, 310), GREEDY.replace(max_tokens=1))
    run(engine)
    gap, worst = 0, 0
    for op in engine.steps.log:
        if op[0] == "decode":
            gap = 0
        elif op[0] == "prefill":
            gap += op[3]
            worst = max(worst, gap)
    assert 48 < worst <= 64
    assert all(len(s.tokens) == 60 for s in streams)


def test_decode_takes_the_smallest_batch_and_one_row_a_request():
    engine = make(slots=4)
    for i in range(3):
        submit(engine, [i], GREEDY.replace(max_tokens=4 + i))
    run(engine)
    assert {len(op) - 1 for op in engine.steps.log if op[0] == "decode"} == {1, 2, 3}


def test_when_a_request_left_the_queue():
    engine = make(slots=1)
    first, second = submit(engine, [1]), submit(engine, [2])
    run(engine)
    assert first.last.admitted_at < second.last.admitted_at
    waiting = submit(engine, [3])
    engine.abort(waiting.id)
    run(engine)
    assert (waiting.last.finish_reason, waiting.last.admitted_at) == ("abort", None)


def test_the_host_reads_one_step_behind_the_device():
    engine = make()
    sink = submit(engine, [1, 2, 3])
    for behind in range(4):
        engine.step()
        assert len(engine._inflight) == 1
        assert len(sink.tokens) == behind
    run(engine)
    assert len(sink.tokens) == 8


def test_at_most_one_step_is_ahead_while_a_long_prompt_is_read():
    """Before, the whole prompt was queued at once: a short one waited for all of it, and nobody could be stopped."""
    engine = make()
    sink = submit(engine, [i % 400 for i in range(900)], GREEDY.replace(max_tokens=1))
    read, wait = [], engine._read

    def note(result):
        read.append(result)
        wait(result)

    engine._read = note
    engine.steps.log.clear()
    while engine.step():
        steps = sum(op[0] == "step" for op in engine.steps.log)
        assert steps - len(read) <= 1
    assert steps == len(read) == 15
    assert sink.tokens == reply(sink.prompt, 1, WINDOW)


def test_an_abort_takes_effect_within_two_steps_of_prefill():
    engine = make()
    sink = submit(engine, [i % 400 for i in range(900)])
    for _ in range(3):
        engine.step()
    engine.steps.log.clear()
    engine.abort(sink.id)
    run(engine)
    assert sink.last.finish_reason == "abort"
    assert sum(op[0] == "step" for op in engine.steps.log) <= 1
    assert idle(engine)


def test_a_short_prompt_comes_in_with_the_next_step_of_a_long_one():
    engine = make()
    long = submit(engine, [i % 400 for i in range(900)])
    for _ in range(3):
        engine.step()
    short = submit(engine, range(26), GREEDY.replace(max_tokens=1))
    engine.step()
    engine.step()
    assert short.last.finish_reason == "length"
    run(engine)
    assert (short.tokens, long.tokens) == (reply(short.prompt, 1, WINDOW), reply(long.prompt, 8, WINDOW))


def test_log_probabilities_of_prompts_that_share_steps():
    """Each piece is scored by its row of the step, against the tokens that follow it."""
    engine = make()
    asked = []

    def score(row, following):
        asked.append((engine.steps.pieces[row], tuple(following)))
        n = len(following)
        return tuple(np.zeros(shape).view(Drawn) for shape in (n, (n, 20), (n, 20), n)), 0

    engine.steps.score_prompt = score
    sinks = [submit(engine, range(i, i + n), prompt_logprobs=0) for i, n in ((0, 150), (200, 30), (300, 90))]
    run(engine)
    for sink in sinks:
        assert len(sink[0].prompt_logprobs) == len(sink.prompt)
        assert None not in sink[0].prompt_logprobs[1:]
    assert any(row for (row, *_), _ in asked)
    for (_, tokens, _, _, _), following in asked:
        assert following[: len(tokens) - 1] == tuple(tokens[1:])


def test_how_far_a_prompt_is():
    engine = make()
    run(engine, submit(engine, range(100), GREEDY.replace(max_tokens=1)))
    prompt = [*range(100), *(i % 300 for i in range(300))]
    asked, silent = submit(engine, prompt, report_progress=True), submit(engine, range(50, 90))
    seen = set()
    while engine.step():
        seen |= {(name, p.processed) for name, p in engine.progress().items()}
        stats = engine.stats()
        assert stats["computed_prompt_tokens"] <= stats["prefilled_tokens"]
    steps = [e.progress for e in asked if e.progress is not None]
    assert {(p.total, p.cached) for p in steps} == {(400, 100)}
    assert [p.processed for p in steps] == sorted({p.processed for p in steps})
    assert steps[-1].processed == 400
    assert len(steps) >= 5
    assert all(p.seconds >= 0 for p in steps)
    assert all(not e.token_ids for e in asked if e.progress is not None)
    assert all(e.progress is None for e in silent)
    assert (asked.id, 100) in seen
    assert len({n for name, n in seen if name == asked.id}) >= 4
    assert engine.progress() == {}
    stats = engine.stats()
    assert stats["computed_prompt_tokens"] == stats["prefilled_tokens"] == 100 + 300 + 40
    assert asked.tokens == reply(prompt, 8, WINDOW)


def test_an_aborted_slot_stands_still():
    engine = make()
    sink = submit(engine, [1, 2, 3], GREEDY.replace(max_tokens=50))
    while not sink.tokens:
        engine.step()
    slot = engine._jobs[sink.id].request.slot
    assert engine.steps.slots[slot].active
    engine.abort(sink.id)
    run(engine)
    assert not engine.steps.slots[slot].active


def test_a_listener_that_raises_loses_its_own_request_only():
    engine = make()
    heard = []

    def bad(event):
        heard.append(event)
        raise ValueError("the listener is broken")

    engine.submit([1, 2, 3], GREEDY, on_event=bad)
    good = submit(engine, [4, 5])
    run(engine)
    assert good.tokens == reply([4, 5], 8, WINDOW)
    assert heard[-1].finish_reason == "abort"
    assert len(heard) <= 3
    assert idle(engine)


def test_as_many_aborts_as_slots_and_ten_times_that_leave_the_engine_whole():
    engine = make(slots=4)
    for count in (4, 5, 40):
        sinks = [submit(engine, range(70 + i), GREEDY.replace(max_tokens=50)) for i in range(count)]
        for i, sink in enumerate(sinks):
            for _ in range(i % 5):
                engine.step()
            engine.abort(sink.id)
        run(engine)
        assert {s.last.finish_reason for s in sinks} == {"abort"}
        assert idle(engine)
    sinks = [submit(engine, [i, i + 1]) for i in range(8)]
    run(engine)
    assert [s.tokens for s in sinks] == [reply(s.prompt, 8, WINDOW) for s in sinks]


# -- with the engine's thread ------------------------------------------------------------------------------------------


def test_a_thousand_aborts_at_random_moments_leak_nothing():
    threads = threading.active_count()
    engine = make(slots=4, pages=24, snapshots=6)
    engine.start()
    rng = random.Random(7)
    alive, all_sinks = [], []
    aborted = 0
    for prompt in prompts(rng, 1300):
        sink = submit(engine, prompt, GREEDY.replace(max_tokens=rng.randint(1, 12)), cache_salt=rng.choice([None, "x"]))
        alive.append(sink)
        all_sinks.append(sink)
        while len(alive) > 12 or (alive and rng.random() < 0.7):
            victim = alive.pop(rng.randrange(len(alive)))
            if rng.random() < 0.85:
                engine.abort(victim.id)
                aborted += 1
            assert victim.done.wait(60)
    for sink in alive:
        assert sink.done.wait(60)
    assert aborted >= 1000
    reasons = {"abort": 0, "length": 0}
    for sink in all_sinks:
        assert [e.finish_reason for e in sink if e.finish_reason] == [sink.last.finish_reason]
        reasons[sink.last.finish_reason] += 1
        assert sink.tokens == reply(sink.prompt, len(sink.tokens), WINDOW)
    assert min(reasons.values()) > 100
    engine.stop()
    assert engine.scheduler.hits > 0
    assert idle(engine)
    assert threading.active_count() == threads


def test_a_failure_ends_everything_and_is_remembered():
    engine = make()
    sinks = [submit(engine, [i], GREEDY.replace(max_tokens=500)) for i in range(6)]
    calls = iter(range(20))

    def decode(slots, fast=False, original=engine.steps.decode):
        if next(calls, None) is None:
            raise ValueError("injected")
        return original(slots, fast)

    engine.steps.decode = decode
    engine.start()
    for sink in sinks:
        assert sink.done.wait(60)
        assert sink.last.finish_reason == "error"
        assert "injected" in sink.last.error
    assert "injected" in str(engine.failed)
    assert not engine.ready
    with pytest.raises(RuntimeError, match="injected"):
        submit(engine, [1])
    engine.stop()
    assert idle(engine)


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, SystemExit])
@pytest.mark.parametrize("stop", [False, True])
def test_at_the_end_all_listeners_are_told_whatever_one_raises(error, stop):
    engine = make(slots=2)
    told = []

    def bad(event):
        if event.finish_reason is not None:
            told.append(event.finish_reason)
            raise error("the listener is broken")

    for i in range(2):
        engine.submit([i], GREEDY.replace(max_tokens=500), on_event=bad)
    sinks = [submit(engine, [i], GREEDY.replace(max_tokens=500)) for i in range(3)]
    end, broken = engine.scheduler.end, [True]

    def fails_once(request, keep):
        if broken:
            raise KeyError(broken.pop())
        return end(request, keep=keep)

    engine.scheduler.end = fails_once
    if not stop:
        engine.steps.decode = lambda slots, fast=False: 1 / 0
    engine.start()
    if stop:
        engine.stop()
    for sink in sinks:
        assert sink.done.wait(60)
    assert [s.last.finish_reason for s in sinks] == ["abort" if stop else "error"] * 3
    assert len(told) == 2
    engine.stop()


def test_a_checked_prompt_costs_nothing_for_its_length():
    engine = make()
    prompt = engine.checked(np.arange(10) % 7)
    assert engine.checked(list(prompt)) == prompt == tuple(i % 7 for i in range(10))
    iterated = []

    class Watched(Prompt):
        def __iter__(self):
            iterated.append(1)
            return super().__iter__()

    watched = Watched(prompt)
    watched.rows, watched.packed = prompt.rows, prompt.packed
    sink = Sink()
    engine.submit(watched, GREEDY.replace(max_tokens=3), on_event=sink)
    assert not iterated
    (job,) = engine._jobs.values()
    assert job.request._prompt_bytes is prompt.packed  # nor converted once more
    run(engine)
    assert sink.tokens == reply(list(prompt), 3, WINDOW)
    for wrong in ([-1], [10**6], [3, 10**6]):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            engine.checked(wrong)
        with pytest.raises(RequestError, match="outside the vocabulary"):
            engine.submit(wrong, GREEDY, on_event=sink)


def test_nobody_is_lost_who_comes_while_the_engine_fails():
    """Every submit either raises or hears of an end."""
    for _ in range(20):
        engine = make()
        submit(engine, [1], GREEDY.replace(max_tokens=500))
        engine.steps.decode = lambda slots, fast=False: 1 / 0
        engine.start()
        sinks = []
        while engine.failed is None:
            try:
                sinks.append(submit(engine, [2]))
            except RuntimeError:
                break
        assert all(s.done.wait(60) for s in sinks)
        engine.stop()


def test_stopping_ends_what_runs_and_what_waits():
    engine = make(slots=1)
    engine.start()
    sinks = [submit(engine, [i], GREEDY.replace(max_tokens=1000)) for i in range(3)]
    engine.stop()
    assert [s.last.finish_reason for s in sinks] == ["abort"] * 3
    with pytest.raises(RuntimeError, match="shutting down"):
        submit(engine, [1])
    assert idle(engine)


def test_the_fake_draws_by_all_it_reads():
    assert next_token([1, 2, 3], WINDOW) != next_token([2, 2, 3], WINDOW)
    long = list(range(100))
    assert next_token(long, WINDOW) != next_token([5, *long[1:]], WINDOW)
