"""A mixture-of-experts block for a few tokens: ``block``, or its two parts ``router`` and ``experts``.

On a GPU a block of one token is one kernel; the parts together are three.

Letters: B tokens, D model width, E experts, A active ones a token, F width of a routed expert, S of the shared expert,
L layers.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int32

from pallas_kernels import dispatch
from pallas_kernels.layout import Tiles
from pallas_kernels.moe_gemv import mosaic, mosaic_block, reference
from pallas_kernels.nvfp4_gemv.api import Norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experts:
    """Weights of all layers. gate_up: paired tiles [L, E, 2F, D]; down: tiles [L, E, D, F]; the shared expert's:
    paired tiles [L, 2S, D] and tiles [L, D, S]. Stacks may exceed 4 GiB."""

    gate_up: Tiles
    down: Tiles
    shared_gate_up: Tiles
    shared_down: Tiles


class RouterResult(NamedTuple):
    """logits: bfloat16 [B, E]. normed: the normalised activations, which the experts take. residual: bf16(x +
    residual) when the norm added one."""

    logits: BFloat16[Array, "B E"]
    normed: BFloat16[Array, "B D"]
    residual: BFloat16[Array, "B D"] | None


class ExpertsResult(NamedTuple):
    """out: bfloat16 [B, D], without the residual. ids: the selected experts, best first. weights: of each, rounded to
    bfloat16, in float32."""

    out: BFloat16[Array, "B D"]
    ids: Int32[Array, "B A"]
    weights: Float[Array, "B A"]


class BlockResult(NamedTuple):
    """out, ids, weights: as in ``ExpertsResult``. logits, residual: as in ``RouterResult``. exchange: the buffer, to be
    given to the next call."""

    out: BFloat16[Array, "B D"]
    residual: BFloat16[Array, "B D"] | None
    logits: BFloat16[Array, "B E"]
    ids: Int32[Array, "B A"]
    weights: Float[Array, "B A"]
    exchange: Int32[Array, " W"]


def new_exchange(columns: int, experts: int, active: int, width: int, shared_width: int) -> Int32[Array, " W"]:
    """The buffer through which the blocks of a ``block`` kernel send each other words, for a model with ``active`` of
    ``experts`` experts of ``width`` columns a token.

    One serves any number of calls of any batch size, but only one after the other: each call takes it (donate it, or
    it is copied) and gives it back.
    """
    return jnp.zeros((mosaic_block.exchange_words(columns, experts, active, width, shared_width),), jnp.int32)


def block(
    x: BFloat16[Array, "B D"],
    router_weight: BFloat16[Array, "L E D"],
    norm: Norm,
    weights: Experts,
    layer: int | Int32[Array, ""],
    exchange: Int32[Array, " W"],
    *,
    active: int,
) -> BlockResult:
    """``router``, then ``experts`` with what it gives."""
    implementations = {"fused": mosaic.block, "apart": mosaic.block_apart, "reference": reference.block}
    arguments = (x, router_weight, norm, weights, layer, exchange)
    return dispatch.run("moe_gemv.block", implementations, *arguments, active=active)


def router(
    x: BFloat16[Array, "B D"], weight: BFloat16[Array, "L E D"], layer: int | Int32[Array, ""], norm: Norm
) -> RouterResult:
    """Add the residual, normalise, multiply with weight[layer]: float32 sums, rounded to bfloat16."""
    implementations = {"mosaic": mosaic.router, "reference": reference.router}
    return dispatch.run("moe_gemv.router", implementations, x, weight, layer, norm)


def experts(
    x: BFloat16[Array, "B D"],
    logits: BFloat16[Array, "B E"],
    weights: Experts,
    layer: int | Int32[Array, ""],
    *,
    active: int,
) -> ExpertsResult:
    """The ``active`` best experts of each token and the shared expert.

    Selection: largest logit first, equal logits by lowest index, +0 above -0. Weights: sigmoids over their sum + 1e-20,
    rounded. Routed: gate and up stay float32, bf16(gate * sigmoid(gate) * up), down rounded per expert, weighted sum in
    float32 in order of rank, rounded. Shared: gate and up rounded. out = bf16(routed + shared).
    """
    implementations = {"mosaic": mosaic.experts, "reference": reference.experts}
    return dispatch.run("moe_gemv.experts", implementations, x, logits, weights, layer, active=active)
