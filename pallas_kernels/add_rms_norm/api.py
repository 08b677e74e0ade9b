"""Residual addition and RMSNorm in one pass."""

from __future__ import annotations

from jaxtyping import Array, BFloat16, Int32

from pallas_kernels import dispatch
from pallas_kernels.add_rms_norm import mosaic, reference


def add_rms_norm(
    x: BFloat16[Array, "B D"],
    weight: BFloat16[Array, "L D"],
    layer: int | Int32[Array, ""],
    *,
    residual: BFloat16[Array, "B D"] | None = None,
    eps: float,
) -> tuple[BFloat16[Array, "B D"], BFloat16[Array, "B D"]]:
    """s = x + residual in float32 -> (bf16(s * rsqrt(mean(s^2) + eps) * weight[layer]), bf16(s)).

    The norm starts from the unrounded s and rounds once. Without ``residual`` s is x and the second result equals x.
    """
    implementations = {"mosaic": mosaic.add_rms_norm, "reference": reference.add_rms_norm}
    return dispatch.run("add_rms_norm", implementations, x, weight, layer, residual=residual, eps=eps)
