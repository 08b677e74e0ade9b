"""What the compiled decode step promises: donated in place, no copy of the cache, one compilation for all lengths."""

import dataclasses
import re

import jax
import jax.monitoring
import numpy as np
import pytest

from flint_jax import sampling
from flint_jax.cache import PAGE
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from flint_jax.random_weights import random_weights
from flint_jax.sampling_params import SamplingParams
from flint_jax.step import Sizes, Steps
from loaders.synthetic import preset, spread
from tests.model import golden


@pytest.fixture(scope="module")
def steps():
    made = golden.steps(
        "T1", slots=2, pages=24, chunks=(16,), batches=(2,), max_context=512, numerics="serving", snapshots=3
    )
    made.compile()
    return made


def test_warming_up_changes_nothing():
    """Every program has run once when compile() returns, on padding: no slot, no place of the cache is touched."""
    made = golden.steps("T1", slots=2, pages=24, chunks=(16,), batches=(2,), max_context=512, numerics="serving")
    before = jax.tree.map(np.array, made.state)
    made._compiled.clear()
    made.compile()
    for was, now in zip(jax.tree.leaves(before), jax.tree.leaves(made.state), strict=True):
        np.testing.assert_array_equal(was, now)
    assert set(made._scratch) == {2}


def cache_leaves(state):
    return jax.tree.leaves(state.cache)


def test_no_compilation_after_compile(steps):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    row = sampling.slot_row(SamplingParams(temperature=0.0), (1, 2), 320, (), 0)
    tables = np.arange(steps.tables.size, dtype=np.int32).reshape(steps.tables.shape) % 24
    for length in (1, 5, 16, 17, 40):
        steps.set_tables(tables.copy())
        steps.admit(0, row, 400)
        for start in range(0, length, 16):
            ids = np.arange(start, min(start + 16, length)) % 320
            steps.prefill([(ids, 0, start, start + 16 >= length)])
        for _ in range(3):
            tokens, logits = steps.decode([0])
            steps.logprobs(logits, tokens)
        steps.set_table(1, tables[0])
        steps.save(0, 2)
        steps.restore(2, 1)
        steps.copy_page(3, 5)
        steps.release(0)
    np.asarray(tokens)
    assert compiled == []
    # The listener works: something new does compile.
    jax.jit(lambda x: x * 3 + 17)(np.float32(1.5))
    assert compiled


def test_state_is_donated(steps):
    before = jax.tree.leaves(steps.state)
    _, logits = steps.decode([0])
    assert all(leaf.is_deleted() for leaf in before)
    steps.decode([0])
    assert logits.is_deleted()


@pytest.mark.parametrize(("kind", "size"), [("decode", 2), ("prefill", 16)])
def test_cache_is_updated_in_place(steps, kind, size):
    compiled = steps._compiled[kind, size]
    cache = sum(leaf.nbytes for leaf in cache_leaves(steps.state))
    memory = compiled.memory_analysis()
    # The logits keep their place too: one buffer that moves has XLA update the captured graph, 1.1 ms a step.
    logits = size * steps.config.vocab_size * 4 if kind == "decode" else 0
    assert memory.alias_size_in_bytes >= cache + logits
    shapes = {",".join(map(str, leaf.shape)) for leaf in cache_leaves(steps.state)}
    copies = re.findall(r"= \w+\[([\d,]+)\][^ ]* copy\(", compiled.as_text())
    assert not shapes & set(copies)


def test_one_row_is_updated_in_place():
    """Where keys come in several blocks, XLA made slices of a scatter of one index, with 18 copies of the caches."""
    numerics = Numerics("serving", "bfloat16")
    config = preset("tiny", 4)
    model = Flint(config, random_weights(config, numerics, weight_format="bf16", spread=spread), numerics)
    steps = Steps(model, Sizes(2, 24, 4096, (1,), (16,)))
    text = steps.lower_decode(1).compile().as_text()
    shapes = {",".join(map(str, leaf.shape)) for leaf in cache_leaves(steps.state)}
    assert not shapes & set(re.findall(r"= \w+\[([\d,]+)\][^ ]* copy\(", text))


@pytest.mark.parametrize("kind", ["save", "restore", "copy page"])
def test_copies_for_the_prefix_cache_are_in_place(steps, kind):
    """No second pool of pages, rings or snapshots, and temporaries of one page or ring only."""
    compiled = steps._compiled[kind, 0]
    cache = steps.state.cache
    into, parts = {
        "save": (steps.snapshots.k, 3),
        "restore": (cache.k_ring, 2),
        "copy page": (cache.k_pages, 24),
    }[kind]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * into.nbytes
    assert memory.temp_size_in_bytes <= 2 * into.nbytes // parts + 1024


def test_the_prefix_caches_copies_leave_every_address(steps):
    def addresses():
        leaves = jax.tree.leaves((steps.state.cache, steps.snapshots, steps.tables))
        return [leaf.unsafe_buffer_pointer() for leaf in leaves]

    steps.set_table(0, np.zeros(steps.tables.shape[1], np.int32))
    before = addresses()
    row = np.arange(steps.tables.shape[1], dtype=np.int32) % 24
    for call in (
        lambda: steps.save(1, 0),
        lambda: steps.restore(1, 1),
        lambda: steps.copy_page(1, 2),
        lambda: steps.set_table(1, row),
    ):
        call()
        assert addresses() == before
    np.testing.assert_array_equal(np.asarray(steps.tables), [np.zeros_like(row), row])


def test_snapshots_and_pages_are_copied_whole(steps):
    cache = steps.state.cache
    rng = np.random.default_rng(0)

    def fill(leaf):
        # Not jax.random: a float32 leaf of any values will do.
        return jax.device_put(rng.normal(size=leaf.shape).astype(leaf.dtype))

    steps.state = dataclasses.replace(steps.state, cache=jax.tree.map(fill, cache))
    old = jax.tree.map(np.asarray, steps.state.cache)
    old = jax.tree.map(np.copy, old)
    steps.save(1, 2)
    steps.restore(2, 0)
    steps.copy_page(7, 4)
    new = steps.state.cache
    for name in ("k_ring", "v_ring"):
        want = getattr(old, name)
        want[:, 0] = want[:, 1]
        np.testing.assert_array_equal(getattr(new, name), want)
    for name in ("k_pages", "v_pages"):
        want = getattr(old, name)
        want[:, 4] = want[:, 7]
        np.testing.assert_array_equal(getattr(new, name), want)


def test_sizes_and_ring():
    from flint_jax.cache import page_bytes, ring_size, slot_bytes, table_width

    assert ring_size(513) == 576
    assert ring_size(9) == 128
    assert table_width(262144) == 4096
    config = golden.language_model("T1").config
    state = golden.steps("T1", slots=2, pages=5).state
    itemsize = state.cache.k_pages.dtype.itemsize
    assert state.cache.k_pages.nbytes + state.cache.v_pages.nbytes == 5 * page_bytes(config, itemsize)
    assert state.cache.k_ring.nbytes + state.cache.v_ring.nbytes == 2 * slot_bytes(config, itemsize)
    assert state.cache.k_pages.shape[3] == PAGE
