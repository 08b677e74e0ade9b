"""The scheduler against a device of token ids and a model of its invariants.

Random loads of related prompts run with results read late, aborts and too few pages. After every plan: every slot, page
and snapshot has exactly the owners it should have, and everything the prefix cache claims is true on the device. At the
end: every request has ended with the tokens it would have had alone.
"""

import collections
import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from flint_jax.plan import Admit, CopyPage, Prefill, Request, Restore, Save
from flint_jax.prefill_cost import PrefillCost
from flint_jax.scheduler import Scheduler
from flint_jax.step import Sizes
from tests.engine.fake_steps import FakeSteps, reply

PAGE, WINDOW, RING = 4, 3, 8


class Rig:
    """A scheduler, its device, and an engine's loop around them that reads results ``lag`` iterations late."""

    def __init__(self, slots=2, pages=12, chunks=(8,), budget=None, snapshots=4, lag=1, interval=16, rows=8, ms=None):
        sizes = Sizes(slots, pages, pages * PAGE, (slots,), chunks, snapshots, rows)
        self.device = FakeSteps(sizes, window=WINDOW, page=PAGE, ring=RING)
        self.scheduler = Scheduler(
            slots,
            pages,
            PAGE,
            chunks,
            budget,
            snapshots=snapshots,
            window=WINDOW,
            ring=RING,
            interval=interval,
            rows=rows,
            max_ms=ms,
        )
        self.lag = lag
        self.pending = collections.deque()
        self.alive = []
        self.rounds = 0
        self.plan = None

    def add(self, request):
        self.alive.append(request)
        self.scheduler.add(request)
        return request

    def end(self, request, keep=True):
        self.alive.remove(request)
        self.do(self.scheduler.end(request, keep=keep))
        self.check()

    def do(self, ops):
        drawn = []
        for op in ops:
            match op:
                case Admit(request):
                    self.device.admit(request.slot, None, request.limit - 1)
                case Restore(index, slot):
                    self.device.restore(index, slot)
                case CopyPage(source, target):
                    self.device.copy_page(source, target)
                case Save(slot, index):
                    self.device.save(slot, index)
                case Prefill(pieces):
                    assert all(p.start + p.count <= len(p.request.pages) * PAGE for p in pieces)
                    tokens, _ = self.device.prefill(
                        [
                            (p.request.slice(p.start, p.start + p.count), p.request.slot, p.start, p.final)
                            for p in pieces
                        ]
                    )
                    finals = [p.request for p in pieces if p.final]
                    assert all(p.final for p in pieces[: len(finals)])
                    drawn += [(r, r.epoch, int(t)) for r, t in zip(finals, tokens, strict=False)]
        return drawn

    def step(self):
        """One iteration; whether anything is left to do."""
        self.plan = plan = self.scheduler.plan()
        for request in plan.moved:
            self.device.tables[request.slot, : len(request.pages)] = request.pages
        drawn = self.do(plan.ops)
        if plan.decode:
            tokens, _ = self.device.decode([r.slot for r in plan.decode])
            drawn += [(r, r.epoch, int(t)) for r, t in zip(plan.decode, tokens, strict=True)]
        assert sum(p.count for p in plan.pieces) <= self.scheduler.budget
        assert sum(type(op) is Prefill for op in plan.ops) <= 1
        self.check()
        self.pending.append(drawn)
        while len(self.pending) > self.lag or (plan.empty and self.pending):
            for request, epoch, token in self.pending.popleft():
                if request.ended or request.epoch != epoch or request.slot is None:
                    continue
                request.output.append(token)
                assert request.known <= request.limit
                if request.known == request.limit:
                    self.end(request)
        self.rounds += 1
        assert self.rounds < 5000, "a request never ends"
        return bool(self.alive or any(self.pending))

    def run(self):
        while self.step():
            pass
        self.check()
        assert not self.alive
        return self

    def check(self):
        scheduler, device = self.scheduler, self.device
        scheduler.check(self.alive)
        for request in self.alive:
            writing = request.pages[request.prefilled // PAGE :] if not request.decoding else request.pages[-1:]
            assert all(scheduler.pool.uses[p] == 1 for p in writing), "a page being written to is shared"
        for index, snapshot in scheduler.cache.snapshots.items():
            assert snapshot.index == index
            ids = np.frombuffer(self.claimed(snapshot), np.int32)
            assert len(ids) == snapshot.high
            paged = device.pages[snapshot.pages()].reshape(-1)[: snapshot.high]
            np.testing.assert_array_equal(paged, ids, err_msg="a cached page was written to")
            # From its lowest to its highest position, the whole window is there.
            first = max(snapshot.low - WINDOW + 1, 0)
            places = np.arange(first, snapshot.high)
            np.testing.assert_array_equal(device.snapshots[index][places % RING], ids[places])

    @staticmethod
    def claimed(snapshot):
        """Token ids that lead to a snapshot, by its path in the tree."""
        ids, node = snapshot.suffix, snapshot.base
        while node.parent is not None:
            ids, node = node.key + ids, node.parent
        return ids


def solo(request):
    """What a request says when it is alone and nothing is cached."""
    return reply(request.prompt, request.limit - len(request.prompt), WINDOW)


# -- random loads ------------------------------------------------------------------------------------------------------


def random_prompt(rng, stems, longest):
    """A prompt that shares its beginning with others: a stem, cut anywhere, and a tail of its own."""
    stem = rng.choice(stems)
    cut = rng.randint(0, min(len(stem), longest - 1))
    tail = [rng.randrange(3) for _ in range(rng.randint(0 if cut else 1, max(min(6, longest - cut), 1)))]
    return tuple([*stem[:cut], *tail][:longest])


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 4),
    pages=st.integers(3, 24),
    chunks=st.sampled_from([(1,), (3,), (2, 8), (8,), (1, 4, 16)]),
    share=st.sampled_from([1, 2, 5]),
    snapshots=st.sampled_from([0, 1, 2, 6]),
    lag=st.integers(0, 2),
    aborts=st.sampled_from([0.0, 0.05, 0.3]),
    rows=st.integers(1, 4),
    ms=st.sampled_from([None, 0.0, 8.03, 8.1]),
)
def test_every_request_says_what_it_says_alone(seed, slots, pages, chunks, share, snapshots, lag, aborts, rows, ms):
    rng = random.Random(seed)
    budget, interval = -(-chunks[-1] // share), rng.choice([4, 12, 1000])
    rig = Rig(slots, pages, chunks, budget, snapshots, lag, interval=interval, rows=rows, ms=ms)
    capacity = rig.scheduler.capacity()
    stems = [[rng.randrange(3) for _ in range(capacity)] for _ in range(2)]
    requests, finished, busy = [], [], True
    while busy or len(requests) < 14:
        if len(requests) < 14 and rng.random() < 0.4:
            if finished and rng.random() < 0.5:  # the next turn of a conversation
                last = rng.choice(finished)
                prompt = (*last.prompt, *last.output, *(rng.randrange(3) for _ in range(rng.randint(1, 5))))
            else:
                prompt = random_prompt(rng, stems, capacity - 1)
            if len(prompt) < capacity:
                limit = rng.randint(len(prompt) + 1, min(capacity, len(prompt) + 20))
                salt = rng.choice(["", "", "x"])
                requests.append(rig.add(Request(f"r{len(requests)}", prompt, limit, salt, rng.random() < 0.9)))
        if rig.alive and rng.random() < aborts:
            rig.end(rng.choice(rig.alive), keep=rng.random() < 0.8)
        busy = rig.step()
        finished = [r for r in requests if r.ended]
    for r in requests:
        assert r.output == solo(r)[: len(r.output)]
    assert rig.scheduler.pool.used == 0
    if not aborts:
        assert all(r.known == r.limit for r in requests)


# -- order -------------------------------------------------------------------------------------------------------------


def test_first_come_first_served():
    rig = Rig(slots=1)
    requests = [rig.add(Request(f"r{i}", (i, 2), 4)) for i in range(3)]
    order = []
    while rig.step():
        order += rig.plan.admitted
    assert order == requests


def test_who_cannot_have_its_pages_yet_is_not_overtaken():
    rig = Rig(slots=3, pages=6, snapshots=0)
    first = rig.add(Request("first", (1,) * 10, 14))
    big = rig.add(Request("big", (2,) * 18, 20))
    small = rig.add(Request("small", (3,), 3))
    rig.step()
    assert rig.plan.admitted == (first,)
    while big.slot is None:
        assert small.slot is None
        rig.step()
    rig.run()


def test_the_youngest_gives_way_and_comes_back_whole():
    rig = Rig(slots=2, pages=5, chunks=(8,), budget=16, snapshots=0, lag=0)
    old, young = rig.add(Request("old", (1,) * 4, 14)), rig.add(Request("young", (2,) * 4, 14))
    seen = False
    while rig.step():
        seen |= young in rig.plan.preempted
        assert old not in rig.plan.preempted
    assert seen
    assert young.output == solo(young)


def test_a_preempted_request_comes_before_those_that_wait():
    rig = Rig(slots=2, pages=5, chunks=(8,), budget=16, snapshots=0, lag=0)
    requests = [rig.add(Request(f"r{i}", (i,) * 4, 14)) for i in range(3)]
    order = []
    while rig.step():
        order += rig.plan.admitted
    assert rig.scheduler.preemptions
    assert order.index(requests[2]) == len(order) - 1


def test_nobody_is_admitted_only_to_be_preempted():
    """A newcomer leaves each running request the page that it may need next."""
    rig = Rig(slots=2, pages=4, snapshots=0, lag=0)
    requests = [rig.add(Request(f"r{i}", (i,) * 4, 14)) for i in range(2)]
    rig.step()
    assert rig.plan.admitted == (requests[0],)
    rig.run()
    assert rig.scheduler.preemptions == 0


def test_a_stream_of_short_prompts_does_not_starve_a_long_one():
    rig = Rig(slots=4, pages=200, chunks=(8,), snapshots=0, lag=0)
    long = rig.add(Request("long", (1,) * 160, 161))
    shorts = 0
    while not long.ended:
        while len(rig.alive) < 6:
            rig.add(Request(f"short{shorts}", (2,) * 8, 9))
            shorts += 1
        rig.step()
    assert rig.rounds <= 2 * 160 // 8 + 1
    assert shorts > 15
    rig.run()


def test_a_long_prompt_does_not_hold_up_a_short_one_nor_the_other_way_round():
    rig = Rig(slots=2, pages=100, chunks=(8,), snapshots=0, lag=0)
    long = rig.add(Request("long", (1,) * 160, 161))
    rig.step()
    shorts = 0
    while not long.ended:
        before = long.prefilled
        short = rig.add(Request(f"short{shorts}", (2,) * 4, 5))
        rounds = rig.rounds
        while not short.ended:
            rig.step()
        assert rig.rounds - rounds <= 2
        shorts += 1
        rig.step()
        assert long.ended or long.prefilled > before
    assert shorts >= 5


def test_a_running_stream_waits_for_one_budget_of_prefill_at_most():
    """A prompt of 100 pieces joins three streams: between two steps of theirs never more than one step's tokens."""
    rig = Rig(slots=8, pages=300, chunks=(2, 8), snapshots=0, lag=1)
    streams = [rig.add(Request(f"s{i}", (i,), 150)) for i in range(3)]
    for _ in range(5):
        rig.step()
    rig.add(Request("long", (7,) * 800, 801))
    for i in range(4):
        rig.add(Request(f"short{i}", (8, i, i), 9))
    for _ in range(100):
        rig.step()
        assert sum(p.count for p in rig.plan.pieces) <= 8
        assert {s for s in streams if not s.exhausted} <= set(rig.plan.decode)
    rig.run()


def test_a_step_takes_pieces_of_several_requests():
    rig = Rig(slots=6, pages=100, chunks=(2, 16), snapshots=0)
    for i in range(3):
        rig.add(Request(f"r{i}", (i,) * 30, 31))
    rig.step()
    # Half for the oldest, half for those with the fewest left.
    assert [(p.request.id, p.count) for p in rig.plan.pieces] == [("r1", 8), ("r0", 8)]
    for n in (1, 2, 3):
        rig.add(Request(f"tiny{n}", (9,) * n, n + 1))
    rig.step()
    # The short ones end with the next step, and the oldest has its half and what they leave.
    assert [(p.request.id, p.count, p.final) for p in rig.plan.pieces] == [
        ("tiny1", 1, True),
        ("tiny2", 2, True),
        ("tiny3", 3, True),
        ("r1", 2, False),
        ("r0", 8, False),
    ]
    rig.run()


def test_a_step_takes_no_more_pieces_than_it_has_rows_and_the_oldest_is_one():
    rig = Rig(slots=6, pages=100, chunks=(64,), snapshots=0, rows=3)
    rig.add(Request("long", (1,) * 200, 201))
    for i in range(5):
        rig.add(Request(f"short{i}", (2, i), 3))
    rig.step()
    assert [(p.request.id, p.count) for p in rig.plan.pieces] == [("short0", 2), ("short1", 2), ("long", 48)]
    rig.run()


def test_a_short_prompt_gets_in_with_the_next_step_of_a_long_one():
    rig = Rig(slots=4, pages=2000, chunks=(256, 1024), snapshots=0, lag=0)
    long = rig.add(Request("long", (1,) * 6000, 6001))
    for i in range(2):
        rig.step()
        short = rig.add(Request(f"short{i}", (2,) * 26, 27))
        before = long.prefilled
        rig.step()
        assert short.ended
        assert long.prefilled - before == (1024 - 26) // 64 * 64
    rig.run()


def test_snapshots_are_saved_behind_the_step_that_holds_their_piece():
    rig = Rig(slots=3, pages=100, chunks=(16,), snapshots=8, interval=8)
    for i in range(3):
        rig.add(Request(f"r{i}", (i,) * 24, 26))
    saves = 0
    while rig.step():
        kinds = [type(op) for op in rig.plan.ops]
        if Prefill in kinds:
            first = kinds.index(Prefill)
            assert set(kinds[:first]) <= {Admit}
            assert set(kinds[first + 1 :]) <= {Save}
            saves += len(kinds) - first - 1
    assert saves >= 3


def test_beside_a_stream_a_step_takes_its_milliseconds():
    """The same work is done in whole tiles, fewer the further a prompt has come, and never none."""
    rig = Rig(slots=3, pages=30_000, chunks=(1024,), snapshots=0, ms=16.0)
    rig.add(Request("stream", (1,), 2000))
    rig.step()
    long = rig.add(Request("long", (2,) * 100_000, 100_001))
    counts = []
    while not long.decoding and len(counts) < 400:
        start = long.prefilled
        rig.step()
        counts.append(long.prefilled - start)
        if counts[-1] > 64:
            assert rig.scheduler.cost.ms([(start, counts[-1])]) <= 16.0
    assert counts[0] == 640  # (16 - 8) / 0.012, in whole tiles
    assert counts[-2] == 128
    assert all(c % 64 == 0 for c in counts[:-1])
    rig.scheduler.max_ms = 0.0
    rig.add(Request("other", (3,) * 200, 201))
    rig.step()
    assert [p.count for p in rig.plan.pieces] == [64]


def test_with_nothing_decoding_a_step_is_as_long_as_it_can_be():
    rig = Rig(slots=3, pages=2000, chunks=(1024,), snapshots=0, ms=16.0)
    rig.add(Request("long", (2,) * 4000, 4001))
    rig.step()
    assert [p.count for p in rig.plan.pieces] == [1024]


# -- what a step costs -------------------------------------------------------------------------------------------------


def test_the_cost_of_a_step_is_learnt():
    cost = PrefillCost()
    assert cost.ms([(0, 1000)]) == pytest.approx(20)
    assert cost.ms([(100_000, 1000), (0, 1000)]) == pytest.approx(8 + 24 + 45)
    cost.learn([(0, 1000)], 200.0)
    assert cost.ms([(0, 1000)]) == pytest.approx(200)
    for _ in range(40):
        cost.learn([(0, 1000)], 10.0)
    assert cost.ms([(0, 1000)]) == pytest.approx(10, rel=0.02)
    cost.learn([(0, 1000)], 1e6)  # the host was busy
    assert cost.ms([(0, 1000)]) < 60
    for _ in range(10):
        cost.learn([(0, 1000)], 10.0)
    assert cost.ms([(0, 1000)]) < 16


def test_programs_of_one_piece_pay_the_fixed_part_each():
    assert PrefillCost(packed=False).ms([(0, 1000), (0, 1000)]) == pytest.approx(16 + 24)
    rig = Rig(slots=4, pages=2000, chunks=(1024,), snapshots=0, ms=20.0)
    rig.scheduler.cost.packed = False
    rig.add(Request("stream", (1,), 2000))
    rig.step()
    for i in range(3):
        rig.add(Request(f"r{i}", (2, i) * 40, 81))
    rig.step()
    assert len(rig.plan.pieces) == 2


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused():
    with pytest.raises(ValueError, match="pool holds 8"):
        Scheduler(1, 2, PAGE, (8,)).add(Request("r", (1,), 9))


def test_ending_twice_is_fine():
    scheduler = Scheduler(1, 2, PAGE, (8,))
    r = Request("r", (1,), 4)
    scheduler.add(r)
    scheduler.plan()
    scheduler.end(r)
    scheduler.end(r)
    scheduler.check([])


def test_a_waiting_request_can_end():
    rig = Rig(slots=1)
    rig.add(Request("first", (1, 2), 8))
    second = rig.add(Request("second", (1, 3), 8))
    rig.step()
    rig.end(second)
    rig.run()
