"""Writes the k and v of many tokens to the cache: one block a token, one warp a kv head. For several new tokens of a
request at once, which attention then reads like any others; a single token's is written by attention itself."""

from __future__ import annotations

import dataclasses

from pallas_kernels import emit
from pallas_kernels.qk_norm_rope_write import warp


@dataclasses.dataclass(frozen=True)
class Spec:
    """heads: of q. positions: rows of the RoPE table, 0 without. places: tokens in a ring or page. pages: of a layer,
    0 for rings. width: entries of a block table."""

    rows: int
    heads: int
    kv_heads: int
    slots: int
    eps: float
    positions: int
    places: int
    pages: int = 0
    width: int = 0


def write_ring(qkv, weights, k_ring, v_ring, layer, slots, start):
    """The cache with the rows' k and v, normed and rotated, at their positions; rows whose slot is out of range write
    nothing. qkv: bfloat16 [R, (N + 2 K) H]; slots, start: int32 [R], no position of a slot twice; see
    ``sink_attention.api`` for the rest. Donate the cache."""
    return _write(qkv, weights, k_ring, v_ring, layer, None, slots, start)


def write_pages(qkv, weights, k_pages, v_pages, layer, tables, slots, start):
    """As ``write_ring``, by the block tables int32 [S, W]."""
    return _write(qkv, weights, k_pages, v_pages, layer, tables, slots, start)


def _write(qkv, weights, k, v, layer, tables, slots, start):
    kv_heads = k.shape[2]
    spec = Spec(
        rows=qkv.shape[0],
        heads=qkv.shape[1] // warp.WIDTH - 2 * kv_heads,
        kv_heads=kv_heads,
        slots=k.shape[1] if tables is None else tables.shape[0],
        eps=weights.eps,
        positions=0 if weights.rope is None else weights.rope.shape[0],
        places=k.shape[3],
        pages=0 if tables is None else k.shape[1],
        width=0 if tables is None else tables.shape[1],
    )
    operands = [emit.index_operand(layer, weights.layer), qkv, weights.k_norm, slots, start]
    operands += [] if weights.rope is None else [weights.rope]
    operands += [] if tables is None else [tables]
    return tuple(_kernel(spec)(*operands, k, v))


@emit.cached
def _kernel(spec: Spec):
    names = ["index", "qkv", "k_norm", "slots", "start"]
    names += (["rope"] if spec.positions else []) + (["tables"] if spec.pages else []) + ["k", "v"]

    def program(*addresses):
        ops = dict(zip(names, addresses, strict=True))
        lane, row = emit.Lane(), emit.block_index()
        layer, model_layer = emit.load(ops["index"], 2)
        (slot,) = emit.load(ops["slots"] + row * 4)
        (position,) = emit.load(ops["start"] + row * 4)
        with emit.when(emit.both(slot < spec.slots, lane.warp < spec.kv_heads)):
            raw = ops["qkv"].index(row * (spec.heads + 2 * spec.kv_heads) + spec.heads + lane.warp, warp.BYTES)
            k = warp.load_head(lane, raw)
            v = emit.load(raw + (lane.lane * 8 + spec.kv_heads * warp.BYTES), 2)
            norm = warp.load_head(lane, ops["k_norm"].index(model_layer, warp.BYTES))
            rotation = None
            if spec.positions:
                rotation = warp.load_rotation(lane, ops["rope"], position.minimum(spec.positions - 1))
            if spec.pages:
                entry = (position // spec.places).minimum(spec.width - 1)
                (page,) = emit.load(ops["tables"].index(slot * spec.width + entry, 4))
                run = layer * spec.pages + page.minimum(spec.pages - 1)
            else:
                run = layer * spec.slots + slot
            place = (run * spec.kv_heads + lane.warp) * spec.places + position % spec.places
            words = warp.norm_rotate(lane, k, norm, spec.eps, rotation)
            emit.store(ops["k"].index(place, warp.BYTES) + lane.lane * 8, *words)
            emit.store(ops["v"].index(place, warp.BYTES) + lane.lane * 8, *v)

    warps = -(-spec.kv_heads // 4) * 4
    return emit.kernel(program, name="write_tokens", out=[], shared=[], grid=spec.rows, warps=warps, in_place=2)
