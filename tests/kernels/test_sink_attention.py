"""The decode attention kernels' programs, executed on the CPU, against the reference; caches full of NaN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench, device, dispatch, emulate, testing
from pallas_kernels.sink_attention import cases, mosaic, reference
from pallas_kernels.sink_attention.api import Weights, attend_pages, attend_ring

K, G, H, PAGE = 2, 8, 128, 64
LAYERS, MODEL_LAYER, CACHE_LAYER, SLOTS = 2, 2, 1, 5
WINDOW, RING = 65, 96
CORES = 6


def normal(seed, shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def make_weights(*, rope=True, sinks=None):
    angle = np.arange(4096, dtype=np.float32)[:, None] * np.linspace(1, 0.01, H // 2, dtype=np.float32)
    table = jnp.asarray(np.concatenate([np.cos(angle), np.sin(angle)], -1)) if rope else None
    sinks = normal(3, (3, K * G), jnp.float32) if sinks is None else jnp.full((3, K * G), sinks, jnp.float32)
    return Weights(normal(1, (3, H)) + 1, normal(2, (3, H)) + 1, sinks, MODEL_LAYER, table, 1e-6)


def queries(rows):
    return normal(4 + rows, (rows, (G + 2) * K * H))


def ring_cache(slots, start):
    """Rings with what each request wrote, NaN elsewhere."""
    cache = np.full((2, LAYERS, SLOTS, K, RING, H), np.nan, np.float32)
    fill = np.asarray(normal(7, cache.shape, jnp.float32))
    for slot, position in zip(slots, start, strict=True):
        if 0 <= slot < SLOTS:
            for p in range(max(0, position - RING + 1), position):
                cache[:, :, slot, :, p % RING] = fill[:, :, slot, :, p % RING]
    return [jnp.asarray(c, jnp.bfloat16) for c in cache]


def page_cache(slots, start, width=6, pages=32):
    """Pages in random order with what each request wrote, NaN elsewhere."""
    rng = np.random.default_rng(0)
    tables = rng.permutation(pages)[: SLOTS * width].reshape(SLOTS, width).astype(np.int32)
    cache = np.full((2, LAYERS, pages, K, PAGE, H), np.nan, np.float32)
    fill = np.asarray(normal(8, cache.shape, jnp.float32))
    for slot, position in zip(slots, start, strict=True):
        if 0 <= slot < SLOTS:
            for p in range(position):
                where = np.s_[:, :, tables[slot, p // PAGE], :, p % PAGE]
                cache[where] = fill[where]
    return [jnp.asarray(c, jnp.bfloat16) for c in cache], jnp.asarray(tables)


def same_bits(a, b):
    return np.array_equal(np.asarray(a).view(np.uint16), np.asarray(b).view(np.uint16))


def check(actual, expected, before):
    """Outputs near, caches equal but for one last bit of the new k, and NaN where they had NaN."""
    assert testing.row_error(actual[0], expected[0]) < 4e-3
    for mine, theirs, old in zip(actual[1:3], expected[1:3], before, strict=True):
        mine, theirs, old = (np.asarray(x, np.float32) for x in (mine, theirs, old))
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
        changed = ~(np.isnan(old) & np.isnan(mine)) & (old != mine)
        np.testing.assert_array_equal(mine[~changed], theirs[~changed])
        np.testing.assert_allclose(mine[changed], theirs[changed], rtol=2**-7)


def run_ring(slots, start, weights=None, **options):
    weights = weights or make_weights()
    caches = ring_cache(slots, start)
    arguments = (queries(len(slots)), weights, *caches, CACHE_LAYER, jnp.asarray(slots), jnp.asarray(start))
    with emulate.active(), device.assume(device.Device("emulated", (9, 0), 132, 0.0)):
        actual = mosaic.attend_ring(*arguments, window=WINDOW, **options)
    check(actual, reference.attend_ring(*arguments, window=WINDOW), caches)
    return actual


def run_pages(slots, start, weights=None, cores=CORES, **options):
    weights = weights or make_weights(rope=False)
    caches, tables = page_cache(slots, start)
    arguments = (queries(len(slots)), weights, *caches, CACHE_LAYER, tables, jnp.asarray(slots), jnp.asarray(start))
    with emulate.active(), device.assume(device.Device("emulated", (9, 0), cores, 0.0)):
        actual = mosaic.attend_pages(*arguments, **options)
    check(actual, reference.attend_pages(*arguments), caches)
    assert not np.asarray(actual[3]).any()  # every counter is back at zero
    return actual


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_ring_splits(splits):
    run_ring([3, 0], [200, 64], splits=splits, warps=4)


@pytest.mark.parametrize("position", [0, 1, 15, 16, 63, 64, 65, 95, 96, 97, 111, 112, 1000])
def test_ring_positions(position):
    """First token, edges of a unit, of the window, of the ring, and far beyond."""
    run_ring([2], [position], splits=2, warps=4)


def test_ring_rounds_that_reuse_their_places():
    run_ring([1], [250], splits=1, warps=4, stages=1)
    run_ring([1], [250], splits=1, warps=8)


def test_ring_without_rotation():
    run_ring([1], [130], make_weights(rope=False), splits=4)


def test_ring_padding_rows_write_nothing_and_give_zeros():
    out, *_ = run_ring([-1, 4, SLOTS, 2**31 - 1], [7, 70, 3, 5], splits=2, warps=4)
    assert not np.asarray(out)[[0, 2, 3]].any()
    assert np.asarray(out)[1].any()


@pytest.mark.parametrize("sink", [float("-inf"), 300.0])
def test_ring_extreme_sinks(sink):
    """No sink at all; a sink so large that nothing else counts and its exponential overflows."""
    out, *_ = run_ring([1], [90], make_weights(sinks=sink), splits=2, warps=4)
    assert np.asarray(out).any() == (sink < 0)


@pytest.mark.parametrize("position", [0, 15, 16, 63, 64, 127, 128, 300, 383])
def test_page_positions(position):
    """First token, edges of a unit and of a page, the last place of the table."""
    run_pages([2], [position])


@pytest.mark.parametrize("options", [{"warps": 4}, {"warps": 8, "stages": 2}, {"blocks_per_core": 2, "warps": 4}])
def test_page_shapes_of_the_grid(options):
    run_pages([2, 0], [383, 40], **options)


def test_page_ragged_rows_share_blocks():
    """Rows of 24, 1, 0 (padding) and 13 units over six blocks: blocks span rows and heads, rows span blocks."""
    out, *_ = run_pages([1, 4, -1, 0], [380, 3, 9, 200], warps=4)
    assert not np.asarray(out)[2].any()


def test_page_only_padding():
    out, *_ = run_pages([-1, SLOTS], [100, 100], warps=4)
    assert not np.asarray(out).any()


def test_page_with_rotation():
    run_pages([1], [130], make_weights(rope=True), warps=4)


@pytest.mark.parametrize("sink", [float("-inf"), 300.0])
def test_page_extreme_sinks(sink):
    out, *_ = run_pages([1], [90], make_weights(rope=False, sinks=sink), warps=4)
    assert np.asarray(out).any() == (sink < 0)


def test_page_many_rows():
    """More rows than lanes: 34 rows, two of them real."""
    slots, start = np.full(34, -1), np.zeros(34, int)
    slots[[1, 33]], start[[1, 33]] = [2, 3], [100, 20]
    run_pages(slots.tolist(), start.tolist(), warps=4)


SPANS = [
    {"cluster": 1, "parts": 1},
    {"cluster": 2, "parts": 3, "warps": 4},
    {"cluster": 4, "parts": 1, "warps": 4, "stages": 3},
    {"cluster": 8, "parts": 2, "warps": 4},
    {"cluster": 1, "parts": 11, "warps": 4},
]


@pytest.mark.parametrize("options", SPANS, ids=lambda o: f"{o['cluster']}x{o['parts']}")
@pytest.mark.parametrize("position", [40, 383])
def test_one_row_in_clusters(position, options):
    """A few units (one cluster, or fewer blocks than that, is enough) and 24, up to 11 partial results of them."""
    run_pages([2], [position], **options)


def test_the_rule_for_one_row_goes_by_the_room_in_the_table():
    """Clusters of 8 for short contexts, pairs of blocks on nearly all cores for long ones; never more than cores."""
    short, long = (mosaic.spans_rule(4, 132, room) for room in (16_384, 16_448))
    assert (short["cluster"], short["parts"], long["cluster"], long["parts"]) == (8, 3, 2, 16)
    for cores in (1, 60, 132, 148):
        for room in (1024, 262_144):
            rule = mosaic.spans_rule(4, cores, room)
            assert rule["parts"] == 1 or rule["cluster"] * rule["parts"] * 4 <= cores


@pytest.mark.parametrize("several", [False, True])
def test_whoever_arrives_last_the_result_is_the_same(several, monkeypatch):
    """Blocks run in this order and in the opposite one: every bit stays."""
    slots, start, options = [1], [380], {"cluster": 2, "parts": 3, "warps": 4}
    if several:
        slots, start, options = [1, 3], [380, 70], {"warps": 4}
    out = run_pages(slots, start, **options)[0]
    monkeypatch.setattr(emulate, "BACKWARDS", True)
    assert same_bits(out, run_pages(slots, start, **options)[0])


def test_counters_are_shared_by_calls():
    weights = make_weights(rope=False)
    caches, tables = page_cache([1], [380])
    with emulate.active(), device.assume(device.Device("emulated", (9, 0), CORES, 0.0)):
        arrivals = mosaic.new_arrivals(4, K)
        arguments = (queries(1), weights, *caches, CACHE_LAYER, tables, jnp.asarray([1]), jnp.asarray([380]))
        first = mosaic.attend_pages(*arguments, cluster=2, parts=2, warps=4, arrivals=arrivals)
        second = mosaic.attend_pages(*arguments, cluster=2, parts=2, warps=4, arrivals=first[3])
        assert same_bits(first[0], second[0])
        with pytest.raises(ValueError, match="expected 1 x 2 x 8 int32"):
            mosaic.attend_pages(*arguments, arrivals=arrivals[:3])


# -- several tokens a row ----------------------------------------------------------------------------------------------


def one_by_one(attend, qkv, caches, start, count):
    """The reference, token by token: what attending to several at once must equal."""
    outs = []
    for t in range(qkv.shape[1]):
        there = np.arange(len(start)) if count is None else np.flatnonzero(np.asarray(count) > t)
        slots = np.full(len(start), -1)
        slots[there] = np.asarray(attend.slots)[there]
        out, *caches = attend(qkv[:, t], *caches, jnp.asarray(slots), jnp.asarray(start) + t)
        outs.append(out)
    return jnp.stack(outs, 1), *caches


class Attend:
    """One of the references with everything but the tokens bound."""

    def __init__(self, weights, slots, tables=None):
        self.weights, self.slots, self.tables = weights, slots, tables

    def __call__(self, qkv, k, v, slots, start, **options):
        if self.tables is None:
            found = reference.attend_ring(qkv, self.weights, k, v, CACHE_LAYER, slots, start, window=WINDOW, **options)
        else:
            found = reference.attend_pages(qkv, self.weights, k, v, CACHE_LAYER, self.tables, slots, start, **options)
        return found[:3]


RAGGED = ([3, -1, 0, 4], [200, 9, 62, 0], [3, 3, 1, 2])


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_several_tokens_a_row(paged, counted):
    """Three tokens of four rows at once, one of them padding; the kernels against the reference, and the reference
    against itself one token at a time. Across the edges of a unit, a page and the ring."""
    slots, start, count = RAGGED
    count = jnp.asarray(count) if counted else None
    qkv = normal(5, (len(slots), 3, (G + 2) * K * H))
    if paged:
        caches, tables = page_cache(slots, start)
    else:
        caches, tables = ring_cache(slots, start), None
    weights = make_weights(rope=not paged)
    attend = Attend(weights, slots, tables)
    expected = attend(qkv, *caches, jnp.asarray(slots), jnp.asarray(start), count=count)
    check(expected, one_by_one(attend, qkv, caches, start, count), caches)
    rest = (*caches, CACHE_LAYER, *([tables] if paged else []), jnp.asarray(slots), jnp.asarray(start))
    with emulate.active(), device.assume(device.Device("emulated", (9, 0), CORES, 0.0)):
        if paged:
            actual = mosaic.attend_pages(qkv, weights, *rest, count=count, warps=4)
        else:
            actual = mosaic.attend_ring(qkv, weights, *rest, window=WINDOW, count=count, splits=2, warps=4)
    check(actual, expected, caches)
    out = np.asarray(actual[0], np.float32)
    assert not out[1].any()
    assert out[0].any(-1).all()
    if counted:
        assert not out[2, 1:].any()


def test_more_tokens_than_the_ring_has_spare_places():
    arguments = (normal(5, (1, 40, (G + 2) * K * H)), make_weights(), *ring_cache([0], [9]), 1)
    with pytest.raises(ValueError, match="40 tokens at once and a window of 65 in a ring of 96 places"):
        attend_ring(*arguments, jnp.asarray([0]), jnp.asarray([9]), window=WINDOW)


def test_a_position_beyond_the_table_stays_inside_the_cache():
    """The host stops a request before; the kernel must not read or write beyond its arrays anyway."""
    last = SLOTS - 1  # beyond its row of the table there is nothing
    caches, tables = page_cache([last], [383])
    arguments = (queries(1), make_weights(rope=False), *caches, 1, tables, jnp.asarray([last]), jnp.asarray([500]))
    with emulate.active(), device.assume(device.Device("emulated", (9, 0), CORES, 0.0)):
        mosaic.attend_pages(*arguments, warps=4)


def test_the_ring_reference_sees_exactly_the_window():
    """A key one position too old changes nothing; the oldest key of the window does."""
    weights, (k, v) = make_weights(), ring_cache([0], [200])
    out = reference.attend_ring(queries(1), weights, k, v, 1, jnp.asarray([0]), jnp.asarray([200]), window=WINDOW)[0]
    for age, changes in ((WINDOW - 1, True), (WINDOW, False)):
        other = v.at[1, 0, :, (200 - age) % RING].set(50.0)
        again = reference.attend_ring(
            queries(1), weights, k, other, 1, jnp.asarray([0]), jnp.asarray([200]), window=WINDOW
        )[0]
        assert same_bits(out, again) != changes


def test_dispatch_falls_to_the_reference():
    caches = ring_cache([1], [70])
    weights = make_weights()
    arguments = (queries(1), weights, *caches, 1, jnp.asarray([1]), jnp.asarray([70]))
    assert same_bits(attend_ring(*arguments, window=WINDOW).out, reference.attend_ring(*arguments, window=WINDOW)[0])
    with pytest.raises(dispatch.KernelUnsupported, match="a ring of 96 places for a window of 90"):
        mosaic.attend_ring(*arguments, window=90)
    narrow = dataclasses.replace(weights, q_norm=weights.q_norm.astype(jnp.float32))
    with pytest.raises(dispatch.KernelUnsupported, match="norms of float32"):
        mosaic.attend_ring(arguments[0], narrow, *arguments[2:], window=WINDOW)
    pools, tables = page_cache([1], [70])
    paged = (queries(1), weights, *pools, 1, tables, jnp.asarray([1]), jnp.asarray([70]))
    assert same_bits(attend_pages(*paged).out, reference.attend_pages(*paged)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [cases.ring_case(rows) for rows in (1, 3, 8, 16, 64)]
    + [cases.page_case(1, 1024), cases.page_case(3, 40_000), cases.page_case(64, 1024)]
    + [cases.page_case(5, 8192, ragged=True)],
    ids=lambda case: case.name,
)
def test_on_the_device(case):
    row = bench.measure(case, 1.0, check_only=True)
    assert row["repeatable"]
    assert row["error"] <= case.tolerance
