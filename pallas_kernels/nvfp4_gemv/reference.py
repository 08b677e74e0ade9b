"""The GEMV in plain jnp: dequantise, multiply, scale, round where the kernels round."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.add_rms_norm.reference import add_rms_norm, round_bf16
from pallas_kernels.layout import ROWS


def gemv(x, weight, layer, *, norm=None, epilogue="none", normed_out=False):
    """See ``api.gemv``."""
    from pallas_kernels.nvfp4_gemv.api import Result

    residual = normed = None
    if norm is not None:
        x, residual = add_rms_norm(x, norm.weight, norm.layer, residual=norm.residual, eps=norm.eps)
        normed = x
    matrix = weight[layer]
    product = scaled_product(x, matrix)
    tile_max = None
    if epilogue == "logits":
        out = product
        tile_max = product.reshape(*product.shape[:-1], -1, ROWS).max(-1)
    elif epilogue == "swiglu":
        out = swiglu(product)
    else:
        out = round_bf16(product).astype(jnp.bfloat16)
    keep_residual = norm is not None and norm.residual is not None
    return Result(out, tile_max, residual if keep_residual else None, normed if normed_out else None)


def scaled_product(x, matrix):
    """x [B, C] times matrix [R, C] -> float32 [B, R]: exact products, float32 sums, then the rows' global scales."""
    values = matrix.values(jnp.bfloat16)
    product = lax.dot_general(
        x.astype(jnp.bfloat16),
        values,
        (((x.ndim - 1,), (values.ndim - 1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return product * matrix.row_scale()


def swiglu(product: jax.Array) -> jax.Array:
    """Gate and up halves, each rounded, -> bf16(gate / (1 + exp(-gate)) * up)."""
    gate, up = jnp.split(round_bf16(product), 2, axis=-1)
    return round_bf16(gate / (1.0 + jnp.exp(-gate)) * up).astype(jnp.bfloat16)
