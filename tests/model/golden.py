"""The golden models, loaded once, and comparisons with their stored outputs (tests/goldens)."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import flint_jax
from flint_jax.step import Sizes, State, Steps

FOLDER = Path(__file__).parents[1] / "goldens"
MODELS = ("T1", "T2", "T2-nvfp4")


@functools.cache
def arrays(name):
    """MODEL.npz as a dict."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


@functools.cache
def cases(name):
    """MODEL.cases.json."""
    return json.loads((FOLDER / f"{name}.cases.json").read_text())


@functools.cache
def language_model(name, numerics="transformers", dtype="float32"):
    """A golden model."""
    return flint_jax.load(FOLDER / name, dtype=dtype, numerics=numerics, progress=False)


def prompts(name):
    """The single-prompt cases: len1, lenW-1, lenW, lenW+1, len3W."""
    return [k for k in cases(name)["cases"] if k.startswith("len")]


@functools.cache
def _programs(name, slots, pages, chunks, batches, max_context, numerics, snapshots):
    return Steps(language_model(name, numerics).model, Sizes(slots, pages, max_context, batches, chunks, snapshots))


def steps(
    name, *, slots=3, pages=48, chunks=(16, 64), batches=(3,), max_context=1024, numerics="transformers", snapshots=0
):
    """Steps over a golden model whose whole cache is NaN. Programs are shared, so use one at a time."""
    made = _programs(name, slots, pages, chunks, batches, max_context, numerics, snapshots)
    state = State.create(made.model, slots, pages)
    poisoned = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), state.cache)
    made.state = dataclasses.replace(state, cache=poisoned)
    made.snapshots = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), made.snapshots)
    return made


def row_error(got, want):
    """Largest relative error of a row: |got - want| / |want|, in float64."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())
