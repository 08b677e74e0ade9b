"""Batch sizes at which ``sample`` is compiled, checked and timed, after a head that gives tile maxima."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.sample import draw, reference
from pallas_kernels.sample.api import sample, top_candidates
from pallas_kernels.sample.shapes import TILE
from pallas_kernels.testing import Case

VOCAB = 150_144


def _make(rows: int):
    def make(key):
        keys = jax.random.split(key, 2)
        scores = jax.random.normal(keys[0], (rows, VOCAB), jnp.float32) * 3
        seeds = jax.random.bits(keys[1], (rows, 2), jnp.uint32)
        return seeds, scores, jnp.max(scores.reshape(rows, -1, TILE), -1), jnp.full((rows,), 20, jnp.int32)

    return make


def _settings(rows: int, layer: int, seeds):
    return {
        "temperature": jnp.full((rows,), 1.0, jnp.float32),
        "top_p": jnp.full((rows,), 0.95, jnp.float32),
        "min_p": jnp.zeros((rows,), jnp.float32),
        "key": seeds,
        "position": jnp.full((rows,), layer, jnp.int32),
        "greedy": jnp.zeros((rows,), bool),
    }


def _whole(rows: int) -> Case:
    def run(layer, seeds, scores, tile_max, top_k):
        return sample(scores, top_k=top_k, tile_max=tile_max, **_settings(rows, layer, seeds))

    def plain(layer, seeds, scores, tile_max, top_k):
        found = reference.top_candidates(scores, top_k)
        return draw.draw(*found, **_settings(rows, layer, seeds))

    return Case(f"sample/sample m{rows}", _make(rows), run, plain, layers=8, nbytes=rows * VOCAB // TILE * 4)


def _candidates(rows: int) -> Case:
    def run(layer, seeds, scores, tile_max, top_k):
        ids, found = top_candidates(scores, top_k, tile_max)
        return ids, jnp.where(ids >= 0, found, 0.0)

    def plain(layer, seeds, scores, tile_max, top_k):
        ids, found = reference.top_candidates(scores, top_k)
        return ids, jnp.where(ids >= 0, found, 0.0)

    return Case(f"sample/candidates m{rows}", _make(rows), run, plain, layers=8, nbytes=rows * VOCAB // TILE * 4)


def cases() -> list[Case]:
    """The kernel alone and the whole op."""
    return [_candidates(rows) for rows in (1, 16)] + [_whole(rows) for rows in (1, 8, 16)]
