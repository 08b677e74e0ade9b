"""The budget of a thought, token by token, without an engine."""

import dataclasses

import numpy as np
import pytest

from flint_jax import masks
from flint_jax.budget import Budget
from flint_jax.grammar import State, Tags
from tests.guided.walk import ROWS, allowed, compiler, structured, tokenizer

TAGS = Tags.of(tokenizer().added_tokens).block
THINK, END, CALL, END_CALL = (
    tokenizer().added_tokens[t] for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")
)
WORD = 5  # any token that is no tag
MUCH = 1000


def after(limit, *tokens, start=State.REASONING, inner=None):
    tracker = Budget(limit, TAGS, start, inner).begin()
    for token in tokens:
        tracker.push(token)
    return tracker


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_thought_that_has_used_its_budget_can_only_close(limit):
    for used in range(limit):
        tracker = after(limit, *[WORD] * used)
        assert tracker.free == limit - used
        assert len(allowed(tracker)) == ROWS
    tracker = after(limit, *[WORD] * limit)
    assert tracker.free == 0
    assert allowed(tracker) == [END]
    tracker.push(END)
    assert tracker.free > MUCH
    assert not tracker.done


def test_a_thought_that_closes_earlier_is_never_masked():
    tracker = after(3, WORD, END, *[WORD] * 50)
    assert tracker.free > MUCH
    assert len(allowed(tracker)) == ROWS


def test_a_call_ends_the_thought_and_tags_in_it_open_none():
    tracker = after(2, WORD, CALL, THINK, *[WORD] * 9)
    assert tracker.free > MUCH
    assert tracker.left == 1
    tracker.push(END_CALL)
    tracker.push(THINK)
    assert tracker.free == 1


def test_a_thought_that_begins_anew_has_what_is_left():
    tracker = after(3, WORD, END, WORD, THINK, WORD)
    assert tracker.free == 1
    tracker.push(WORD)
    assert allowed(tracker) == [END]
    assert allowed(after(1, WORD, END, THINK)) == [END]
    assert allowed(after(1, WORD, END, THINK, WORD)) == [END]  # noticed late


def test_an_output_that_begins_outside_counts_from_the_tag_on():
    assert after(0, start=State.CONTENT).free == 1  # the tag itself may come unseen, the token after it not
    assert allowed(after(0, THINK, start=State.CONTENT)) == [END]
    assert after(0, WORD, start=State.CONTENT).free > MUCH
    assert after(2, THINK, WORD, start=State.CONTENT).free == 1


def test_a_grammar_begins_after_the_thought():
    inner = compiler()(dataclasses.replace(structured("choice", ["yes"]), thinking=True))
    assert Budget(1, TAGS, State.CONTENT, inner).ends
    assert not Budget(1, TAGS, State.CONTENT).ends
    tracker = after(2, start=State.CONTENT, inner=inner)
    assert tracker.free == 0
    assert THINK in allowed(tracker)
    tracker.push(THINK)
    assert len(allowed(tracker)) > 100
    tracker.push(WORD)
    tracker.push(WORD)
    assert allowed(tracker) == [END]
    tracker.push(END)
    assert b"y" in {tokenizer().token_bytes(i) for i in allowed(tracker)}
    assert WORD not in allowed(tracker)
    for byte in "yes":
        (token,) = tokenizer().encode(byte)
        tracker.push(token)
    assert tracker.done or set(allowed(tracker)) <= set(tokenizer().eog_ids)


def test_under_a_grammar_a_character_is_finished_first():
    inner = compiler()(dataclasses.replace(structured("choice", ["yes"]), thinking=True, start=State.REASONING))
    halves = {tokenizer().token_bytes(i): i for i in range(480)}
    tracker = after(1, halves[b"\xc3"], inner=inner)
    assert END not in allowed(tracker)
    assert halves[b"\xa9"] in allowed(tracker)
    tracker.push(halves[b"\xa9"])
    assert allowed(tracker) == [END]


def test_rows_that_are_free_get_no_mask():
    trackers = [after(1), after(1, WORD), None, after(0, END)]
    made, chosen, failed = masks.of_step(trackers, 5, ROWS)
    assert chosen.tolist() == [False, True, False, False, False]
    assert not failed
    assert (np.delete(made, 1, axis=0) == -1).all()
