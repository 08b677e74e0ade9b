"""Lengths at which attention of many tokens is compiled, checked and timed: the model's heads."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention import reference
from pallas_kernels.flash_attention.api import attend_pages, attend_ring
from pallas_kernels.flash_attention.pieces import TILE, Pieces
from pallas_kernels.testing import Case

K, H, N, PAGE, RING, WINDOW = 4, 128, 32, 64, 576, 513
LAYERS = 2


def _pieces(lengths: tuple[tuple[int, int], ...]) -> Pieces:
    """(start, count) of each, one after the other."""
    place, at = [], 0
    for _, count in lengths:
        place.append(at)
        at += -(-count // TILE) * TILE
    columns = place, range(len(lengths)), *zip(*lengths, strict=True)
    return Pieces(*(jnp.asarray(list(column), jnp.int32) for column in columns))


def pairs(lengths, window: int | None = None) -> int:
    """Of a token and a key that it sees."""
    total = 0
    for start, count in lengths:
        for position in range(start, start + count):
            total += position + 1 if window is None else min(position + 1, window)
    return total


def case(name: str, lengths: tuple[tuple[int, int], ...], window: int | None = None) -> Case:
    """Attention of one layer; queries and keys of unit rows."""
    places = sum(-(-count // TILE) * TILE for _, count in lengths)
    longest = max(start + count for start, count in lengths)
    width = -(-longest // PAGE)
    slots = len(lengths)

    def make(key):
        keys = jax.random.split(key, 5)
        qkv = jax.random.normal(keys[0], (places, (N + 2 * K) * H), jnp.bfloat16)
        sinks = jax.random.normal(keys[1], (LAYERS, N), jnp.float32)
        shape = (LAYERS, slots * width, K, PAGE, H) if window is None else (LAYERS, slots, K, RING, H)
        k, v = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys[2:4])
        tables = jax.random.permutation(keys[4], slots * width).astype(jnp.int32).reshape(slots, width)
        return qkv, _pieces(lengths).tiles(places), sinks, k, v, tables

    def call(functions, layer, qkv, tiles, sinks, k, v, tables):
        if window is None:
            return functions[0](qkv, tiles, sinks, layer, k, v, layer, tables)
        return functions[1](qkv, tiles, sinks, layer, k, v, layer, window=window)

    operations = 4 * N * H * pairs(lengths, window)
    nbytes = places * (2 * N + 2 * K) * H * 2 + sum(start + count for start, count in lengths) * 2 * K * H * 2
    ours, plain = (attend_pages, attend_ring), (reference.attend_pages, reference.attend_ring)
    run, expected = (functools.partial(call, functions) for functions in (ours, plain))
    return Case(f"flash_attention/{name}", make, run, expected, LAYERS, nbytes, operations=operations)


def cases() -> list[Case]:
    """Prompts from their beginning, far behind one, and several at once."""
    several = ((0, 100), (5000, 1), (777, 300), (64, 64))
    return [
        case("pages 8192 from 0", ((0, 8192),)),
        case("pages 2048 from 100000", ((100_000, 2048),)),
        case("pages several", several),
        case("ring 8192 from 0", ((0, 8192),), WINDOW),
        case("ring 2048 from 100000", ((100_000, 2048),), WINDOW),
        case("ring several", several, WINDOW),
    ]
