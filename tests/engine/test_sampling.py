"""Drawing tokens: supports and distributions against the float64 oracle, and independence of slot and neighbours."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from flint_jax import sampling
from flint_jax.sampling import MAX_STOP_IDS, SlotSampling, slot_row
from flint_jax.sampling_params import SamplingParams, needs
from tests.engine import sampling_oracle as oracle

admit = jax.jit(sampling.admit, donate_argnums=0)
update = jax.jit(sampling.update, donate_argnums=0)
sample = jax.jit(sampling.sample, static_argnames=("adjusted", "filtered", "drawn"))
support = jax.jit(sampling.support)
logprobs = jax.jit(sampling.logprobs, static_argnums=2)

VOCAB = 12
few = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])


def fill(vocab, params, prompts=None, outputs=None, stop_ids=(), seeds=None):
    """SlotSampling with request i in slot i and its output already drawn."""
    state = SlotSampling.empty(len(params), vocab)
    for slot, p in enumerate(params):
        prompt = prompts[slot] if prompts else ()
        row = slot_row(p, prompt, vocab, stop_ids, seeds[slot] if seeds else slot)
        state = admit(state, jnp.int32(slot), row)
        for token in outputs[slot] if outputs else ():
            state = update(state, jnp.array([slot], jnp.int32), jnp.array([token], jnp.int32), jnp.array([True]))
    return state


def rows_of(params, prompt=(), output=(), stop_ids=(), count=16, vocab=VOCAB):
    """``count`` rows that all hold one request. Few different counts, since each is one compilation of a second."""
    state = fill(vocab, [params], [prompt], [output], stop_ids)
    return state.gather(jnp.zeros(count, jnp.int32))


def draw_many(logits, rows, **stages):
    """One draw a row, at positions 0, 1, 2, ... from the same logits."""
    count = rows.key.shape[0]
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    return np.asarray(sample(logits, rows, jnp.arange(count, dtype=jnp.int32), **stages))


# -- supports ----------------------------------------------------------------------------------------------------------

eighths = st.integers(-40, 40).map(lambda i: i / 8)  # exact in float32, and equal often enough
logit_rows = st.lists(st.one_of(eighths, st.just(-np.inf)), min_size=VOCAB, max_size=VOCAB)
filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.001, 0.25, 0.5, 1.0, 2.0]),
    top_k=st.integers(-1, VOCAB + 2),
    top_p=st.one_of(st.sampled_from([0.0, 1.0, 0.95]), st.floats(0, 1, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
)


@few
@given(logit_rows, filters)
def test_support_equals_the_oracle(logits, params):
    assume(max(logits) > -np.inf)
    probabilities, margin = oracle.distribution(np.array(logits), params)
    assume(margin > 1e-5)
    rows = rows_of(params)
    got = np.asarray(support(jnp.array([logits] * 16, jnp.float32), rows))[0]
    np.testing.assert_array_equal(got, probabilities > 0)
    assert got[draw_many(logits, rows)].all()


def test_support_at_the_size_of_flint():
    vocab, params = 150_144, SamplingParams(top_k=20, top_p=0.95, min_p=0.001)
    logits = np.random.default_rng(0).normal(scale=3.0, size=vocab).astype(np.float32)
    probabilities, margin = oracle.distribution(logits.astype(np.float64), params)
    assert margin > 1e-5
    got = support(jnp.asarray(logits)[None], rows_of(params, count=1, vocab=vocab))
    np.testing.assert_array_equal(np.asarray(got)[0], probabilities > 0)


@pytest.mark.parametrize("top_p", [0.9, 0.999, 0.99999])
def test_top_p_close_to_one_is_resolved_over_a_long_tail(top_p):
    vocab, params = 150_144, SamplingParams(top_p=top_p)
    logits = np.linspace(0, -20, vocab).astype(np.float32)
    expected = int((oracle.distribution(logits.astype(np.float64), params)[0] > 0).sum())
    got = int(jnp.sum(support(jnp.asarray(logits)[None], rows_of(params, count=1, vocab=vocab))))
    assert abs(got - expected) <= 2 + expected // 500


def test_top_p_one_keeps_even_what_float32_cannot_add():
    assert supported([0.0, -60.0, -200.0, -np.inf]) == [0, 1, 2]


def supported(logits, **settings):
    padded = np.pad(np.asarray(logits, np.float32), (0, VOCAB - len(logits)), constant_values=-np.inf)
    kept = support(jnp.tile(jnp.asarray(padded), (16, 1)), rows_of(SamplingParams(**settings)))
    return np.flatnonzero(kept[0]).tolist()


def test_temperature_comes_before_top_p():
    assert supported([3, 2, 1], temperature=0.5, top_p=0.8) == [0]
    assert supported([3, 2, 1], temperature=1.0, top_p=0.8) == [0, 1]


def test_top_p_sees_the_distribution_after_top_k():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert supported(logits, top_p=0.65) == [0, 1]
    assert supported(logits, top_p=0.65, top_k=3) == [0, 1]
    assert supported(logits, top_p=0.55, top_k=2) == [0]


def test_ties_at_the_top_k_threshold_all_survive():
    assert supported([1, 2, 1, 0, 1], top_k=2) == [0, 1, 2, 4]


def test_top_p_takes_the_lower_ids_of_equals():
    assert supported([1, 1, 1, 1, 1], top_p=0.5) == [0, 1, 2]
    assert supported([0, 1, 1, 0], top_p=0.0) == [1]


def test_min_p_is_relative_to_the_best():
    logits = np.log([0.5, 0.26, 0.24])
    assert supported(logits, min_p=0.5) == [0, 1]
    assert supported(logits, min_p=1.0) == [0]


# -- edges -------------------------------------------------------------------------------------------------------------


def test_edge_grid_never_leaves_the_support():
    grid = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t, k, p, m in itertools.product(
            [0, 1e-6, 1e-5, 0.005, 1, 3.0, 1e300], [0, -1, 1, VOCAB, 10**12], [0, 1e-9, 0.5, 0.9999999, 1], [0, 1e-9, 1]
        )
    ]
    rng = np.random.default_rng(1)
    logits = np.where(rng.random(VOCAB) < 0.3, -np.inf, rng.normal(scale=30, size=VOCAB)).astype(np.float32)
    shapes = np.stack([logits, np.zeros(VOCAB), np.where(np.arange(VOCAB) == 5, 3e38, -3e38), logits / 1e30])
    row = [slot_row(p, (), VOCAB, (), i) for i, p in enumerate(grid)]
    rows = SlotSampling(
        reals=jnp.asarray(np.stack([r.reals for r in row])), wholes=jnp.asarray(np.stack([r.wholes for r in row])),
        key=jnp.asarray(np.stack([r.key for r in row])), prompt_seen=jnp.zeros((len(row), VOCAB), bool),
        out_count=jnp.zeros((len(row), VOCAB), jnp.int32), bias=jnp.zeros((len(row), VOCAB), jnp.float32),
    )  # fmt: skip
    for shape in shapes:
        kept = np.asarray(support(jnp.broadcast_to(jnp.asarray(shape, jnp.float32), (len(grid), VOCAB)), rows))
        tokens = draw_many(shape, rows)
        assert kept.any(axis=1).all()
        assert (tokens >= 0).all()
        assert kept[np.arange(len(grid)), tokens].all()
        one = [p.temperature < 1e-5 or p.top_p == 0 or (p.top_k == 1 and np.unique(shape).size > 1) for p in grid]
        np.testing.assert_array_equal(tokens[one], np.argmax(shape))


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_is_the_lowest_argmax(temperature):
    rows = rows_of(SamplingParams(temperature=temperature))
    assert set(draw_many([0, 3, 1, 3, 3, 0, 0, 0, 0, 0, 0, 0], rows)) == {1}


def test_small_temperatures_are_raised_to_a_hundredth():
    low, floor = SamplingParams(temperature=2e-5, seed=1), SamplingParams(temperature=0.01, seed=1)
    logits = [0.01 * i for i in range(VOCAB)]
    tokens = draw_many(logits, rows_of(low))
    np.testing.assert_array_equal(tokens, draw_many(logits, rows_of(floor)))
    assert len(set(tokens)) > 1


def test_rows_without_a_distribution_return_minus_one_alone():
    logits = jnp.tile(jnp.arange(VOCAB, dtype=jnp.float32), (16, 1))
    bad = {1: jnp.nan, 3: jnp.inf, 6: jnp.nan, 8: jnp.inf}
    spoilt = logits
    for row, value in bad.items():
        spoilt = spoilt.at[row, 4].set(value)
    spoilt = spoilt.at[4].set(-jnp.inf).at[9].set(-jnp.inf)
    params = [SamplingParams(temperature=0.0, top_k=5)] * 5 + [SamplingParams(top_k=5, top_p=0.9)] * 11
    rows, at = fill(VOCAB, params), jnp.zeros(16, jnp.int32)
    expected = np.where(np.isin(np.arange(16), [1, 3, 4, 6, 8, 9]), -1, np.asarray(sample(logits, rows, at)))
    np.testing.assert_array_equal(sample(spoilt, rows, at), expected)
    np.testing.assert_array_equal(support(spoilt, rows).any(axis=1), expected >= 0)


def test_nan_is_not_hidden_by_min_tokens():
    rows = rows_of(SamplingParams(min_tokens=5), stop_ids=[4])
    assert set(draw_many(np.where(np.arange(VOCAB) == 4, np.nan, 0), rows)) == {-1}


# -- distributions -----------------------------------------------------------------------------------------------------

DRAWS = 20_000
LOGITS = np.array([2.0, 1.5, 1.5, 1.0, 0.5, 0.0, -0.5, -0.5, -1.0, -1.5, -2.0, 1.75])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.2, top_k=9, top_p=0.9, min_p=0.05),
        SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, logit_bias={9: 2.5}),
    ],
    ids=lambda p: "-".join(f"{k}{v}" for k, v in vars(p).items() if v != getattr(SamplingParams(), k)) or "plain",
)
@pytest.mark.parametrize("seed", [0, 2**40 + 7])
def test_draws_follow_the_distribution(params, seed):
    prompt, output = [0, 0, 6], [3, 3, 9]
    rows = rows_of(params.replace(seed=seed), prompt, output, count=DRAWS)
    expected, _ = oracle.distribution(oracle.adjusted(LOGITS, params, prompt, output), params)
    got = np.bincount(draw_many(LOGITS, rows), minlength=VOCAB)
    assert got[expected == 0].sum() == 0
    kept = expected > 0
    assert stats.chisquare(got[kept], expected[kept] * DRAWS).pvalue > 1e-3


def test_draws_follow_the_distribution_over_seeds():
    key = jnp.stack([jnp.zeros(DRAWS, jnp.uint32), jnp.arange(DRAWS, dtype=jnp.uint32)], axis=1)
    state = rows_of(SamplingParams(), count=DRAWS)
    rows = sampling.dataclasses.replace(state, key=key)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (DRAWS, VOCAB))
    got = np.bincount(sample(logits, rows, jnp.full(DRAWS, 17, jnp.int32)), minlength=VOCAB)
    expected = oracle.distribution(LOGITS, SamplingParams())[0]
    assert stats.chisquare(got, expected * DRAWS).pvalue > 1e-3


def test_noise_resolves_a_large_vocabulary():
    """Among 150,144 equal tokens the largest noise is reached by one token only, in 32 rows of 32."""
    noise = np.asarray(sampling._gumbel(jnp.zeros((32, 2), jnp.uint32), jnp.arange(32), 150_144))
    assert np.isfinite(noise).all()
    top = np.sort(noise, axis=1)[:, -40:]
    assert (np.diff(top, axis=1) > 0).all()


# -- independence ------------------------------------------------------------------------------------------------------


@few
@given(filters, st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 7), st.integers(0, 2**32 - 1))
def test_a_row_draws_the_same_alone_and_in_any_slot(params, seed, position, slot, noise):
    rng = np.random.default_rng(noise)
    params = params.replace(seed=seed, repetition_penalty=1.2, logit_bias={3: 1.0})
    prompt, output = [1, 2], [5]
    alone = rows_of(params, prompt, output, count=1)
    logits = rng.normal(scale=2, size=(8, VOCAB)).astype(np.float32)
    logits[(slot + 1) % 8] = np.nan
    expected = int(sample(jnp.asarray(logits[slot][None]), alone, jnp.array([position], jnp.int32))[0])

    neighbours = [SamplingParams(top_k=int(k), temperature=float(t)) for k, t in zip(rng.integers(0, 9, 8), rng.random(8), strict=True)]  # fmt: skip  # noqa: E501
    neighbours[slot] = params
    prompts, outputs = [[int(i)] for i in rng.integers(0, VOCAB, 8)], [[] for _ in range(8)]
    prompts[slot], outputs[slot] = prompt, output
    state = fill(VOCAB, neighbours, prompts, outputs)
    at = rng.integers(0, 100, 8).astype(np.int32)
    at[slot] = position
    assert int(sample(jnp.asarray(logits), state, jnp.asarray(at))[slot]) == expected

    order = rng.permutation(8)
    moved = sample(jnp.asarray(logits[order]), state.gather(jnp.asarray(order)), jnp.asarray(at[order]))
    assert int(moved[list(order).index(slot)]) == expected


def test_seed_and_position_decide():
    logits = np.zeros(VOCAB)

    def tokens(default, **settings):
        row = slot_row(SamplingParams(**settings), (), VOCAB, (), default)
        rows = admit(SlotSampling.empty(1, VOCAB), jnp.int32(0), row).gather(jnp.zeros(16, jnp.int32))
        return draw_many(logits, rows).tolist()

    assert tokens(1, seed=5) == tokens(2, seed=5)  # a given seed wins
    assert tokens(5) == tokens(1, seed=5)  # none: the engine's seed
    assert tokens(5) != tokens(6)
    assert tokens(0, seed=2**32) != tokens(0, seed=0)  # the high word counts
    assert tokens(0, seed=-(2**63)) == tokens(0, seed=2**63)
    assert len(set(tokens(5))) > 6  # positions differ


@pytest.mark.parametrize(
    "batch",
    [
        [SamplingParams(temperature=0.0)] * 4,
        [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(temperature=0.3), SamplingParams(seed=3)],
        [SamplingParams(top_k=3), SamplingParams(), SamplingParams(top_p=0.4), SamplingParams(temperature=0.0)],
        [SamplingParams(temperature=0.0, logit_bias={2: 9}), *[SamplingParams(temperature=0.0)] * 3],
    ],
    ids=["greedy", "unfiltered", "filtered", "adjusted"],
)
def test_leaving_out_unused_stages_changes_nothing(batch):
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(50, 8, VOCAB)), jnp.float32)
    rows, stages = fill(VOCAB, batch * 2), needs(batch)
    assert not all(stages.values())
    for step, row in enumerate(logits):
        at = jnp.full(8, step, jnp.int32)
        np.testing.assert_array_equal(sample(row, rows, at, **stages), sample(row, rows, at))


# -- bias, penalties, stop ids -----------------------------------------------------------------------------------------


def adjusted(logits, params, prompt, output, stop_ids=()):
    return np.asarray(sampling._adjust(jnp.array([logits], jnp.float32), rows_of(params, prompt, output, stop_ids)))[0]


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@few
@given(
    logit_rows, tokens, tokens,
    st.builds(
        SamplingParams,
        repetition_penalty=st.floats(0.5, 2), presence_penalty=st.floats(-2, 2), frequency_penalty=st.floats(-2, 2),
        logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
        min_tokens=st.integers(0, 5),
    ),
)  # fmt: skip
def test_adjusted_logits_equal_the_oracle(logits, prompt, output, params):
    expected = oracle.adjusted(logits, params, prompt, output, [2, 7])
    np.testing.assert_allclose(adjusted(logits, params, prompt, output, [2, 7]), expected, rtol=1e-5, atol=2e-5)


def test_penalties_tell_prompt_from_output():
    logits = [2.0, 1.0, -1.0] + [0.0] * (VOCAB - 3)
    prompt = [0, 0, 0, 2]
    repetition = adjusted(logits, SamplingParams(repetition_penalty=2), prompt, [])
    assert repetition[:3].tolist() == [1.0, 1.0, -2.0]
    assert adjusted(logits, SamplingParams(presence_penalty=2, frequency_penalty=2), prompt, []).tolist() == logits
    assert adjusted(logits, SamplingParams(presence_penalty=0.5), prompt, [1, 1])[:3].tolist() == [2.0, 0.5, -1.0]
    assert adjusted(logits, SamplingParams(frequency_penalty=0.5), prompt, [1, 1])[:3].tolist() == [2.0, 0.0, -1.0]
    assert adjusted(logits, SamplingParams(repetition_penalty=2), [], [1])[:3].tolist() == [2.0, 0.5, -1.0]


def test_bias_forces_and_bans_greedily():
    logits = list(range(VOCAB))
    assert set(draw_many(logits, rows_of(SamplingParams(temperature=0, logit_bias={1: 100})))) == {1}
    assert set(draw_many(logits, rows_of(SamplingParams(temperature=0, logit_bias={11: -100})))) == {10}


def test_min_tokens_masks_every_stop_id_until_reached():
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[10])
    logits = list(range(VOCAB))
    for output, expected in (([], 9), ([9], 9), ([9, 9], 11)):
        assert draw_many(logits, rows_of(params, (), output, stop_ids=[11])).tolist() == [expected] * 16
    ignoring = params.replace(ignore_eos=True)
    assert draw_many(logits, rows_of(ignoring, stop_ids=[11])).tolist() == [11] * 16
    all_stops = rows_of(SamplingParams(min_tokens=1, stop_token_ids=range(VOCAB)))
    assert draw_many(logits, all_stops).tolist() == [-1] * 16


def test_stopped_flags_stop_ids_only():
    rows = rows_of(SamplingParams(stop_token_ids=[3]), stop_ids=[0], count=4)
    assert sampling.stopped(rows, jnp.array([3, 0, 4, -1], jnp.int32)).tolist() == [True, True, False, False]


# -- state -------------------------------------------------------------------------------------------------------------


def test_update_counts_active_rows_and_ignores_broken_ones():
    state = SlotSampling.empty(4, VOCAB)
    slots = jnp.array([2, 0, 1, 3, 2], jnp.int32)
    state = update(state, slots, jnp.array([7, 7, -1, 5, 7], jnp.int32), jnp.array([True, True, True, False, True]))
    expected = np.zeros((4, VOCAB), int)
    expected[2, 7], expected[0, 7] = 2, 1
    np.testing.assert_array_equal(state.out_count, expected)
    assert state.generated.tolist() == [1, 0, 2, 0]


def test_admit_replaces_all_of_one_slot():
    used = SamplingParams(temperature=0.7, top_k=4, min_tokens=3, stop_token_ids=[1, 2, 3], logit_bias={3: 1}, seed=9)
    state = fill(VOCAB, [used, used], [[1], [1]], [[4], [4]])
    fresh = slot_row(SamplingParams(top_p=0.5), [2], VOCAB, [6], 1)
    state = admit(state, jnp.int32(1), fresh)
    clean = admit(SlotSampling.empty(2, VOCAB), jnp.int32(1), fresh)
    kept = fill(VOCAB, [used, used], [[1], [1]], [[4], [4]])
    for got, new, old in zip(*map(jax.tree.leaves, (state, clean, kept)), strict=True):
        np.testing.assert_array_equal(got[1], new[1])
        np.testing.assert_array_equal(got[0], old[0])


def test_a_request_that_comes_back_goes_on_as_if_it_had_stayed():
    params, prompt, output = SamplingParams(frequency_penalty=1, min_tokens=4, seed=2), [1, 5], [3, 3, 0]
    stayed = fill(VOCAB, [params], [prompt], [output], [7])
    row = slot_row(params, prompt, VOCAB, [7], 0, output_ids=output)
    back = admit(fill(VOCAB, [params], [[2]], [[9, 9]]), jnp.int32(0), row)
    for got, expected in zip(*map(jax.tree.leaves, (back, stayed)), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_columns_have_their_names():
    params = SamplingParams(0.5, 3, 0.25, 0.125, min_tokens=2, presence_penalty=1.5, frequency_penalty=-1,
                            repetition_penalty=1.25, stop_token_ids=[4])  # fmt: skip
    rows = rows_of(params, (), [1], stop_ids=[2], count=1)
    reals = (rows.temperature, rows.top_p, rows.min_p, rows.repetition, rows.presence, rows.frequency)
    assert [r.item() for r in reals] == [0.5, 0.25, 0.125, 1.25, 1.5, -1]
    assert [w.item() for w in (rows.top_k, rows.min_tokens, rows.generated)] == [3, 2, 1]
    assert rows.stop_ids.tolist() == [[2, 4] + [-1] * (MAX_STOP_IDS - 2)]


def test_state_is_updated_in_place():
    state = SlotSampling.empty(2, VOCAB)
    leaves = jax.tree.leaves(state)
    state = admit(state, jnp.int32(0), slot_row(SamplingParams(), [1], VOCAB, (), 0))
    assert all(leaf.is_deleted() for leaf in leaves)
    leaves = jax.tree.leaves(state)
    update(state, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), jnp.ones(1, bool))
    assert all(leaf.is_deleted() for leaf in leaves)


# -- log-probabilities -------------------------------------------------------------------------------------------------


def test_logprobs_sum_to_one_and_rank_from_one():
    logits = jnp.asarray(np.random.default_rng(3).normal(scale=4, size=(6, VOCAB)), jnp.float32)
    order = np.argsort(-np.asarray(logits), axis=1)
    picked = jnp.asarray(order[np.arange(6), [0, 1, 5, 11, 0, 2]], jnp.int32)
    chosen, top_ids, top, rank = logprobs(logits, picked, VOCAB)
    np.testing.assert_allclose(np.exp(np.asarray(top, np.float64)).sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(top_ids, order)
    np.testing.assert_array_equal(rank, [1, 2, 6, 12, 1, 3])
    np.testing.assert_array_equal(chosen, np.asarray(top)[np.arange(6), np.asarray(rank) - 1])
    exact = np.asarray(logits, np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(top, np.take_along_axis(exact, order, axis=1), atol=2e-6)


def test_logprobs_edges():
    logits = jnp.array([[1.0, 3.0, 3.0, -jnp.inf]])
    chosen, top_ids, top, rank = logprobs(logits, jnp.array([2], jnp.int32), 2)
    assert top_ids.tolist() == [[1, 2]]
    assert rank.tolist() == [1]  # an equal does not push it down
    assert chosen[0] == top[0, 1]
    impossible, none, _, rank = logprobs(logits, jnp.array([3], jnp.int32), 0)
    assert impossible[0] == -jnp.inf
    assert rank.tolist() == [4]
    assert none.shape == (1, 0)
    assert not np.isnan(logprobs(logits, jnp.array([-1], jnp.int32), 9)[0]).any()
    assert logprobs(logits, jnp.array([0], jnp.int32), 9)[1].shape == (1, 4)
