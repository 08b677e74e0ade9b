"""Programs kept for the next start."""

import dataclasses

import jax
import numpy as np
import pytest

from flint_jax import sampling, tiles
from flint_jax.model import Flint
from flint_jax.random_weights import random_weights
from flint_jax.sampling_params import SamplingParams
from flint_jax.step import Sizes, Steps
from loaders.synthetic import spread
from tests.model.test_decode_kernels import CONFIG, NUMERICS

SIZES = Sizes(2, 24, 700, (1,), (64,))
PROMPT = tuple(range(5, 40))


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", before)


def steps(sizes=SIZES, tiled=False):
    kinds = {"layer_types": CONFIG.layer_types[:2], "rope_layers": (False, True)}
    small = dataclasses.replace(CONFIG, num_hidden_layers=2, **kinds)
    tree = random_weights(small, NUMERICS, weight_format="bf16", spread=spread)
    return Steps(Flint(small, tiles.tile_weights(tree) if tiled else tree, NUMERICS), sizes, allocate=False)


def answer(made):
    made.allocate()
    made.set_tables(np.arange(2 * made.tables.shape[1]).reshape(2, -1) % 24)
    made.admit(0, sampling.slot_row(SamplingParams(temperature=0.0), PROMPT, 512, (), 0), 699)
    made.prefill([(PROMPT, 0, 0, True)])
    return [np.array(x) for x in made.decode([0])]


@pytest.mark.slow
@pytest.mark.parametrize("tiled", [False, True])
def test_a_second_start_lowers_nothing(folder, monkeypatch, caplog, tiled):
    first = steps(tiled=tiled)
    first.build()
    assert len(list(folder.glob("*/*"))) == len(first.programs)
    expected = answer(first)

    second = steps(tiled=tiled)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("a program was compiled"))
    spent = second.build()
    assert spent["lower"] == 0
    assert second.programs.keys() == first.programs.keys()
    for ours, theirs in zip(answer(second), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert second.state.cache.k_pages.shape == first.state.cache.k_pages.shape

    monkeypatch.undo()
    (damaged,) = folder.glob("*/peek-1")
    damaged.write_bytes(b"no program")
    third = steps(tiled=tiled)
    third.build()
    assert "cannot be used" in caplog.text
    assert damaged.stat().st_size > 100
    # Another pool makes other programs.
    assert third._identity(None) != steps(dataclasses.replace(SIZES, pages=23), tiled)._identity(None)
