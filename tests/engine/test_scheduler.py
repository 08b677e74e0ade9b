"""The scheduler against a model of its invariants: nothing owned twice, nothing lost, every request ends."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from flint_jax.scheduler import Request, Scheduler

PAGE = 4


def run(scheduler, requests, lag, arrivals=None, aborts=()):
    """Drive plans to the end with results ``lag`` iterations late; returns tokens each request's chunks covered."""
    arrivals = dict(arrivals or {})
    pending, fed, rounds = [], {r.id: [] for r in requests}, 0
    waiting = {r.id: arrivals.get(r.id, 0) for r in requests}
    while True:
        for r in requests:
            if waiting.get(r.id) == rounds:
                scheduler.add(r)
                del waiting[r.id]
        for index, when in aborts:
            if when == rounds:
                scheduler.end(requests[index])
        plan = scheduler.plan()
        scheduler.check([r for r in requests if not r.ended])
        drawn = []
        for r in plan.admitted:
            fed[r.id] = []
        assert sum(c.count for c in plan.chunks) <= scheduler.budget
        for c in plan.chunks:
            assert c.request.slot is not None
            assert c.start == len(fed[c.request.id])
            fed[c.request.id] += list(range(c.start, c.start + c.count))
            assert len(fed[c.request.id]) <= len(c.request.pages) * PAGE
            if c.final:
                drawn.append((c.request, c.request.epoch))
        assert len({r.slot for r in plan.decode}) == len(plan.decode)
        for r in plan.decode:
            # The step writes the last drawn token: there is a page for it.
            assert len(r.prompt) + r.dispatched - 1 <= len(r.pages) * PAGE
            drawn.append((r, r.epoch))
        pending.append(drawn)
        while len(pending) > lag or (plan.empty and pending):
            for r, epoch in pending.pop(0):
                if r.ended or r.epoch != epoch or r.slot is None:
                    continue
                r.output.append(7)
                assert len(r.prompt) + len(r.output) <= r.limit
                if len(r.prompt) + len(r.output) == r.limit:
                    scheduler.end(r)
        rounds += 1
        assert rounds < 5000, "a request never ends"
        if all(r.ended for r in requests) and not waiting:
            break
    scheduler.check([])
    return rounds


@st.composite
def loads(draw):
    pages = draw(st.integers(2, 20))
    capacity = pages * PAGE
    requests = []
    for i in range(draw(st.integers(1, 8))):
        prompt = draw(st.integers(1, capacity - 1))
        limit = draw(st.integers(prompt + 1, capacity))
        requests.append(Request(f"r{i}", tuple(range(prompt)), limit))
    slots = draw(st.integers(1, 4))
    chunk = draw(st.sampled_from([1, 3, 8]))
    budget = draw(st.sampled_from([chunk, 2 * chunk, 5 * chunk]))
    arrivals = {r.id: draw(st.integers(0, 10)) for r in requests}
    count = len(requests)
    aborts = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(11, 40)), max_size=3))
    return slots, pages, chunk, budget, requests, arrivals, aborts


@settings(max_examples=300, deadline=None)
@given(loads(), st.integers(0, 2))
def test_every_request_ends_and_nothing_leaks(load, lag):
    slots, pages, chunk, budget, requests, arrivals, aborts = load
    scheduler = Scheduler(slots, pages, PAGE, chunk, budget)
    run(scheduler, requests, lag, arrivals, aborts)
    aborted = {index for index, _ in aborts}
    for i, r in enumerate(requests):
        if i not in aborted:
            assert len(r.prompt) + len(r.output) == r.limit


def test_first_come_first_served():
    scheduler = Scheduler(1, 8, PAGE, 8)
    requests = [Request(f"r{i}", (1, 2), 4) for i in range(3)]
    for r in requests:
        scheduler.add(r)
    assert scheduler.plan().admitted == (requests[0],)
    scheduler.end(requests[0])
    assert scheduler.plan().admitted == (requests[1],)


def test_the_youngest_gives_way_and_comes_back_whole():
    scheduler = Scheduler(2, 4, PAGE, 8, 16)
    old, young = Request("old", (1,) * 4, 14), Request("young", (2,) * 4, 14)
    scheduler.add(old)
    scheduler.add(young)
    rounds = 0
    seen = False
    while not (old.ended and young.ended):
        plan = scheduler.plan()
        seen |= young in plan.preempted
        assert old not in plan.preempted
        for r in [c.request for c in plan.chunks if c.final] + list(plan.decode):
            r.output.append(5)
            if len(r.prompt) + len(r.output) == r.limit:
                scheduler.end(r)
        rounds += 1
        assert rounds < 100
    assert seen
    assert len(young.output) == 10


def test_a_request_that_can_never_fit_is_refused():
    with pytest.raises(ValueError, match="pool holds 8"):
        Scheduler(1, 2, PAGE, 8).add(Request("r", (1,), 9))


def test_ending_twice_is_fine():
    scheduler = Scheduler(1, 2, PAGE, 8)
    r = Request("r", (1,), 4)
    scheduler.add(r)
    scheduler.plan()
    scheduler.end(r)
    scheduler.end(r)
    scheduler.check([])
