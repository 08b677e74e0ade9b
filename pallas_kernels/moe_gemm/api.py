"""Routed experts for many tokens: two grouped products on the tensor cores.

Letters: M tokens, A experts a token, E experts, D model width, F expert width, L layers, P rows of the tiles.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, BFloat16, Int32

from pallas_kernels import dispatch
from pallas_kernels.layout import Tiles
from pallas_kernels.moe_gemm import mosaic, reference
from pallas_kernels.moe_gemm.routing import Groups


def gate_up(
    x: BFloat16[Array, "M D"], groups: Groups, weight: Tiles, layer: int | Int32[Array, ""]
) -> BFloat16[Array, "P F"]:
    """bf16(silu(gate) * up) of each real row of the tiles; gate and up stay float32. What other rows hold is undefined.

    x: in ``product_order``; so is the result. weight: paired tiles [L, E, 2F, D].
    Cost: 4 * rows * F * D operations and each used expert's weights once a tile.
    """
    implementations = {"mosaic": mosaic.gate_up, "reference": reference.gate_up}
    return dispatch.run("moe_gemm.gate_up", implementations, x, groups, weight, layer)


def down(
    act: BFloat16[Array, "P F"], groups: Groups, weight: Tiles, layer: int | Int32[Array, ""]
) -> BFloat16[Array, "P D"]:
    """bf16(down(act)) of each real row. act: as ``gate_up`` gives it; the result is in natural order. weight: tiles
    [L, E, D, F]."""
    implementations = {"mosaic": mosaic.down, "reference": reference.down}
    return dispatch.run("moe_gemm.down", implementations, act, groups, weight, layer)


def experts(x: jax.Array, groups: Groups, gate_up_weight: Tiles, down_weight: Tiles, layer) -> BFloat16[Array, "M A D"]:
    """Every token's experts' outputs, in order of rank. x: in ``product_order``."""
    y = down(gate_up(x, groups, gate_up_weight, layer), groups, down_weight, layer)
    return y.at[groups.place].get(mode="promise_in_bounds")
