"""Drawing under a mask: what the bits mean, and that both samplers draw the same token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flint_jax import redraw, sampling
from flint_jax.sampling import SamplingParams, SlotSampling

VOCAB, ROWS = 304, 5  # no whole number of words, a whole number of the sampler's tiles


def settings(*params):
    """Slots with these settings."""
    state = SlotSampling.empty(len(params), VOCAB)
    for slot, p in enumerate(params):
        state = sampling.admit(state, jnp.int32(slot), sampling.slot_row(p, (1,), VOCAB, (), slot))
    return state


def packed(allowed):
    """bool [B, V] to int32 words."""
    padded = np.zeros((allowed.shape[0], redraw.words(VOCAB) * 32), bool)
    padded[:, :VOCAB] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def random_case(seed, share=0.1):
    rng = np.random.default_rng(seed)
    allowed = rng.random((ROWS, VOCAB)) < share
    allowed[:, rng.integers(0, VOCAB, ROWS)] = True
    return jnp.asarray(rng.normal(size=(ROWS, VOCAB)).astype(np.float32) * 3), allowed


def test_bits_are_token_ids():
    logits, allowed = random_case(0)
    got = np.asarray(redraw.masked(logits, packed(allowed)))
    np.testing.assert_array_equal(got, np.where(allowed, logits, -np.inf))
    assert redraw.words(32) == 1
    assert redraw.words(33) == 2


@pytest.mark.parametrize("fast", [False, True])
def test_only_what_is_allowed_is_drawn(fast):
    rows = settings(*(SamplingParams(temperature=t, top_k=20, top_p=0.9, seed=3) for t in (0.0, 0.5, 1.0, 1.5, 2.0)))
    draw = jax.jit(redraw.draw, static_argnames="fast")
    for seed in range(20):
        logits, allowed = random_case(seed, 0.02)
        tokens = np.asarray(draw(logits, packed(allowed), rows, jnp.arange(ROWS) + seed, fast=fast))
        assert allowed[np.arange(ROWS), tokens].all()
        assert tokens[0] == np.argmax(np.where(allowed, logits, -np.inf)[0])


def test_the_fast_sampler_draws_the_same_tokens():
    rows = settings(
        *(
            SamplingParams(temperature=t, top_k=k, top_p=0.95, seed=9)
            for t, k in zip((0, 1, 1, 0.7, 2), (5, 1, 20, 50, 64), strict=True)
        )
    )
    draw = jax.jit(redraw.draw, static_argnames="fast")
    for seed in range(20):
        logits, allowed = random_case(seed, 0.5)
        both = [draw(logits, packed(allowed), rows, jnp.arange(ROWS) * 7 + seed, fast=fast) for fast in (False, True)]
        np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("fast", [False, True])
def test_nan_and_nothing_allowed_draw_no_token(fast):
    logits, allowed = random_case(1)
    logits = logits.at[0, np.flatnonzero(~allowed[0])[0]].set(jnp.nan)  # even where the mask forbids it
    allowed[1] = False
    rows = settings(*[SamplingParams(temperature=1.0, top_k=20, seed=1)] * ROWS)
    tokens = np.asarray(redraw.draw(logits, packed(allowed), rows, jnp.arange(ROWS), fast=fast))
    assert tokens[:2].tolist() == [-1, -1]
    assert (tokens[2:] >= 0).all()
