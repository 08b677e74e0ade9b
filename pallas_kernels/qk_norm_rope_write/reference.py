"""Plain jnp: split qkv into normed and rotated heads; write k and v of one token per row into either cache."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.add_rms_norm.reference import round_bf16


def norm_heads(x: BFloat16[Array, "B N H"], weight: BFloat16[Array, " H"], eps: float) -> Float32[Array, "B N H"]:
    """RMSNorm of each head, rounded to bfloat16 precision."""
    x = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps))
    return round_bf16(x * scale * weight.astype(jnp.float32))


def rotate(x: Float32[Array, "B N H"], table: Float32[Array, "B H"]) -> Float32[Array, "B N H"]:
    """RoPE over the two halves of each head, rounded once. table: cos | sin of each row's position."""
    cos, sin = (half[:, None, :] for half in jnp.split(table, 2, axis=-1))
    a, b = jnp.split(x, 2, axis=-1)
    return round_bf16(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))


def split_qkv(
    qkv: BFloat16[Array, "B C"],
    q_norm: BFloat16[Array, " H"],
    k_norm: BFloat16[Array, " H"],
    positions: Int32[Array, " B"],
    rope: Float32[Array, "P H"] | None,
    *,
    kv_heads: int,
    eps: float,
) -> tuple[BFloat16[Array, "B N H"], BFloat16[Array, "B K H"], BFloat16[Array, "B K H"]]:
    """q, k, v of one token per row; q and k normed and, with a table, rotated."""
    heads = qkv.reshape(qkv.shape[0], -1, q_norm.shape[0])
    q, k, v = jnp.split(heads, [heads.shape[1] - 2 * kv_heads, heads.shape[1] - kv_heads], axis=1)
    q, k = norm_heads(q, q_norm, eps), norm_heads(k, k_norm, eps)
    if rope is not None:
        table = rope.at[positions].get(mode="clip")
        q, k = rotate(q, table), rotate(k, table)
    return q.astype(qkv.dtype), k.astype(qkv.dtype), v


def write_ring(ring, layer, slots, positions, x):
    """ring [L,S,K,R,H] with x [B,K,H] at place ``position % R`` of each row's slot; slots out of range are dropped."""
    slots = jnp.where(slots < 0, ring.shape[1], slots)  # negative indices would count from the end
    return ring.at[layer, slots, :, positions % ring.shape[3]].set(x, mode="drop")


def write_pages(pages, layer, tables, slots, positions, x):
    """pages [L,P,K,PAGE,H] with x [B,K,H] at each row's position, by the block tables; otherwise as ``write_ring``."""
    size = pages.shape[3]
    entry = jnp.minimum(positions // size, tables.shape[1] - 1)
    page = tables.at[slots, entry].get(mode="clip")
    page = jnp.where((slots >= 0) & (slots < tables.shape[0]), page, pages.shape[1])
    return pages.at[layer, page, :, positions % size].set(x, mode="drop")
