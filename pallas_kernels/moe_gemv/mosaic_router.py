"""Residual addition, RMSNorm and router logits in one kernel.

A block owns two experts. All its threads read all tokens (the norm is recomputed per block: 8 KB a token from the L2
cache), each keeps its columns in registers from the addition to the product. Block t writes token t's residual and
normalised activations.

    thread: 8 columns of x + residual -> squares -> [barrier] -> bf16(s * rs * w) -> products with 2 rows -> [barrier]
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import emit
from pallas_kernels.dispatch import KernelUnsupported

WARPS = 8
ROWS = 2  # experts of a block: 128 blocks for 256 experts
PIECE = 8 * 32 * WARPS  # columns that the threads read with one 16-byte load each
BUTTERFLY = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about one kernel."""

    tokens: int
    columns: int
    experts: int
    add: bool
    eps: float
    sliced: bool  # the stacks hold one layer, and no index operand says which


@emit.cached
def build(spec: Spec):
    """Jitted ([index], x, norm weight, router, [residual]) -> [logits, normed, [residual]]."""
    if spec.columns % PIECE or spec.experts % ROWS:
        raise KernelUnsupported(f"{spec.experts} x {spec.columns} router: no multiple of {ROWS} x {PIECE}")
    if spec.tokens * spec.columns > 16 * PIECE:
        raise KernelUnsupported(f"{spec.tokens} tokens of {spec.columns} columns do not fit the registers")
    blocks = spec.experts // ROWS
    if spec.tokens > blocks:
        raise KernelUnsupported(f"{spec.tokens} tokens, {blocks} blocks to write them")
    pieces = spec.columns // PIECE
    row_bytes = spec.columns * 2

    def program(*addresses):
        index, x, norm, router, *rest = [None] * spec.sliced + list(addresses)
        if spec.add:
            residual, logits, normed_out, residual_out, squares, sums = rest
        else:
            logits, normed_out, squares, sums = rest
        lane, block = emit.Lane(), emit.block_index()
        layer, layer_of_norm = [emit.Int(0), emit.Int(0)] if spec.sliced else emit.load(index, 2)
        mine = lane.thread * 16

        def words_of(row, kind=emit.CACHED):
            return [word for p in range(pieces) for word in emit.load(row + mine, 4, offset=PIECE * 2 * p, kind=kind)]

        def floats(words):
            return [value for word in words for value in emit.bf16_pair(word)]

        first = layer * spec.experts + block * ROWS
        rows = [words_of(router.index(first + r, row_bytes), emit.STREAM) for r in range(ROWS)]
        scale = words_of(norm.index(layer_of_norm, row_bytes))
        totals = []
        for token in range(spec.tokens):
            values = floats(words_of(x + token * row_bytes))
            if spec.add:
                others = floats(words_of(residual + token * row_bytes))
                values = [a + b for a, b in zip(values, others, strict=True)]
            square = emit.Float(0.0)
            for value in values:
                square = emit.fma(value, value, square)
            square = emit.sum_lanes(square, BUTTERFLY)
            with emit.when(lane.lane.equals(0)):
                emit.store_float(squares + (lane.warp * 4 + token * WARPS * 4), square)
            totals.append(values)
        emit.barrier()
        scale, rows = floats(scale), [floats(row) for row in rows]
        for token, values in enumerate(totals):
            factor = emit.rsqrt(emit.fma(_sum_warps(squares, token), 1.0 / spec.columns, spec.eps))
            words = _pairs([value * factor * s for value, s in zip(values, scale, strict=True)])
            with emit.when(block.equals(token)):
                _store_row(normed_out + token * row_bytes + mine, words)
                if spec.add:
                    _store_row(residual_out + token * row_bytes + mine, _pairs(values))
            for r, row in enumerate(rows):
                product = emit.Float(0.0)
                for value, w in zip(floats(words), row, strict=True):
                    product = emit.fma(value, w, product)
                product = emit.sum_lanes(product, BUTTERFLY)
                with emit.when(lane.lane.equals(0)):
                    emit.store_float(sums + (lane.warp * 4 + (token * ROWS + r) * WARPS * 4), product)
        emit.barrier()
        with emit.when(lane.thread < spec.tokens * ROWS):
            token, r = lane.thread // ROWS, lane.thread % ROWS
            place = token * spec.experts + block * ROWS + r
            emit.store_bf16(logits + place * 2, _sum_warps(sums, lane.thread))

    row = jax.ShapeDtypeStruct((spec.tokens, spec.columns), jnp.bfloat16)
    logits = jax.ShapeDtypeStruct((spec.tokens, spec.experts), jnp.bfloat16)
    return emit.kernel(
        program,
        name="moe_router",
        out=[logits, row] + ([row] if spec.add else []),
        shared=[spec.tokens * WARPS * 4, spec.tokens * ROWS * WARPS * 4],
        grid=blocks,
        warps=WARPS,
    )


def _sum_warps(at: emit.Address, item: emit.Int | int) -> emit.Float:
    """The warps' parts of sum ``item``, added in order."""
    at = at + emit.as_int(item) * (WARPS * 4)
    parts = [part for w in range(0, WARPS, 4) for part in emit.load_float(at, 4, offset=4 * w)]
    return sum(parts[1:], parts[0])


def _pairs(values) -> list[emit.Int]:
    return [emit.to_bf16_pair(values[i], values[i + 1]) for i in range(0, len(values), 2)]


def _store_row(at: emit.Address, words) -> None:
    for p in range(0, len(words), 4):
        emit.store(at, *words[p : p + 4], offset=PIECE * 2 * (p // 4))
