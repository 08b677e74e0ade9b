"""The grouped products in plain jnp: a loop over tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Tiles
from pallas_kernels.moe_gemm.routing import Groups, natural_order, product_order


def _product(x, weight: Tiles):
    y = jnp.einsum("rc,fc->rf", x, weight.values(), preferred_element_type=jnp.float32)
    return y * weight.row_scale()


def gate_up(x, groups: Groups, weight: Tiles, layer):
    """See ``api.gate_up``."""
    x = natural_order(x)

    def one(args):
        expert, token = args
        gate, up = jnp.split(_product(x[token], weight[layer, expert]), 2, axis=-1)
        return (gate / (1 + jnp.exp(-gate)) * up).astype(jnp.bfloat16)

    act = jax.lax.map(one, (groups.expert, groups.token.reshape(-1, groups.rows)))
    return product_order(act.reshape(-1, act.shape[-1]))


def down(act, groups: Groups, weight: Tiles, layer):
    """See ``api.down``."""
    rows = natural_order(act).reshape(-1, groups.rows, act.shape[-1])
    # Rows that are nobody's may hold anything.
    real = jnp.arange(groups.rows)[None, :] < groups.count[:, None]
    rows = jnp.where(real[..., None], rows, jnp.bfloat16(0))
    y = jax.lax.map(lambda args: _product(args[1], weight[layer, args[0]]).astype(jnp.bfloat16), (groups.expert, rows))
    return y.reshape(-1, y.shape[-1])
