"""Batch sizes at which the mixture of experts is compiled, checked and timed: the model's widths."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.moe_gemv import reference
from pallas_kernels.moe_gemv.api import Experts, block, experts, new_exchange, router
from pallas_kernels.nvfp4_gemv.api import Norm
from pallas_kernels.testing import Case, random_tiles, rotation

D, E, ACTIVE, F, S, LAYERS = 2048, 256, 6, 512, 1024, 47


def expert_bytes(tokens: int, nvfp4: bool) -> int:
    """What a call has to move when the tokens choose at random: their distinct experts and the shared one, once."""
    distinct = E * (1 - (1 - ACTIVE / E) ** tokens)
    return int((distinct * F + S) * 3 * D * (0.5625 if nvfp4 else 2))


def random_experts(key, layers: int, nvfp4: bool) -> Experts:
    """Full-size weights of so many layers."""
    keys = jax.random.split(key, 4)
    tiles = functools.partial(random_tiles, nvfp4=nvfp4)
    return Experts(
        tiles(keys[0], (layers, E), 2 * F, D, paired=True),
        tiles(keys[1], (layers, E), D, F),
        tiles(keys[2], (layers,), 2 * S, D, paired=True),
        tiles(keys[3], (layers,), D, S),
    )


def router_case(tokens: int) -> Case:
    """Add, norm, logits."""

    def make(key):
        keys = jax.random.split(key, 4)
        x, residual = (jax.random.normal(k, (tokens, D), jnp.bfloat16) for k in keys[:2])
        weight = jax.random.normal(keys[2], (LAYERS, E, D), jnp.bfloat16)
        return x, residual, weight, jax.random.normal(keys[3], (LAYERS, D), jnp.bfloat16)

    def call(function, layer, x, residual, weight, norm):
        return function(x, weight, layer, Norm(norm, layer, residual))

    return Case(
        f"moe_gemv/router m{tokens}",
        make,
        functools.partial(call, router),
        functools.partial(call, reference.router),
        layers=LAYERS,
        nbytes=E * D * 2 + tokens * D * 8,
    )


def experts_case(tokens: int, nvfp4: bool) -> Case:
    """Selection, gate and up, down."""
    nbytes = expert_bytes(tokens, nvfp4)
    layers = rotation(nbytes)

    def make(key):
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (tokens, D), jnp.bfloat16)
        logits = jax.random.normal(keys[1], (tokens, E), jnp.bfloat16)
        return x, logits, random_experts(keys[2], layers, nvfp4)

    def call(function, layer, x, logits, weights):
        return function(x, logits, weights, layer, active=ACTIVE)

    return Case(
        f"moe_gemv/experts m{tokens} {'nvfp4' if nvfp4 else 'bf16'}",
        make,
        functools.partial(call, experts),
        functools.partial(call, reference.experts),
        layers=layers,
        nbytes=nbytes,
    )


def separated_router(key, layers: int):
    """(router weight, norm weight) for activations whose first column is 8: the largest logits are 4, 3.75, 3.5 and so
    on, far enough apart that rounding never chooses another expert."""
    keys = jax.random.split(key, 3)
    norm = jax.random.uniform(keys[0], (layers, D), jnp.bfloat16, 0.5, 1.5).at[:, 0].set(1)
    noise = jax.random.normal(keys[1], (layers, E, D), jnp.bfloat16) * jnp.bfloat16(0.01 * D**-0.5)
    rank = jax.vmap(lambda k: jax.random.permutation(k, E))(jax.random.split(keys[2], layers)).astype(jnp.float32)
    logits = jnp.where(rank < 16, 4 - rank / 4, -rank / 100)
    return noise.at[:, :, 0].set((logits / 5.6).astype(jnp.bfloat16)), norm  # 5.6: what the norm makes of 8


def block_case(tokens: int) -> Case:
    """Router and experts together: what a layer of the model pays."""
    nbytes = expert_bytes(tokens, True) + E * D * 2
    layers = rotation(nbytes)

    def make(key):
        keys = jax.random.split(key, 4)
        x, residual = (jax.random.normal(k, (tokens, D), jnp.bfloat16) for k in keys[:2])
        x, residual = x.at[:, 0].set(8), residual.at[:, 0].set(0)
        exchange = new_exchange(D, E, ACTIVE, F, S)
        return x, residual, *separated_router(keys[2], layers), random_experts(keys[3], layers, True), exchange

    def call(function, layer, x, residual, weight, norm, weights, exchange):
        result = function(x, weight, Norm(norm, layer, residual), weights, layer, exchange, active=ACTIVE)
        return result._replace(exchange=()), result.exchange

    return Case(
        f"moe_gemv/block m{tokens} nvfp4",
        make,
        functools.partial(call, block),
        functools.partial(call, reference.block),
        layers=layers,
        nbytes=nbytes,
        in_place=(5,),
        written=lambda layer, args, result: (),
    )


def cases() -> list[Case]:
    """Every batch size; the bfloat16 twins of two."""
    sizes = (1, 2, 4, 8, 16)
    return (
        [router_case(tokens) for tokens in sizes]
        + [experts_case(tokens, True) for tokens in sizes]
        + [block_case(tokens) for tokens in (1, 8)]
        + [experts_case(tokens, False) for tokens in (1, 8)]
    )
