"""The order of work: every token once, never before its past, in pages that nobody else uses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_jax.errors import RequestError
from flint_jax.scoring.plan import Schedule, Task, Tree, pages_needed
from flint_jax.scoring.rolling import windows

PAGE = 8
ROWS = {8: 3, 2: 12}


def task(tokens, first):
    return Task(np.asarray(tokens, np.int32), first)


def simulate(tasks, pages, rows=ROWS, page=PAGE):
    """Run a schedule on paper: pages hold (task tokens so far); returns (schedule, steps). Checks what a step reads."""
    tree = Tree(tasks, page, shortest=3)
    schedule = Schedule(tree, pages, rows)
    memory = {}  # (page, place) -> the beginning of a sequence, up to and with the token that was written there
    scored, steps = {}, 0
    while (step := schedule.step()) is not None:
        width, found, copies = step
        assert 0 < len(found) <= rows[width]
        assert len({to for _, to in copies}) == len(copies)
        for source, target in copies:
            for place in range(page):
                if (source, place) in memory:
                    memory[target, place] = memory[source, place]
        writes = set()
        for row in found:
            assert row.start % width == 0
            assert row.start // page == (row.start + row.high - 1) // page
            for i, token in zip(range(row.low, row.high), row.tokens, strict=True):
                at = (row.node.page, (row.start + i) % page)
                assert at not in writes, "two rows write one place"
                writes.add(at)
                memory[at] = (row.start + i, int(token))
        for row in found:  # after all writes, as on the device
            for wanted, low, high in row.node.wants:
                for position in range(max(low, row.start + row.low), min(high, row.start + row.high)):
                    table = row.node.table.copy()
                    table[position // page] = row.node.page
                    past = [memory[table[p // page], p % page] for p in range(position + 1)]
                    assert past == list(enumerate(wanted.tokens[: position + 1].tolist()))
                    key = id(wanted), position + 1
                    assert key not in scored
                    scored[key] = True
        steps += 1
    assert len(scored) == sum(len(t.tokens) - t.first for t in tasks)
    assert sorted(schedule.free) == list(range(pages))
    return schedule, steps


@st.composite
def tasks_(draw):
    """Few tokens, so that beginnings are shared in every way."""
    tokens = st.lists(st.integers(0, 1), min_size=2, max_size=40)
    stems = draw(st.lists(tokens, min_size=1, max_size=3))
    made = {}
    for _ in range(draw(st.integers(1, 12))):
        stem = draw(st.sampled_from(stems))
        ids = stem[: draw(st.integers(1, len(stem)))] + draw(st.lists(st.integers(0, 2), min_size=1, max_size=20))
        first = draw(st.integers(1, len(ids) - 1))
        made[tuple(ids), first] = task(ids, first)
    return list(made.values())


@given(tasks_(), st.integers(0, 3), st.sampled_from([ROWS, {8: 3}, {8: 1, 2: 4}]))
@settings(max_examples=300, deadline=None)
def test_every_score_sees_its_own_past(tasks, spare, rows):
    pages = pages_needed(max(t.run for t in tasks), PAGE) + spare
    schedule, _ = simulate(tasks, pages, rows)
    assert schedule.tokens <= sum(t.run for t in tasks)


def test_a_shared_context_runs_once():
    context = list(range(20))  # ends in the middle of a page
    tasks = [task([*context, 50 + i, 60 + i, 70 + i], 20) for i in range(4)]
    schedule, _ = simulate(tasks, 16)
    assert schedule.context_tokens == 20
    assert schedule.tokens == 20 + 4 * 2  # nothing is predicted from the last token


def test_one_token_answers_need_no_run_of_their_own():
    context = list(range(20))
    schedule, steps = simulate([task([*context, 50 + i], 20) for i in range(9)], 16)
    assert schedule.tokens == 20
    assert steps == 1


def test_contexts_share_their_own_beginning():
    shots = list(range(16))  # two pages
    tasks = [task([*shots, 30 + q, 31 + q, 90 + a, 91], 18) for q in range(5) for a in range(2)]
    schedule, _ = simulate(tasks, 32)
    assert schedule.context_tokens == 16 + 5 * 2


def test_a_beginning_inside_a_page_is_not_worth_a_row():
    schedule, _ = simulate([task([1, 2, 3, 4, 5], 1), task([1, 2, 3, 9, 9], 1)], 16)
    assert schedule.tokens == 8


def test_a_context_of_a_few_tokens_is_not_worth_a_row():
    schedule, _ = simulate([task([1, 2, i, i, i], 2) for i in range(3)], 16)
    assert schedule.tokens == 12


def test_long_ones_first():
    tasks = [task(range(n), 1) for n in (5, 30, 12)]
    tasks = [task(np.asarray(t.tokens) + 100 * i, 1) for i, t in enumerate(tasks)]
    assert [t.run for t in Tree(tasks, PAGE).ordered()] == [29, 11, 4]


def test_a_pool_too_small_is_refused():
    with pytest.raises(RequestError, match="needs 5 pages of 8 tokens, and there are 4"):
        Schedule(Tree([task(range(30), 1)], PAGE), 4, ROWS)


# -- windows -----------------------------------------------------------------------------------------------------------


def test_windows_as_the_harness_documents_them():
    # BOS and ten tokens, context of four: INPUT BOS 0 1 2, 3 4 5 6, 5 6 7 8; PRED 0 1 2 3, 4 5 6 7, 8 9.
    assert windows(11, 1, 4) == [(0, 1, 5), (4, 5, 9), (6, 9, 11)]


@given(st.integers(1, 80), st.integers(1, 80), st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=300, deadline=None)
def test_windows_score_each_token_once_with_the_context_promised(length, first, most, overlap):
    first, overlap = min(first, length), min(overlap, most)
    found = windows(length, first, most, overlap)
    assert [t for w in found for t in range(w.first, w.end)] == list(range(first, length))
    for i, w in enumerate(found):
        assert w.end - 1 - w.begin <= most
        assert w.begin == 0 or w.end - 1 - w.begin == most, "a later window is full"
        assert w.first - w.begin >= (overlap if i or first > most else 1)


def test_windows_refuse_what_makes_no_sense():
    for arguments, text in [
        ((5, 0, 4), "first = 0: need 1 to 5"),
        ((5, 6, 4), "first = 6: need 1 to 5"),
        ((5, 1, 4, 5), "overlap = 5: need a whole number from 1 to 4, the tokens read at once"),
        ((5, 1, 4, 0), "overlap = 0"),
        ((5, 1, 4, -1), "overlap = -1"),
        ((5, 1, 4, 2.0), "overlap = 2.0"),
        ((5, 1, 4, True), "overlap = True"),
    ]:
        with pytest.raises(RequestError, match=text):
            windows(*arguments)
