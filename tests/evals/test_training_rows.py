"""What the recipe of the embedded model learns from: rows of whole exercises, and what of them counts."""

import random

import pytest

from examples.train_tiny import data
from flint_jax import evals
from flint_jax.chat import ChatTemplate
from flint_jax.evals import HELD_OUT, TRAIN
from loaders.embedded import embedded_checkpoint
from loaders.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def encoder():
    tokenizer = load_tokenizer(embedded_checkpoint("bf16"))
    return data.Encoder(tokenizer, ChatTemplate.from_tokenizer(tokenizer))


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
def test_an_exercise_in_a_chat_or_beside_tools_stays_the_same(split):
    rng = random.Random(4)
    for _ in range(30):
        item = evals.arithmetic(rng, split)
        later, beside = evals.later(rng, split, item), evals.beside(rng, split, item)
        assert later.messages[-1:] == beside.messages == item.messages
        assert (later.content, later.thought, beside.content) == (item.content, item.thought, item.content)
        assert [m["role"] for m in later.messages] == ["user", "assistant"] * (len(later.messages) // 2) + ["user"]
        assert 1 <= len(beside.tools) <= 4
        assert not beside.calls


def test_replies_count_and_how_earlier_ones_begin_does_not(encoder):
    rng = random.Random(5)
    item = evals.later(rng, TRAIN, evals.arithmetic(rng, TRAIN))
    ids, weights = encoder(item)
    prompt, reply, _ = data.render(item, encoder.template)
    assert encoder.tokenizer.decode(ids) == prompt + reply
    counted = [i for i, weight in zip(ids, weights, strict=True) if weight == 1.0]
    assert encoder.tokenizer.decode(counted) == reply
    openings = [n + 2 for n, i in enumerate(ids) if i == encoder.tokenizer.added_tokens["<|assistant|>"]][:-1]
    assert len(openings) == len(item.messages) // 2
    assert [n for n, weight in enumerate(weights) if weight == 0.0] == openings


def test_rows_hold_whole_exercises(encoder):
    tokens, weights = next(data.rows(encoder, 2048, 1))
    assert tokens.shape == (2049,)
    assert weights.shape == (2048,)
    text = encoder.tokenizer.decode(tokens.tolist())
    assert text.count("<|user|>") >= 2
    assert 0.05 < (weights == 1.0).mean() < 0.95
    long, _ = next(data.rows(encoder, 2048, 1, long=True))
    record = encoder.tokenizer.decode(long.tolist()).split("<|assistant|>")[0]
    assert record.count("\n") > 2048 / 15 / 3  # lines
