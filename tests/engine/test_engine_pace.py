"""The engine's pace on a device with a clock of its own: what a stream waits while a long prompt is read."""

import itertools

import numpy as np
import pytest

from flint_jax.engine import Engine
from flint_jax.prefill_cost import PrefillCost
from flint_jax.step import Sizes
from tests.engine.fake_steps import FakeSteps
from tests.engine.test_engine_conduct import GREEDY, WINDOW, run, submit


class Slow(FakeSteps):
    """A device whose steps end after the time that ``cost`` has for them, on a clock of its own."""

    def __init__(self, *args, decode_ms=10.0, cost=None, **more):
        super().__init__(*args, **more)
        self.now, self.busy_until = 0.0, 0.0
        self.decode_ms, self.cost = decode_ms, cost

    def _run(self, milliseconds, out):
        self.busy_until = max(self.busy_until, self.now) + milliseconds / 1e3
        return Timed(self, out[0], self.busy_until), out[1]

    def prefill(self, pieces):
        return self._run(self.cost.ms([(p[2], len(p[0])) for p in pieces]), super().prefill(pieces))

    def decode(self, slots, fast=False):
        return self._run(self.decode_ms, super().decode(slots, fast))


class Timed:
    """An array that is there at some time of a Slow's clock; to read it is to wait."""

    def __init__(self, device, array, at):
        self.device, self.array, self.at = device, array, at

    def copy_to_host_async(self):
        pass

    def __array__(self, dtype=None, copy=None):
        self.device.now = max(self.device.now, self.at)
        return np.asarray(self.array)


def slow(cost, max_prefill_ms=40.0, **more):
    steps = Slow(Sizes(4, 700, 40_000, (1, 2, 4), (256, 2048), 0), window=WINDOW, cost=cost, **more)
    engine = Engine(steps, max_prefill_ms=max_prefill_ms)
    engine._clock = lambda: steps.now
    return engine


@pytest.mark.parametrize("cost", [PrefillCost(), PrefillCost(factor=2.0), PrefillCost(15.0, 0.03, 1e-6)])
def test_a_stream_beside_a_long_prompt_keeps_its_pace(cost):
    """Whatever the device is like: between two tokens lie the decode step and 40 ms of prefill."""
    engine = slow(cost)
    told = []

    def listen(event):
        told.append(engine.steps.now)

    engine.submit([1], GREEDY.replace(max_tokens=400), on_event=listen)
    long = submit(engine, [i % 400 for i in range(30_000)], GREEDY.replace(max_tokens=1))
    while not long:
        engine.step()
    gaps = sorted(1e3 * (b - a) for a, b in itertools.pairwise(told))
    assert len(gaps) > 10
    assert gaps[int(0.9 * len(gaps))] <= 60  # the first few are spent on learning what the device is like
    if cost == PrefillCost():
        assert gaps[-1] <= 51
    assert gaps[len(gaps) // 2] >= 30  # and the prompt has most of that
    assert engine.scheduler.cost.ms([(20_000, 512)]) == pytest.approx(cost.ms([(20_000, 512)]), rel=0.3)


def test_without_a_limit_a_prompt_takes_whole_steps():
    engine = slow(PrefillCost(), max_prefill_ms=None)
    submit(engine, [1], GREEDY.replace(max_tokens=100))
    engine.step()
    submit(engine, [i % 400 for i in range(8192)], GREEDY.replace(max_tokens=1))
    run(engine)
    assert max(op[3] for op in engine.steps.log if op[0] == "prefill") == 2048


def test_where_decoding_is_slower_than_the_limit_a_prompt_gets_as_long():
    engine = slow(PrefillCost(100.0, 4.0), decode_ms=1000.0)
    submit(engine, [1], GREEDY.replace(max_tokens=100))
    for _ in range(30):
        engine.step()
    submit(engine, [i % 400 for i in range(8192)], GREEDY.replace(max_tokens=1))
    run(engine)
    counts = [op[3] for op in engine.steps.log if op[0] == "prefill"][5:-1]
    assert 150 <= sorted(counts)[len(counts) // 2] <= 260
