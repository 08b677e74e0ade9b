"""The forward pass of a decode step as few kernels: the function and the serving roundings of ``model.Flint``.

The module tree says what Flint is; this file says in which launches one token of each row is computed on a GPU: four a
layer with one row, six with more. A residual sum and its norm are recomputed in front of the product that needs them,
so they are no launch of their own; q/k norm, RoPE and the cache write happen inside attention. Works on weights in
tile order (see ``tiles``) and falls back, op by op, to plain jnp where a kernel does not take the shape.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float, Int

from flint_jax.cache import KVCache
from flint_jax.config import FULL, FlintConfig
from flint_jax.model import Flint
from flint_jax.weights import shapes
from pallas_kernels.layout import Tiles
from pallas_kernels.moe_gemv import api as moe_gemv
from pallas_kernels.nvfp4_gemv.api import Norm, gemv
from pallas_kernels.sink_attention import api as sink_attention


class Step(NamedTuple):
    """logits: float32 [B, V]. tile_max: the largest logit of each 16. cache: with the rows' tokens written. exchange:
    for the next step."""

    logits: Float[Array, "B V"]
    tile_max: Float[Array, "B V16"] | None
    cache: KVCache
    exchange: Int[Array, " W"]


def supported(model: Flint) -> bool:
    """Whether all matrices are in the kernels' order (``tiles.tile_weights`` made them so). One that adapters were put
    on, or that research replaced by a plain one, is not: such a model decodes through its modules."""
    return all(
        isinstance(model.stacks[name].get_value(), Tiles)
        for name, spec in shapes(model.config).items()
        if spec.is_matrix and name in model.stacks
    )


def new_exchange(config: FlintConfig) -> Int[Array, " W"]:
    """The buffer that the blocks of some kernels meet in (49 KB); one for all steps of all batch sizes."""
    return moe_gemv.new_exchange(
        config.hidden_size,
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.shared_expert_intermediate_size,
    )


def forward(
    model: Flint,
    cache: KVCache,
    exchange: Int[Array, " W"],
    tables: Int[Array, "S W"],
    tokens: Int[Array, " B"],
    slots: Int[Array, " B"],
    start: Int[Array, " B"],
    live: Bool[Array, " B"],
) -> Step:
    """One token of each row: embedding, all layers, head. Rows that are not live write nothing.

    exchange: from ``new_exchange`` or the step before.
    """
    config: FlintConfig = model.config
    w = {name: param.get_value() for name, param in model.stacks.items()}
    rope = model.rope.get_value()
    eps = config.rms_norm_eps
    slots = jnp.where(live, slots, -1)  # out of range: reads and writes nothing
    branch: BFloat16[Array, "B D"] = w["embed"][tokens]
    residual = None
    dense = sorted(config.mlp_only_layers)
    arrivals = sink_attention.new_arrivals(tokens.shape[0], config.num_key_value_heads)

    def norm(name: str, layer: int) -> Norm:
        return Norm(w[name], layer, residual, eps)

    for layer, kind in enumerate(config.layer_types):
        qkv = gemv(branch, w["qkv"], layer, norm=norm("attn_norm", layer))
        residual = branch if residual is None else qkv.residual
        heads = sink_attention.Weights(
            w["q_norm"], w["k_norm"], w["sinks"], layer, rope if config.rope_layers[layer] else None, eps
        )
        if kind == FULL:
            i = config.full_layers.index(layer)
            pages = cache.k_pages, cache.v_pages
            out = sink_attention.attend_pages(qkv.out, heads, *pages, i, tables, slots, start, arrivals=arrivals)
            arrivals = out.arrivals
            cache = dataclasses.replace(cache, k_pages=out.k, v_pages=out.v)
        else:
            i = config.sliding_layers.index(layer)
            out = sink_attention.attend_ring(
                qkv.out, heads, cache.k_ring, cache.v_ring, i, slots, start, window=config.sliding_window
            )
            cache = dataclasses.replace(cache, k_ring=out.k, v_ring=out.v)
        branch = gemv(out.out, w["o"], layer).out
        if layer in config.mlp_only_layers:
            i = dense.index(layer)
            act = gemv(branch, w["dense_gate_up"], i, norm=norm("mlp_norm", layer), epilogue="swiglu")
            residual = act.residual
            branch = gemv(act.out, w["dense_down"], i).out
        else:
            i = config.moe_layers.index(layer)
            experts = moe_gemv.Experts(w["expert_gate_up"], w["expert_down"], w["shared_gate_up"], w["shared_down"])
            moe = moe_gemv.block(
                branch, w["router"], norm("mlp_norm", layer), experts, i, exchange, active=config.num_experts_per_tok
            )
            branch, residual, exchange = moe.out, moe.residual, moe.exchange
    head = jax.tree.map(lambda a: a[None], w["head"])
    final = Norm(w["final_norm"][None], 0, residual, eps)
    logits = gemv(branch, head, 0, norm=final, epilogue="logits")
    return Step(logits.out, logits.tile_max, cache, exchange)
