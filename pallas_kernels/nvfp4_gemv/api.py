"""A few tokens times a dense weight matrix, with what surrounds it in the model."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, BFloat16, Float, Int32

from pallas_kernels import dispatch
from pallas_kernels.layout import Tiles
from pallas_kernels.nvfp4_gemv import mosaic, reference

EPILOGUES = ("none", "swiglu", "logits")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """An RMSNorm in front of the product: weight[layer], over x + residual when a residual is given."""

    weight: BFloat16[Array, "L C"]
    layer: int | Int32[Array, ""]
    residual: BFloat16[Array, "B C"] | None = None
    eps: float = dataclasses.field(default=1e-6, metadata={"static": True})


class Result(NamedTuple):
    """out: bfloat16 [B, R], [B, R/2] for swiglu, or float32 logits. tile_max: with logits, the largest of each 16 rows.
    residual: bf16(x + residual) when the norm added one. normed: the activations that were multiplied, on request."""

    out: Float[Array, "B R"]
    tile_max: Float[Array, "B R16"] | None = None
    residual: BFloat16[Array, "B C"] | None = None
    normed: BFloat16[Array, "B C"] | None = None


def gemv(
    x: BFloat16[Array, "B C"],
    weight: Tiles,
    layer: int | Int32[Array, ""],
    *,
    norm: Norm | None = None,
    epilogue: str = "none",
    normed_out: bool = False,
) -> Result:
    """weight[layer] (a stack of [R, C] matrices) times each row of x.

    The products of weights and activations are exact, their sums float32 (in an order that depends on the kernel), and
    the global scale goes onto the sums. epilogue: "none" rounds to bfloat16; "swiglu" (paired tiles) rounds gate and
    up, then bf16(gate / (1 + exp(-gate)) * up); "logits" keeps float32.
    """
    if epilogue not in EPILOGUES:
        raise ValueError(f"epilogue {epilogue!r}: expected one of {EPILOGUES}")
    if normed_out and norm is None:
        raise ValueError("normed_out needs a norm")
    implementations = {"mosaic": mosaic.gemv, "reference": reference.gemv}
    return dispatch.run(
        "nvfp4_gemv", implementations, x, weight, layer, norm=norm, epilogue=epilogue, normed_out=normed_out
    )
