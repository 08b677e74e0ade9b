"""Keys and values of many tokens into either cache, in place."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels import emit
from pallas_kernels.dispatch import KernelUnsupported

WARPS = 8
TOKENS = 16  # of a block


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about one kernel."""

    places: int
    units: int  # pages or slots of a layer
    kv_heads: int
    rows: int  # of a unit
    heads: int  # of a token's qkv
    width: int


def reference(qkv, destination, k, v, layer, after=None):
    """See ``api.write_cache``."""
    _, units, kv_heads, rows, width = k.shape
    heads = qkv.reshape(qkv.shape[0], -1, width)
    unit = jnp.where(destination >= 0, destination // rows, units)  # out of range: dropped
    place = jnp.where(destination >= 0, destination % rows, 0)
    return tuple(
        c.at[layer, unit, :, place].set(x, mode="drop")
        for c, x in ((k, heads[:, -2 * kv_heads : -kv_heads]), (v, heads[:, -kv_heads:]))
    )


def mosaic(qkv, destination, k, v, layer, after=None):
    """See ``api.write_cache``."""
    _, units, kv_heads, rows, width = k.shape
    lanes = 2 * kv_heads * width // 8
    if qkv.dtype != jnp.bfloat16 or (32 * WARPS) % lanes:
        raise KernelUnsupported(f"{qkv.dtype}, {kv_heads} kv heads of {width}")
    spec = Spec(qkv.shape[0], units, kv_heads, rows, qkv.shape[1] // width, width)
    extra = () if after is None else (after,)
    return tuple(kernel(spec, len(extra))(emit.index_operand(layer), destination, *extra, qkv, k, v))


@emit.cached
def kernel(spec: Spec, extra: int):
    """(index, destination, [something computed before], qkv, k, v) -> [k, v]."""
    lanes = 2 * spec.kv_heads * spec.width // 8  # that copy a token, 16 bytes each
    row = 2 * spec.width

    def program(index, destination, *rest):
        qkv, k, v = rest[extra:]
        lane = emit.Lane()
        (layer,) = emit.load(index)
        here, part = lane.thread // lanes, lane.thread % lanes
        of_head = spec.width // 8
        head, piece = part // of_head, (part % of_head) * 16
        is_value = head >= spec.kv_heads
        kv_head = emit.select(is_value, head - spec.kv_heads, head)
        at_once = 32 * WARPS // lanes
        for i in range(-(-TOKENS // at_once)):
            token = emit.block_index() * TOKENS + (here + i * at_once)
            with emit.when(emit.both(token < spec.places, (here + i * at_once) < TOKENS)):
                (to,) = emit.load(destination + token * 4)
                with emit.when(to < 1 << 31):  # -1 writes nothing
                    source = qkv.index(token, spec.heads * row) + (
                        (head + (spec.heads - 2 * spec.kv_heads)) * row + piece
                    )
                    data = emit.load(source, 4)
                    number = ((layer * spec.units + to // spec.rows) * spec.kv_heads + kv_head) * spec.rows
                    number = number + to % spec.rows
                    cache = emit.select(is_value, v, k)
                    emit.store(cache.index(number, row) + piece, *data)

    return emit.kernel(
        program, name="write_cache", out=[], shared=[], grid=-(-spec.places // TOKENS), warps=WARPS, in_place=2
    )
