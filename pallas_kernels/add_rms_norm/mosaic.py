"""Add + RMSNorm: one block per token, eight warps that split the columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import emit
from pallas_kernels.dispatch import KernelUnsupported

WARPS = 8


def add_rms_norm(x, weight, layer, *, residual=None, eps):
    """See ``api.add_rms_norm``."""
    tokens, columns = x.shape
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        raise KernelUnsupported(f"activations of {x.dtype}, weights of {weight.dtype}")
    if columns % (WARPS * 128):
        raise KernelUnsupported(f"{columns} columns are no multiple of {WARPS * 128}")
    (weight,), sliced = emit.slice_layer(layer, weight)
    operands = ([] if sliced else [emit.index_operand(layer)]) + [x, weight] + ([] if residual is None else [residual])
    normed, total = _kernel(tokens, columns, residual is not None, eps, sliced)(*operands)
    return normed, (x if residual is None else total)


@emit.cached
def _kernel(tokens: int, columns: int, add: bool, eps: float, sliced: bool):
    pieces = columns // (WARPS * 128)  # 8-byte pieces of a row per lane
    stride = WARPS * 256

    def program(*addresses):
        index, x, weight, *rest = [None] * sliced + list(addresses)
        *residual, normed_out, total_out, sums = rest
        lane, token = emit.Lane(), emit.block_index()

        def row(start):
            return start.index(token, columns * 2) + lane.thread * 8

        def values_at(at):
            words = [word for i in range(pieces) for word in emit.load(at, 2, offset=stride * i)]
            return [value for word in words for value in emit.bf16_pair(word)]

        layer = emit.Int(0) if sliced else emit.load(index)[0]
        values = values_at(row(x))
        if add:
            values = [a + b for a, b in zip(values, values_at(row(residual[0])), strict=True)]
        scale = values_at(weight.index(layer, columns * 2) + lane.thread * 8)
        square = emit.Float(0.0)
        for value in values:
            square = emit.fma(value, value, square)
        square = emit.sum_lanes(square, (1, 2, 4, 8, 16))
        with emit.when(lane.lane.equals(0)):
            emit.store_float(sums + lane.warp * 4, square)
        emit.barrier()
        parts = [emit.load_float(sums, offset=4 * w)[0] for w in range(WARPS)]
        factor = emit.rsqrt(emit.fma(sum(parts[1:], parts[0]), 1.0 / columns, eps))
        normed = [value * factor * s for value, s in zip(values, scale, strict=True)]
        for target, result in ((normed_out, normed), (total_out, values)):
            for i in range(pieces):
                quad = result[4 * i : 4 * i + 4]
                words = emit.to_bf16_pair(*quad[:2]), emit.to_bf16_pair(*quad[2:])
                emit.store(row(target), *words, offset=stride * i)

    out = jax.ShapeDtypeStruct((tokens, columns), jnp.bfloat16)
    return emit.kernel(program, name="add_rms_norm", out=[out, out], shared=[4 * WARPS], grid=tokens, warps=WARPS)
