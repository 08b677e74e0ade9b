"""Full layers, one row: each kv head has ``parts`` clusters of blocks, and each block a run of its units.

A cluster joins its blocks' results through shared memory, each block finishing some of the 8 query heads. While all
units fit into one cluster that is all; beyond, clusters leave partial results in memory, and the last block to arrive
at a head joins them. At 100,000 tokens that is one small read by each of several blocks; with results of single blocks
it would be 140 KB through one core.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import emit
from pallas_kernels.sink_attention import tile
from pallas_kernels.sink_attention.block import (
    DEPTH,
    OWN,
    PART,
    Named,
    arrive,
    join_partials,
    join_warps,
    store_out,
    store_partial,
    store_zeros,
)
from pallas_kernels.sink_attention.pages import Paged, scan


@dataclasses.dataclass(frozen=True)
class Spans(Paged):
    """cluster: blocks that run together. parts: clusters of a (row, kv head)."""

    cluster: int
    parts: int


@emit.cached
def kernel(spec: Spans):
    """(operands ``spec.names``, tables, arrivals, k, v) -> [out, partial results and their extremes, what was written
    in place]."""
    names = (
        (*spec.names, "tables", "arrivals", "k", "v") if spec.fresh else (*spec.names, "tables", "k", "v", "arrivals")
    )
    names += ("out", "partial", "extremes", "units", "queries", "own", "from_cluster", "note")
    stride = spec.stages * tile.UNIT
    own_heads = tile.HEADS // spec.cluster  # query heads that a block finishes

    def program(*addresses):
        ops = Named(names, addresses)
        lane, block = emit.Lane(), emit.block_index()
        rank, group = block % spec.cluster, block // spec.cluster
        part, pair = group % spec.parts, group // spec.parts
        row, head = pair // spec.kv_heads, pair % spec.kv_heads
        layer, model_layer = emit.load(ops.index, 2)
        (slot,) = emit.load(ops.slots + row * 4)
        (position,) = emit.load(ops.start + row * 4)
        real = slot < spec.slots
        units = (position >> 4) + 1
        share = ((units + (spec.parts * spec.cluster - 1)) // (spec.parts * spec.cluster)).maximum(spec.warps)
        with emit.when(emit.both(real, part * spec.cluster * share < units)):
            first = ((part * spec.cluster + rank) * share).minimum(units)
            stop = (first + share).minimum(units)
            scan(spec, ops, lane, layer, model_layer, row, head, slot, position, first, stop)
            finish(ops, lane, rank, part, row, head, model_layer, units, share * spec.cluster)
        first_block = emit.both(part.equals(0), rank.equals(0))
        with emit.when(emit.both(emit.negate(real), emit.both(first_block, lane.warp.equals(0)))):
            store_zeros(spec, ops, lane, row, head)

    def finish(ops, lane, rank, part, row, head, model_layer, units, of_cluster):
        for j in range(spec.jobs):
            mine = lane.warp + spec.warps * j
            merged = join_warps(spec, lane, ops.units, stride, mine % tile.HEADS)
            target, to = ops.from_cluster + ((rank * own_heads + mine % own_heads) * PART), mine // own_heads
            emit.store_remote(target + lane.lane * 16, to, *[x.bits() for x in merged.out])
            with emit.when(lane.lane.equals(0)):
                emit.store_remote(target + tile.WIDTH * 4, to, merged.top.bits(), merged.total.bits())
        emit.cluster_barrier()
        pair = row * spec.kv_heads + head
        turns = range(max(1, own_heads // spec.warps))
        mine = [lane.warp + spec.warps * j for j in turns]  # of the heads that the block finishes
        busy = lane.warp < own_heads
        alone = of_cluster >= units

        def place(j: int, i):
            return (pair * spec.parts + i) * tile.HEADS + rank * own_heads + mine[j]

        def done(j: int, merged) -> None:
            store_out(spec, ops, lane, model_layer, row, head * tile.HEADS + rank * own_heads + mine[j], merged)

        with emit.when(busy):
            for j in turns:
                parts = []
                for source in range(spec.cluster):
                    at = ops.from_cluster + (mine[j] * PART + source * own_heads * PART)
                    top, total = emit.load_float(at, 2, offset=tile.WIDTH * 4)
                    parts.append(tile.Merged(top, total, emit.load_float(at + lane.lane * 16, 4)))
                merged = tile.merge(parts, spec.scale)
                with emit.when(alone):
                    done(j, merged)
                if spec.parts > 1:
                    with emit.when(emit.negate(alone)):
                        store_partial(ops, lane, place(j, part), merged)
        if spec.parts > 1:
            with emit.when(emit.negate(alone)):
                used = (units + (of_cluster - 1)) // of_cluster  # clusters that had something to do
                last = arrive(lane, ops.arrivals.index(pair * spec.cluster + rank, 4), ops.note, used)
                with emit.when(emit.both(last, busy)):
                    for j in turns:
                        at = functools.partial(place, j)
                        done(j, join_partials(spec, ops, lane, at, used, min(2 * DEPTH, spec.parts)))

    pairs = spec.rows * spec.kv_heads
    return emit.kernel(
        program,
        name="attend_spans",
        out=[
            jax.ShapeDtypeStruct((spec.rows, spec.heads * tile.WIDTH), jnp.bfloat16),
            jax.ShapeDtypeStruct((pairs * spec.parts, tile.HEADS, tile.WIDTH), jnp.float32),
            jax.ShapeDtypeStruct((pairs * spec.parts, tile.HEADS, 2), jnp.float32),
        ],
        shared=[spec.warps * stride, tile.HEADS * tile.Q_ROW, OWN, tile.HEADS * PART, 16],
        grid=pairs * spec.parts * spec.cluster,
        warps=spec.warps,
        in_place=3 if spec.fresh else 1,
        cluster=spec.cluster,
    )
