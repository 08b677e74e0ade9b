"""Shapes at which decode attention is compiled, checked and timed: the model's, at batch sizes and context lengths."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sink_attention import mosaic, reference
from pallas_kernels.sink_attention.api import Weights, attend_pages, attend_ring, new_arrivals
from pallas_kernels.testing import Case, rotation

KV_HEADS, HEADS, WIDTH = 4, 32, 128
PAGE, WINDOW, RING = 64, 513, 576
FULL_LAYERS = 14
POOL_BYTES = 8 * 2**30  # of K and V together, the most that a case may hold
TOKEN_BYTES = 2 * KV_HEADS * WIDTH * 2  # K and V of one token in one layer


def _weights(key, layers: int, rope: bool) -> Weights:
    keys = jax.random.split(key, 3)
    angle = jnp.arange(4096, dtype=jnp.float32)[:, None] * jnp.linspace(1, 0.01, WIDTH // 2, dtype=jnp.float32)
    table = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1) if rope else None
    q_norm, k_norm = (1 + 0.1 * jax.random.normal(k, (layers, WIDTH), jnp.bfloat16) for k in keys[:2])
    return Weights(q_norm, k_norm, jax.random.normal(keys[2], (layers, HEADS), jnp.float32), 0, table)


def _qkv(key, rows: int, tokens: int):
    lead = (rows, tokens) if tokens > 1 else (rows,)
    return jax.random.normal(key, (*lead, (HEADS + 2 * KV_HEADS) * WIDTH), jnp.bfloat16)


def _positions(start, tokens: int):
    return start[:, None] + jnp.arange(tokens, dtype=jnp.int32)


def _suffix(tokens: int, options: dict) -> str:
    return (f" t{tokens}" if tokens > 1 else "") + "".join(f" {name}{value}" for name, value in options.items())


def _at(weights: Weights, layer) -> Weights:
    return Weights(weights.q_norm, weights.k_norm, weights.sinks, layer, weights.rope, weights.eps)


def ring_case(rows: int, *, tokens: int = 1, **options) -> Case:
    """Window layers, all rows past the first window; several new tokens a row are attended to at once."""
    nbytes = rows * WINDOW * TOKEN_BYTES
    layers = rotation(nbytes, most=128)
    op = functools.partial(mosaic.attend_ring, **options) if options else attend_ring

    def make(key):
        keys = jax.random.split(key, 5)
        shape = (layers, rows, KV_HEADS, RING, WIDTH)
        k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
        start = jax.random.randint(keys[2], (rows,), WINDOW, 3000, jnp.int32)
        weights, slots = _weights(keys[4], layers, True), jnp.arange(rows, dtype=jnp.int32)
        return _qkv(keys[3], rows, tokens), k, v, weights, slots, start

    def run(attend, layer, qkv, k, v, weights, slots, start):
        return tuple(attend(qkv, _at(weights, layer), k, v, layer, slots, start, window=WINDOW))[:3]

    def written(layer, args, result):
        k, v = result[1:]
        _, _, _, _, slots, start = args
        return [c[layer, slots[:, None], :, _positions(start, tokens) % RING] for c in (k, v)]

    return Case(
        name=f"sink_attention/window b{rows}{_suffix(tokens, options)}",
        make=make,
        run=functools.partial(run, op),
        reference=functools.partial(run, reference.attend_ring),
        layers=layers,
        nbytes=nbytes,
        in_place=(1, 2),
        written=written,
    )


def page_case(rows: int, context: int, *, tokens: int = 1, ragged: bool = False, **options) -> Case:
    """Full layers; every row has ``context`` tokens, or (ragged) the first one and the others an eighth of it."""
    lengths = np.full(rows, context, np.int32)
    if ragged:
        lengths[1:] = context // 8
    nbytes = int(lengths.sum()) * TOKEN_BYTES
    width = -(-context // (8 * PAGE)) * 8
    used = [-(-int(n) // PAGE) for n in lengths]
    pages = sum(used)
    layers = max(rotation(nbytes), FULL_LAYERS)
    layers = max(2, min(layers, POOL_BYTES // (pages * PAGE * TOKEN_BYTES)))
    op = functools.partial(mosaic.attend_pages, **options) if options else attend_pages

    def make(key):
        keys = jax.random.split(key, 5)
        shape = (layers, pages, KV_HEADS, PAGE, WIDTH)
        k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
        order = jax.random.permutation(keys[2], pages).astype(jnp.int32)
        tables = jnp.zeros((rows, width), jnp.int32)
        first = np.cumsum([0, *used])
        for row, count in enumerate(used):
            tables = tables.at[row, :count].set(order[first[row] : first[row] + count])
        start, slots = jnp.asarray(lengths - tokens), jnp.arange(rows, dtype=jnp.int32)
        arrivals = new_arrivals(rows * tokens, KV_HEADS)
        return _qkv(keys[3], rows, tokens), k, v, arrivals, _weights(keys[4], layers, False), tables, slots, start

    def run(attend, layer, qkv, k, v, arrivals, weights, tables, slots, start):
        return tuple(attend(qkv, _at(weights, layer), k, v, layer, tables, slots, start, arrivals=arrivals))

    def written(layer, args, result):
        _, k, v, arrivals = result
        *_, tables, slots, start = args
        at = _positions(start, tokens)
        return [arrivals, *(c[layer, tables[slots[:, None], at // PAGE], :, at % PAGE] for c in (k, v))]

    size = f"{context // 1024}K" + ("/8" if ragged else "")
    return Case(
        name=f"sink_attention/full b{rows} {size}{_suffix(tokens, options)}",
        make=make,
        run=functools.partial(run, op),
        reference=functools.partial(run, reference.attend_pages),
        layers=layers,
        nbytes=nbytes,
        in_place=(1, 2, 3),
        written=written,
    )


def cases() -> list[Case]:
    """Both kinds of layer at batch sizes and context lengths; then other shapes of the grid for the same work."""
    window = [ring_case(rows) for rows in (1, 2, 4, 8, 16, 64)]
    shapes = [(1, 1), (1, 8), (1, 100), (1, 256), (2, 100), (4, 8), (8, 8), (8, 100), (16, 8), (64, 1), (64, 8)]
    full = [page_case(rows, 1024 * context) for rows, context in shapes]
    full += [page_case(8, 64 * 1024, ragged=True)]
    other = [ring_case(1, splits=4), ring_case(1, splits=8, warps=4), ring_case(1, splits=1), ring_case(8, splits=1)]
    other += [
        page_case(1, 100 * 1024, **options)
        for options in ({"stages": 3}, {"cluster": 8, "parts": 3}, {"cluster": 1, "parts": 33}, {"blocks_per_core": 1})
    ]
    several = [ring_case(1, tokens=4), page_case(1, 8 * 1024, tokens=4), page_case(4, 8 * 1024, tokens=8)]
    return window + full + several + other
