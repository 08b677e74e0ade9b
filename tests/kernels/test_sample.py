"""Candidates and draw against the sorting sampler of the library, and against exact arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flint_jax import sampling
from pallas_kernels import dispatch, emulate
from pallas_kernels import sample as op
from pallas_kernels.sample import draw, mosaic, reference

VOCAB = 1600  # 100 tiles, fewer than the kernel has threads


def candidates_by_hand(scores, k):
    """The contract, one row at a time, in numpy."""
    ids = np.full((len(scores), op.MAX_CANDIDATES), -1)
    for row, (values, wanted) in enumerate(zip(np.asarray(scores), k, strict=True)):
        wanted = min(max(wanted, 1), op.MAX_TOP_K)
        values = np.where(np.isnan(values), np.inf, values)
        nth = np.sort(values)[::-1][wanted - 1]
        above, equal = np.flatnonzero(values > nth), np.flatnonzero((values == nth) & (values > -np.inf))
        found = np.concatenate([above, equal])[: op.MAX_CANDIDATES]
        ids[row, : len(found)] = found
    return ids


def tile_maxima(scores):
    return jnp.max(scores.reshape(len(scores), -1, 16), axis=-1)


def emulated(scores, k):
    with emulate.active():
        return mosaic.top_candidates(scores, jnp.asarray(k, jnp.int32), tile_maxima(scores))


def check(scores, k):
    expected = candidates_by_hand(scores, k)
    for found in (emulated(scores, k), reference.top_candidates(scores, jnp.asarray(k, jnp.int32))):
        np.testing.assert_array_equal(np.asarray(found[0]), expected)
        values = np.take_along_axis(np.asarray(scores), np.maximum(expected, 0), -1)
        np.testing.assert_array_equal(np.asarray(found[1]), np.where(expected >= 0, values, -np.inf))


def test_candidates_of_random_rows():
    scores = jax.random.normal(jax.random.key(0), (6, VOCAB)) * 4
    check(scores, [1, 2, 20, 64, 0, 10_000])


def test_candidates_of_a_row_with_more_tiles_than_threads():
    """1,000 tiles, some threads hold two, some one, some none; most tiles tie in their maximum."""
    scores = jnp.round(jax.random.normal(jax.random.key(2), (1, 16_000)) * 1.5)
    with emulate.active():
        ids, values = mosaic.top_candidates(scores, jnp.asarray([30], jnp.int32), tile_maxima(scores))
    best = np.sort(np.asarray(scores[0]))[::-1]
    above = np.flatnonzero(np.asarray(scores[0]) > best[29])
    np.testing.assert_array_equal(ids[0, : above.size], above)
    tied = np.asarray(ids[0, above.size :])
    assert (tied >= 0).all()
    assert np.unique(tied).size == tied.size
    assert (np.asarray(scores[0])[tied] == best[29]).all()
    np.testing.assert_array_equal(values[0], np.asarray(scores[0])[np.asarray(ids[0])])


def test_candidates_cross_zero_and_repeat():
    """Rounded scores tie within and between tiles, above and at the threshold, with both signs and both zeros."""
    scores = jnp.round(jax.random.normal(jax.random.key(1), (4, VOCAB)) * 3) * jnp.float32(-0.5)
    check(scores, [1, 5, 33, 64])
    check(jnp.full((1, VOCAB), -0.0).at[0, 700].set(0.0), [1])


def test_minus_infinity_is_no_candidate():
    scores = jnp.full((3, VOCAB), -jnp.inf).at[1, 1234].set(-3e38).at[2, ::40].set(jnp.arange(40.0))
    check(scores, [20, 20, 64])


def test_more_ties_than_places_keep_the_better_tokens_and_the_lowest_ids():
    scores = jnp.zeros((2, VOCAB)).at[1, [1599, 800]].set(1.0)
    check(scores, [20, 20])


def test_nan_of_either_sign_is_the_first_candidate():
    scores = np.zeros((2, VOCAB), np.float32)
    scores[0, 77] = np.nan
    scores[1, 78] = -np.float32(np.nan)
    for found in (
        emulated(jnp.asarray(scores), [1, 1]),
        reference.top_candidates(jnp.asarray(scores), jnp.ones(2, jnp.int32)),
    ):
        np.testing.assert_array_equal(np.asarray(found[0])[:, :2], [[77, -1], [78, -1]])


# -- the draw ----------------------------------------------------------------------------------------------------------


def rows_for(settings, vocab, seed=0):
    state = sampling.SlotSampling.empty(len(settings), vocab)
    for slot, params in enumerate(settings):
        state = sampling.admit(state, slot, sampling.slot_row(params, (), vocab, (), seed + slot))
    return state


def arguments(rows):
    return {
        "temperature": jnp.maximum(rows.temperature, sampling.LOWEST_TEMPERATURE),
        "top_k": rows.top_k,
        "top_p": rows.top_p,
        "min_p": rows.min_p,
        "key": rows.key,
        "greedy": rows.temperature < sampling.GREEDY_BELOW,
    }


SETTINGS = [
    sampling.SamplingParams(temperature=1.0, top_k=20, top_p=0.95),
    sampling.SamplingParams(temperature=0.6, top_k=64, top_p=0.8, min_p=0.05),
    sampling.SamplingParams(temperature=0.0),
    sampling.SamplingParams(temperature=2.5, top_k=5),
    sampling.SamplingParams(temperature=1.0, top_k=3, top_p=0.0),
    sampling.SamplingParams(temperature=1.3, top_k=40, min_p=0.3),
]


def test_the_tokens_are_those_of_the_sorting_sampler():
    """6 settings x 60 positions, scores with and without ties: every token the same."""
    rows = rows_for(SETTINGS, VOCAB)
    sort = jax.jit(sampling.sample)
    fast = jax.jit(lambda scores, position: op.sample(scores, position=position, **arguments(rows)))
    for position in range(60):
        scores = jax.random.normal(jax.random.key(position), (len(SETTINGS), VOCAB)) * 3
        scores = jnp.round(scores) if position % 3 == 0 else scores
        at = jnp.full(len(SETTINGS), position, jnp.int32)
        np.testing.assert_array_equal(np.asarray(fast(scores, at)), np.asarray(sort(scores, rows, at)))


def test_broken_rows_give_minus_one_and_leave_the_others_alone():
    rows = rows_for(SETTINGS[:1] * 4, VOCAB)
    scores = jax.random.normal(jax.random.key(0), (4, VOCAB))
    scores = scores.at[0, 5].set(jnp.nan).at[1, 6].set(jnp.inf).at[2].set(-jnp.inf)
    at = jnp.zeros(4, jnp.int32)
    tokens = jax.jit(op.sample)(scores, position=at, **arguments(rows))
    expected = jax.jit(sampling.sample)(scores, rows, at)
    np.testing.assert_array_equal(np.asarray(tokens), np.asarray(expected))
    assert (np.asarray(tokens[:3]) == -1).all()


def test_the_noise_is_that_of_jax_random():
    key = jnp.asarray([[3, 4], [0xFFFFFFFF, 7]], jnp.uint32)
    position = jnp.asarray([0, 262143], jnp.int32)
    ids = jnp.asarray([[0, 17, 1599], [19_999, 1, 2]], jnp.int32)
    expected = sampling._gumbel(key, position, 20_000)
    actual = draw.gumbel(key, position, ids)
    np.testing.assert_array_equal(np.asarray(actual), np.take_along_axis(np.asarray(expected), np.asarray(ids), -1))


def test_the_kernel_refuses_what_it_cannot_do():
    scores = jnp.zeros((1, 1000))
    with pytest.raises(dispatch.KernelUnsupported, match="vocabulary of 1000"):
        mosaic.top_candidates(scores, jnp.ones(1, jnp.int32), None)
    ids, _ = op.top_candidates(scores, jnp.ones(1, jnp.int32))
    assert ids.shape == (1, op.MAX_CANDIDATES)


@pytest.mark.gpu
def test_on_the_gpu_the_tokens_are_those_of_the_sorting_sampler():
    """The model's vocabulary; all settings, 40 positions."""
    vocab = 150_144
    rows = rows_for(SETTINGS, vocab)
    sort = jax.jit(sampling.sample)
    fast = jax.jit(lambda scores, position: op.sample(scores, position=position, **arguments(rows)))
    same = 0
    for position in range(40):
        scores = jax.random.normal(jax.random.key(position), (len(SETTINGS), vocab)) * 3
        at = jnp.full(len(SETTINGS), position, jnp.int32)
        with dispatch.force("kernels"):
            found = np.asarray(fast(scores, at))
        same += int((found == np.asarray(sort(scores, rows, at))).sum())
    # Sums of masses in another order may move a token across the edge of top-p.
    assert same >= 40 * len(SETTINGS) - 1


@pytest.mark.gpu
def test_on_the_gpu_ties_nans_and_infinities():
    scores = np.array(jnp.round(jax.random.normal(jax.random.key(1), (5, 16_000)) * 2))
    scores[1] = -np.inf
    scores[2, [5, 9000]] = np.nan, np.inf
    scores[3] = -0.0
    scores[3, 700] = 0.0
    scores = jnp.asarray(scores)
    k = jnp.asarray([3, 20, 1, 64, 1], jnp.int32)
    with dispatch.force("kernels"):
        ids, _ = jax.jit(op.top_candidates)(scores, k)
    expected, _ = reference.top_candidates(scores, k)
    np.testing.assert_array_equal(np.asarray(ids), np.asarray(expected))
