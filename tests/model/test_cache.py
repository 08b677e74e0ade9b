"""Prefill = decode = any chunking = any slot = any neighbours, with everything unread in the cache poisoned.

Limit: 1e-5 relative per row of logits at float32; measured 2e-7 to 2e-6 (summation order).
"""

import jax.numpy as jnp
import numpy as np
import pytest

from flint_jax.cache import PAGE
from tests.model import golden

LIMIT = 1e-5
LENGTH = 300  # T1: window 9, ring 128: wraps at 128 and 256. T2-nvfp4: window 33, ring 128


def sequence(name, seed=0, length=LENGTH):
    vocabulary = golden.language_model(name).config.vocab_size
    return np.random.default_rng(seed).integers(0, vocabulary, length)


def whole(name, ids):
    return np.asarray(golden.language_model(name).logits(ids[None]))[0]


class Driver:
    """Steps with pages handed out by hand, shuffled, so that neighbouring tokens live in unrelated pages."""

    def __init__(self, name, seed=0):
        # A chunk of 200 is longer than the ring's spare places (and, on T1, than the ring): another path than 64.
        self.steps = golden.steps(name, chunks=(16, 64, 200))
        self.tables = np.zeros(self.steps.tables.shape, np.int32)
        self.free = list(np.random.default_rng(seed).permutation(self.steps.sizes.pages))

    def give(self, slot, tokens):
        count = -(-tokens // PAGE)
        self.tables[slot, :count] = [self.free.pop() for _ in range(count)]
        self.steps.set_tables(self.tables.copy())
        self.steps.state = self.steps.state.put(slot, limit=10_000)

    def prefill(self, slot, ids, chunks):
        """Logits at each chunk's end; the sequence is chunked by the given sizes in turn."""
        out, start, turn = {}, 0, 0
        while start < len(ids):
            count = min(chunks[turn % len(chunks)], len(ids) - start)
            final = start + count == len(ids)
            _, logits = self.steps.prefill([(ids[start : start + count], slot, start, final)])
            start, turn = start + count, turn + 1
            out[start - 1] = np.asarray(logits)[0]
        return out

    def decode(self, slots, tokens):
        """One step that consumes the given tokens (teacher forcing)."""
        where = jnp.asarray(slots)
        self.steps.state = self.steps.state.put(where, token=jnp.asarray(tokens, jnp.int32), active=True)
        return np.asarray(self.steps.decode(slots)[1])


def assert_same(out, want):
    got = np.stack(list(out.values()))
    assert golden.row_error(got, want[list(out)]) <= LIMIT


@pytest.mark.parametrize("name", ["T1", "T2-nvfp4"])
@pytest.mark.parametrize(
    "chunks",
    [(64,), (1,), (16,), (7, 33, 2), (64, 1, 40, 16), (200,), (1, 170, 40), (70,)],
    ids=lambda c: "-".join(map(str, c)),
)
def test_any_chunking_gives_the_whole_sequence(name, chunks):
    ids = sequence(name)[: 60 if chunks == (1,) else LENGTH]
    driver = Driver(name)
    driver.give(1, len(ids))
    assert_same(driver.prefill(1, ids, chunks), whole(name, ids))


@pytest.mark.parametrize(("name", "window"), [("T1", 9), ("T2-nvfp4", 33)])
@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_decode_continues_prefill_across_window_edges(name, window, multiple):
    ids = sequence(name, seed=multiple)
    want = whole(name, ids)
    first = multiple * window - 2
    driver = Driver(name)
    driver.give(2, len(ids))
    driver.prefill(2, ids[:first], (64,))
    assert_same({t: driver.decode([2], [ids[t]])[0] for t in range(first, first + 5)}, want)


@pytest.mark.parametrize("edge", [128, 256])
def test_decode_across_the_rings_wrap(edge):
    ids = sequence("T1", seed=edge)
    want = whole("T1", ids)
    driver = Driver("T1")
    driver.give(0, len(ids))
    driver.prefill(0, ids[: edge - 3], (64, 16))
    assert_same({t: driver.decode([0], [ids[t]])[0] for t in range(edge - 3, edge + 12)}, want)


def test_neighbours_and_slots_never_matter():
    rows = [sequence("T2-nvfp4", seed)[:length] for seed, length in ((1, 90), (2, 20), (3, 200))]
    alone = [whole("T2-nvfp4", ids) for ids in rows]
    driver = Driver("T2-nvfp4")
    for slot, ids in enumerate(rows):
        driver.give(slot, len(ids))
        driver.prefill(slot, ids[:10], (16,))
    for t in range(10, 20):
        order = [0, 1, 2] if t % 2 else [2, 0, 1]
        logits = driver.decode(order, [rows[s][t] for s in order])
        for row, slot in enumerate(order):
            assert golden.row_error(logits[row], alone[slot][t]) <= LIMIT
    # Slot 1 is idle from here on; the others go on alone, and slot 0 in a smaller company.
    for t in range(20, 30):
        logits = driver.decode([2, 0], [rows[2][t], rows[0][t]])
        assert golden.row_error(logits[0], alone[2][t]) <= LIMIT
        assert golden.row_error(logits[1], alone[0][t]) <= LIMIT


def test_a_slot_forgets_its_last_request():
    driver = Driver("T1")
    old, new = sequence("T1", 5), sequence("T1", 6)[:150]
    driver.give(0, len(old))
    driver.prefill(0, old, (64,))
    assert_same(driver.prefill(0, new, (64, 5)), whole("T1", new))


def test_inert_rows_write_nothing():
    driver = Driver("T1")
    driver.give(0, 64)
    driver.prefill(0, sequence("T1")[:20], (16,))
    driver.steps.state = driver.steps.state.put(slice(None), active=False)
    before = [np.asarray(x) for x in (driver.steps.state.cache.k_pages, driver.steps.state.cache.v_ring)]
    driver.steps.decode([0])
    after = [np.asarray(x) for x in (driver.steps.state.cache.k_pages, driver.steps.state.cache.v_ring)]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_window_counts_the_current_token():
    """W = 9 on T1: changing a token 9 before the last one changes nothing in a window layer, 8 before does."""
    lm = golden.language_model("T1")
    config = lm.config
    from flint_jax.model import WholeSequence

    q = np.random.default_rng(0).normal(size=(1, 20, config.num_attention_heads, config.head_dim)).astype(np.float32)
    k = np.random.default_rng(1).normal(size=(1, 20, config.num_key_value_heads, config.head_dim)).astype(np.float32)
    v = np.eye(20, config.head_dim, dtype=np.float32)[None, :, None].repeat(config.num_key_value_heads, 2)
    layer = config.sliding_layers[0]
    kv = WholeSequence(config, lm.model.numerics, (1, 20))
    out = np.asarray(kv.attend(layer, jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.zeros(4)))
    # Query 12 sees keys 4..12 and no other (v is one-hot by position).
    np.testing.assert_array_equal(np.flatnonzero(out[0, 12, 0] > 0), np.arange(4, 13))
