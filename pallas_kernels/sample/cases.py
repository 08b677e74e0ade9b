"""Batch sizes at which ``sample`` is compiled, checked and timed, after a head that gives tile maxima."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.sample import reference
from pallas_kernels.sample.api import advance, sample
from pallas_kernels.sample.shapes import MAX_STOP_IDS, REALS, TILE, WHOLES
from pallas_kernels.testing import Case

VOCAB = 150_144


def _scores(key, rows: int):
    scores = jax.random.normal(key, (rows, VOCAB), jnp.float32) * 3
    return scores, jnp.max(scores.reshape(rows, -1, TILE), -1)


def _draw(rows: int) -> Case:
    def make(key):
        keys = jax.random.split(key, 2)
        seeds = jax.random.bits(keys[1], (rows, 2), jnp.uint32)
        return seeds, *_scores(keys[0], rows), jnp.full((rows,), 20, jnp.int32)

    def run(op, layer, seeds, scores, tile_max, top_k):
        return op(
            scores,
            temperature=jnp.full((rows,), 1.0, jnp.float32),
            top_k=top_k,
            top_p=jnp.full((rows,), 0.95, jnp.float32),
            min_p=jnp.zeros((rows,), jnp.float32),
            key=seeds,
            position=jnp.full((rows,), layer, jnp.int32),
            greedy=jnp.zeros((rows,), bool),
            tile_max=tile_max,
        )

    return Case(
        f"sample/draw m{rows}",
        make,
        functools.partial(run, sample),
        functools.partial(run, reference.sample),
        layers=8,
        nbytes=rows * VOCAB // TILE * 4,
    )


def _advance(rows: int) -> Case:
    """As the step does it: one launch a call. The progress is compared, hence the tokens."""
    settings = {"temperature": 1.0, "top_p": 0.95, "repetition": 1.0}

    def make(key):
        keys = jax.random.split(key, 2)
        reals = jnp.tile(jnp.asarray([settings.get(name, 0.0) for name in REALS], jnp.float32), (rows, 1))
        wholes = jnp.tile(jnp.asarray([20, 0, 0] + [-1] * MAX_STOP_IDS, jnp.int32), (rows, 1))
        progress = jnp.tile(jnp.asarray([1, 1000, 2**30, 1], jnp.int32), (rows, 1))
        count = jnp.zeros((rows, VOCAB), jnp.int32)
        seeds = jax.random.bits(keys[1], (rows, 2), jnp.uint32)
        return jnp.arange(rows, dtype=jnp.int32), *_scores(keys[0], rows), reals, seeds, wholes, progress, count

    def run(op, layer, slots, scores, tile_max, *state):
        wholes, progress, count = op(scores, tile_max, slots, *state)
        return slots, wholes, progress, count

    def written(layer, args, result):
        _, wholes, progress, count = result
        return *jnp.split(progress, 4, axis=-1), wholes[:, len(WHOLES) - 1 : len(WHOLES)], count.sum(-1, keepdims=True)

    return Case(
        f"sample/advance m{rows}",
        make,
        functools.partial(run, advance),
        functools.partial(run, reference.advance),
        layers=8,
        nbytes=rows * VOCAB // TILE * 4,
        in_place=(5, 6, 7),
        written=written,
    )


def cases() -> list[Case]:
    """The draw alone, with its settings gathered by XLA, and what the decode step runs."""
    return [_draw(rows) for rows in (1, 16)] + [_advance(rows) for rows in (1, 8, 16)]
