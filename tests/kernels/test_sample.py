"""The draw against the sorting sampler of the library, its candidates against exact arithmetic; slots moved on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flint_jax import sampling
from flint_jax.sampling_params import SamplingParams
from pallas_kernels import bench, dispatch, emulate
from pallas_kernels import sample as op
from pallas_kernels.sample import cases, draw, mosaic, reference
from pallas_kernels.sample.shapes import PROGRESS

VOCAB = 1600  # 25 groups of 64: fewer than the kernel has threads


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
    """In numpy: XLA on a CPU, unoptimised as in the tests, drops NaN from a maximum."""
    return jnp.asarray(np.max(np.asarray(scores).reshape(len(scores), -1, 16), axis=-1))


def drawn_by_kernel(scores, k, draws, temperature=1e6):
    """So hot that all candidates are about equally likely: after many draws the tokens show which they are."""
    rows = len(scores) * draws
    repeated = jnp.repeat(scores, draws, axis=0)
    settings = {
        "temperature": jnp.full(rows, temperature, jnp.float32),
        "top_k": jnp.repeat(jnp.asarray(k, jnp.int32), draws),
        "top_p": jnp.ones(rows, jnp.float32),
        "min_p": jnp.zeros(rows, jnp.float32),
        "key": jnp.zeros((rows, 2), jnp.uint32),
        "position": jnp.arange(rows, dtype=jnp.int32),
        "greedy": jnp.zeros(rows, bool),
    }
    with emulate.active():
        found = mosaic.sample(repeated, tile_max=tile_maxima(repeated), **settings)
    np.testing.assert_array_equal(found, np.asarray(reference.sample(repeated, **settings)))
    return found.reshape(len(scores), draws)


def check(scores, k, draws=4):
    """The reference's candidates are those of the contract, and every token that the kernel draws is one of them."""
    expected = candidates_by_hand(scores, k)
    found = reference.top_candidates(scores, jnp.asarray(k, jnp.int32))
    np.testing.assert_array_equal(np.asarray(found[0]), expected)
    values = np.take_along_axis(np.asarray(scores), np.maximum(expected, 0), -1)
    np.testing.assert_array_equal(np.asarray(found[1]), np.where(expected >= 0, values, -np.inf))
    for row, tokens in enumerate(drawn_by_kernel(scores, k, draws)):
        allowed = set(expected[row]) - ({-1} if (expected[row] >= 0).any() else set())
        assert set(tokens) <= allowed, row


def test_candidates_of_random_rows():
    scores = jax.random.normal(jax.random.key(0), (6, VOCAB)) * 4
    check(scores, [1, 2, 20, 64, 0, 10_000])


def test_all_candidates_are_drawn_and_none_else():
    scores = jax.random.normal(jax.random.key(3), (1, VOCAB))
    tokens = drawn_by_kernel(scores, [3], 24)[0]
    assert set(tokens) == set(np.argsort(np.asarray(scores[0]))[-3:])


def test_candidates_of_a_row_with_more_groups_than_threads():
    """1,250 groups: some threads hold three, some two; most of their maxima tie, so the exact path decides."""
    scores = jnp.round(jax.random.normal(jax.random.key(2), (1, 80_000)) * 1.5)
    check(scores, [30], draws=2)
    check(jax.random.normal(jax.random.key(2), (1, 80_000)), [30], draws=2)


def test_large_scores_side_by_side():
    """All 64 best in one group; and 200 in four groups, far above the rest: more scores reach the first threshold
    than the list holds."""
    scores = np.array(jax.random.normal(jax.random.key(4), (2, VOCAB)))
    scores[0, 640:704] += 50
    scores[1, 64:264] += 50
    check(jnp.asarray(scores), [64, 20])


def test_candidates_cross_zero_and_repeat():
    """Rounded scores tie within and between tiles, above and at the threshold, with both signs and both zeros."""
    scores = jnp.round(jax.random.normal(jax.random.key(1), (4, VOCAB)) * 3) * jnp.float32(-0.5)
    check(scores, [1, 5, 33, 64])
    check(jnp.full((1, VOCAB), -0.0).at[0, 700].set(0.0), [1], draws=3)


def test_minus_infinity_is_no_candidate():
    scores = jnp.full((2, VOCAB), -jnp.inf).at[0, 1234].set(-3e38).at[1, ::40].set(jnp.arange(40.0))
    check(scores, [20, 64])


def test_more_ties_than_places_keep_the_better_tokens_and_the_lowest_ids():
    scores = jnp.zeros((2, VOCAB)).at[1, [1599, 800]].set(1.0)
    check(scores, [20, 20])
    # 250 groups tie, more than can be listed; the one with the best token comes last.
    scores = jnp.zeros((1, 16_000)).at[0, 15_990].set(50.0)
    check(scores, [20], draws=2)
    assert (drawn_by_kernel(scores, [20], 2, temperature=1.0) == 15_990).all()


# -- the draw ----------------------------------------------------------------------------------------------------------


def rows_for(settings, vocab, seed=0):
    """Slots with these settings; the odd ones stop at token 7."""
    state = sampling.SlotSampling.empty(len(settings), vocab)
    for slot, params in enumerate(settings):
        row = sampling.slot_row(params, (), vocab, (7,) if slot % 2 else (), seed + slot)
        state = sampling.admit(state, slot, row)
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
    SamplingParams(temperature=1.0, top_k=20, top_p=0.95),
    SamplingParams(temperature=0.6, top_k=64, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=2.5, top_k=5),
    SamplingParams(temperature=1.0, top_k=3, top_p=0.0),
    SamplingParams(temperature=1.3, top_k=40, min_p=0.3),
]


def test_the_tokens_are_those_of_the_sorting_sampler():
    """6 settings x 60 positions, scores with and without ties: every token the same; the kernel's at 10 of them."""
    rows = rows_for(SETTINGS, VOCAB)
    sort = jax.jit(sampling.sample)
    fast = jax.jit(lambda scores, position: op.sample(scores, position=position, **arguments(rows)))
    for position in range(60):
        scores = jax.random.normal(jax.random.key(position), (len(SETTINGS), VOCAB)) * 3
        scores = jnp.round(scores) if position % 3 == 0 else scores
        at = jnp.full(len(SETTINGS), position, jnp.int32)
        expected = np.asarray(sort(scores, rows, at))
        np.testing.assert_array_equal(np.asarray(fast(scores, at)), expected)
        if position % 6 == 0:
            with emulate.active():
                found = mosaic.sample(scores, position=at, tile_max=tile_maxima(scores), **arguments(rows))
            np.testing.assert_array_equal(found, expected)


def test_broken_rows_give_minus_one_and_leave_the_others_alone():
    rows = rows_for(SETTINGS[:1] * 4, VOCAB)
    scores = jax.random.normal(jax.random.key(0), (4, VOCAB))
    scores = scores.at[0, 5].set(jnp.nan).at[1, 6].set(jnp.inf).at[2].set(-jnp.inf)
    at = jnp.zeros(4, jnp.int32)
    expected = np.asarray(jax.jit(sampling.sample)(scores, rows, at))
    with emulate.active():
        by_kernel = mosaic.sample(scores, position=at, tile_max=tile_maxima(scores), **arguments(rows))
    for tokens in (jax.jit(op.sample)(scores, position=at, **arguments(rows)), by_kernel):
        np.testing.assert_array_equal(np.asarray(tokens), expected)
    assert (expected[:3] == -1).all()
    assert expected[3] >= 0


def test_the_noise_is_that_of_jax_random():
    key = jnp.asarray([[3, 4], [0xFFFFFFFF, 7]], jnp.uint32)
    position = jnp.asarray([0, 262143], jnp.int32)
    ids = jnp.asarray([[0, 17, 1599], [19_999, 1, 2]], jnp.int32)
    expected = sampling._gumbel(key, position, 20_000)
    actual = draw.gumbel(key, position, ids)
    np.testing.assert_array_equal(np.asarray(actual), np.take_along_axis(np.asarray(expected), np.asarray(ids), -1))


def test_the_gumbel_noise_of_the_kernel():
    """Uniform numbers from the smallest to the largest, through the kernel's own logarithms."""
    bits = np.concatenate([2 ** np.arange(32), np.linspace(0, 2**32 - 1, 480)]).astype(np.uint32)

    class Here:
        key, position = None, None

    def noise(cipher_bits):
        def program(out):
            lane = emulate.Lane()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(emulate, "loop", lambda *_, **__: [emulate.Int(cipher_bits), emulate.Int(0)])
                patch.setattr(mosaic.emit, "loop", emulate.loop)
                Here.key = [emulate.Int(0)] * 2
                value = mosaic._gumbel(Here, emulate.Int(0), emulate.Int(2))
            emulate.store_float(out + lane.thread * 4, value)

        out = [jax.ShapeDtypeStruct((512,), jnp.float32)]
        return emulate.kernel(program, name="noise", out=out, shared=[], grid=1, warps=16)()[0]

    with emulate.active():
        found = noise(bits)
    uniform = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), 1 - 2.0**-24)
    expected = -np.log(-np.log1p(-uniform.astype(np.float64)))
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=3e-7)


SLOTS = 8


def slots_for(settings):
    """Eight slots, some of them inert; the third sits at its limit."""
    state = rows_for((settings * SLOTS)[:SLOTS], VOCAB)
    progress = np.zeros((SLOTS, len(PROGRESS)), np.int32)
    progress[:, PROGRESS.index("position")] = 100 + np.arange(SLOTS)
    progress[:, PROGRESS.index("limit")] = 2**30
    progress[2, PROGRESS.index("limit")] = 103
    progress[:, PROGRESS.index("active")] = np.arange(SLOTS) != 4
    return state, jnp.asarray(progress)


def test_slots_move_on():
    """Kernel, reference and the plain step's own parts agree on everything; inert slots and padding change nothing."""
    state, progress = slots_for(SETTINGS)
    slots = jnp.asarray([5, 2, 4, SLOTS, 1, -1, 7], jnp.int32)
    scores = jax.random.normal(jax.random.key(9), (len(slots), VOCAB)) * 3
    scores = scores.at[4, 7].set(50.0).at[6].set(jnp.nan)  # slot 1 draws its stop id, slot 7 breaks
    arrays = (slots, state.reals, state.key, state.wholes, progress, state.out_count)
    with emulate.active():
        found = mosaic.advance(scores, tile_maxima(scores), *arrays)
    expected = reference.advance(scores, None, *arrays)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))

    live = jnp.asarray([True, True, False, False, True, False, True])
    rows = state.gather(jnp.where(live, slots, 0))
    position = jnp.where(live, progress[jnp.where(live, slots, 0), 1], 0) + 1
    tokens = sampling.sample(scores, rows, position)
    after = sampling.update(state, slots, tokens, live)
    np.testing.assert_array_equal(np.asarray(after.wholes), np.asarray(expected[0]))
    np.testing.assert_array_equal(np.asarray(after.out_count), np.asarray(expected[2]))
    moved, before = np.asarray(expected[1]), np.asarray(progress)
    np.testing.assert_array_equal(moved[[0, 3, 4, 6]], before[[0, 3, 4, 6]])
    np.testing.assert_array_equal(moved[[5, 2, 1, 7], 0], np.asarray(tokens)[[0, 1, 4, 6]])
    np.testing.assert_array_equal(moved[[5, 2, 1, 7], 1], [106, 103, 102, 108])
    np.testing.assert_array_equal(moved[[5, 2, 1, 7], 3], [1, 0, 0, 0])  # running, limit, stop id, broken
    np.testing.assert_array_equal(moved[:, 2], before[:, 2])


def test_the_kernel_refuses_what_it_cannot_do():
    rows = rows_for(SETTINGS[:1], 1008)
    scores = jnp.zeros((1, 1008))
    with pytest.raises(dispatch.KernelUnsupported, match="vocabulary of 1008"):
        mosaic.sample(scores, position=jnp.zeros(1, jnp.int32), tile_max=tile_maxima(scores), **arguments(rows))
    assert op.sample(scores, position=jnp.zeros(1, jnp.int32), **arguments(rows)).shape == (1,)


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
    scores = np.array(jnp.round(jax.random.normal(jax.random.key(1), (6, 16_000)) * 2))
    scores[1] = -np.inf
    scores[2, [5, 9000]] = np.nan, np.inf
    scores[3] = -0.0
    scores[3, 700] = 0.0
    scores[4, 77] = -np.float32(np.nan)
    scores = jnp.asarray(scores)
    rows = arguments(rows_for([SamplingParams(temperature=2.0, top_k=k) for k in (3, 20, 1, 64, 1, 64)], 16_000))
    for position in range(20):
        at = jnp.full(6, position, jnp.int32)
        with dispatch.force("kernels"):
            found = np.asarray(jax.jit(op.sample)(scores, position=at, **rows))
        np.testing.assert_array_equal(found, np.asarray(reference.sample(scores, position=at, **rows)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.cases(), ids=lambda case: case.name)
def test_on_the_device(case):
    row = bench.measure(case, 1.0, check_only=True)
    assert row["repeatable"]
    assert row["error"] <= case.tolerance
