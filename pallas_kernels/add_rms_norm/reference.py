"""Residual addition and RMSNorm in plain jnp."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def round_bf16(x):
    """float32 values rounded to bfloat16 precision; unlike a pair of casts, XLA may not drop it."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def add_rms_norm(x, weight, layer, *, residual=None, eps):
    """See ``api.add_rms_norm``."""
    total = x.astype(jnp.float32)
    if residual is not None:
        total = total + residual.astype(jnp.float32)
    mean = jnp.mean(total * total, axis=-1, keepdims=True)
    normed = total * lax.rsqrt(mean + jnp.float32(eps)) * weight[layer].astype(jnp.float32)
    return round_bf16(normed).astype(jnp.bfloat16), round_bf16(total).astype(jnp.bfloat16)
