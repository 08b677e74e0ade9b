"""Numbers of tokens at which the routed experts are compiled, checked and timed: the model's widths."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.moe_gemm import reference
from pallas_kernels.moe_gemm.api import experts
from pallas_kernels.moe_gemm.routing import Groups, group, product_order
from pallas_kernels.testing import Case, random_tiles

D, E, ACTIVE, F = 2048, 256, 6, 512


def by_reference(x, groups: Groups, up, down, layer):
    """``api.experts`` in plain jnp."""
    y = reference.down(reference.gate_up(x, groups, up, layer), groups, down, layer)
    return y[groups.place]


def case(tokens: int, nvfp4: bool, skewed: bool = False) -> Case:
    """Routed experts of one layer: gate and up, down, every token's rows. skewed: all tokens choose the same ones."""
    distinct = ACTIVE if skewed else E * (1 - (1 - ACTIVE / E) ** tokens)
    nbytes = int(distinct * 3 * F * D * (0.5625 if nvfp4 else 2) + tokens * D * 2 * (1 + 2 * ACTIVE))
    layers = 2

    def make(key):
        keys = jax.random.split(key, 4)
        x = product_order(jax.random.normal(keys[0], (tokens, D), jnp.bfloat16))
        scores = jax.random.uniform(keys[1], (1 if skewed else tokens, E))
        ids = jnp.broadcast_to(jax.lax.top_k(scores, ACTIVE)[1], (tokens, ACTIVE))
        tiles = functools.partial(random_tiles, nvfp4=nvfp4)
        up = tiles(keys[2], (layers, E), 2 * F, D, paired=True)
        return x, group(ids.astype(jnp.int32), E), up, tiles(keys[3], (layers, E), D, F)

    def call(function, layer, x, groups, up, down):
        return function(x, groups, up, down, layer)

    # Two roundings to bfloat16, one behind the other: 4.4e-3 was the worst of 24,576 rows (H200, BF16, 4,096 tokens).
    tolerance = 6e-3
    name = f"moe_gemm/experts m{tokens} {'nvfp4' if nvfp4 else 'bf16'}{' skewed' if skewed else ''}"
    run, expected = functools.partial(call, experts), functools.partial(call, by_reference)
    return Case(name, make, run, expected, layers, nbytes, tolerance, operations=6 * tokens * ACTIVE * D * F)


def cases() -> list[Case]:
    """From a short prompt to a large chunk."""
    return [
        *(case(tokens, True) for tokens in (64, 512, 2048, 4096, 8192)),
        case(1000, True, True),
        case(512, False),
        case(4096, False),
    ]
