"""The mixture of experts in plain jnp: gathered, dequantised weights; rounds where the kernels round."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.add_rms_norm.reference import add_rms_norm, round_bf16
from pallas_kernels.nvfp4_gemv.reference import scaled_product, swiglu


def router(x, weight, layer, norm):
    """See ``api.router``."""
    from pallas_kernels.moe_gemv.api import RouterResult

    normed, total = add_rms_norm(x, norm.weight, norm.layer, residual=norm.residual, eps=norm.eps)
    logits = jnp.einsum(
        "bd,ed->be", normed, weight[layer], precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return RouterResult(round_bf16(logits).astype(jnp.bfloat16), normed, None if norm.residual is None else total)


def select(logits, active: int):
    """bfloat16 [B, E] -> (ids int32 [B, A], best first; weights float32 [B, A])."""
    bits = lax.bitcast_convert_type(logits.astype(jnp.bfloat16), jnp.int16).astype(jnp.int32)
    key = jnp.where(bits < 0, bits ^ 0x7FFF, bits)  # orders like the floats, with -0 below +0
    ids = lax.top_k(key, active)[1].astype(jnp.int32)
    score = jax.nn.sigmoid(jnp.take_along_axis(logits, ids, axis=-1).astype(jnp.float32))
    return ids, round_bf16(score / (jnp.sum(score, axis=-1, keepdims=True) + 1e-20))


def experts(x, logits, weights, layer, *, active):
    """See ``api.experts``."""
    from pallas_kernels.moe_gemv.api import ExpertsResult

    ids, mix = select(logits, active)
    gate, up = jnp.split(_products("bd,bard->bar", x, weights.gate_up[layer, ids]), 2, axis=-1)
    act = round_bf16(gate * jax.nn.sigmoid(gate) * up).astype(jnp.bfloat16)
    y = round_bf16(_products("bac,barc->bar", act, weights.down[layer, ids]))
    routed = jnp.zeros(x.shape, jnp.float32)
    for rank in range(active):
        routed = routed + mix[:, rank, None] * y[:, rank]
    shared = swiglu(scaled_product(x, weights.shared_gate_up[layer]))
    shared = round_bf16(scaled_product(shared, weights.shared_down[layer]))
    return ExpertsResult(round_bf16(round_bf16(routed) + shared).astype(jnp.bfloat16), ids, mix)


def block(x, router_weight, norm, weights, layer, exchange, *, active):
    """See ``api.block``."""
    from pallas_kernels.moe_gemv.api import BlockResult

    routed = router(x, router_weight, layer, norm)
    result = experts(routed.normed, routed.logits, weights, layer, active=active)
    return BlockResult(result.out, routed.residual, routed.logits, result.ids, result.weights, exchange)


def _products(equation: str, x, matrices):
    """One matrix per (token, rank): float32 sums times the rows' global scales."""
    product = jnp.einsum(
        equation,
        x,
        matrices.values(jnp.bfloat16),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return product * matrices.row_scale()
