"""Window layers: the blocks of a (row, kv head) form a cluster, share the window's units, and merge through each
other's shared memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import emit
from pallas_kernels.sink_attention import tile
from pallas_kernels.sink_attention.block import (
    OWN,
    PART,
    Named,
    Row,
    Spec,
    insert_own,
    join_warps,
    saturating,
    store_out,
    store_zeros,
)


@dataclasses.dataclass(frozen=True)
class Window(Spec):
    """window: keys a query sees, its own included. ring: places. splits: blocks of a cluster."""

    window: int
    ring: int
    splits: int

    @property
    def units(self) -> int:
        """Most units that a window can touch."""
        return (self.window - 2 + tile.KEYS) // tile.KEYS + 1

    @property
    def rounds(self) -> int:
        """Units of a warp."""
        return -(-self.units // (self.splits * self.warps))


@emit.cached
def kernel(spec: Window):
    stages = min(spec.stages, spec.rounds)
    own_heads = tile.HEADS // spec.splits  # query heads that a block of the cluster finishes
    names = (*spec.names, "k", "v", "out", "units", "queries", "own", "parts")

    def program(*addresses):
        ops = Named(names, addresses)
        lane, block = emit.Lane(), emit.block_index()
        rank, pair = block % spec.splits, block // spec.splits
        row, head = pair // spec.kv_heads, pair % spec.kv_heads
        layer, model_layer = emit.load(ops.index, 2)
        (slot,) = emit.load(ops.slots + row * 4)
        (position,) = emit.load(ops.start + row * 4)
        real = slot < spec.slots

        with emit.when(real):
            body(ops, lane, rank, row, head, layer, model_layer, slot, position)
        with emit.when(emit.both(emit.negate(real), emit.both(rank.equals(0), lane.warp.equals(0)))):
            store_zeros(spec, ops, lane, row, head)

    def body(ops, lane, rank, row, head, layer, model_layer, slot, position):
        here = Row(spec, lane, ops, model_layer, row, head, position)
        places = tile.Places(lane)
        oldest = saturating(position, emit.Int(spec.window - 1))
        first_unit, last_unit = oldest >> 4, position >> 4
        ring_bytes = spec.ring * tile.ROW
        base = (layer * spec.slots + slot) * spec.kv_heads + head
        k_base, v_base = ops.k.index(base, ring_bytes), ops.v.index(base, ring_bytes)
        mine = ops.units + lane.warp * (stages * tile.UNIT)

        def unit_of(r: int):
            """The warp's unit of round r: number, place in the ring, rows of the window in it."""
            unit = first_unit + rank + (lane.warp * spec.splits + spec.splits * spec.warps * r)
            offset = unit % (spec.ring // tile.KEYS) * tile.HALF
            there = emit.select(unit >= last_unit + 1, 0, position + 1)
            return unit, k_base + offset, v_base + offset, saturating(oldest, unit * 16), saturating(there, unit * 16)

        def ask(r: int) -> None:
            unit, k, v, first, stop = unit_of(r)
            if spec.fresh:
                stop = emit.select(unit.equals(last_unit), position & 15, stop)
            tile.request(places, mine + (r % stages) * tile.UNIT, k, v, first, stop)

        for r in range(min(stages, spec.rounds)):
            ask(r)
            emit.copies_commit()
        owner = ((last_unit - first_unit) % spec.splits).equals(rank)
        here.stage(ops.queries, ops.own, owner)
        emit.barrier()
        queries = tile.load_queries(lane, ops.queries)
        running = tile.Running.empty()
        for r in range(spec.rounds):
            asked = min(spec.rounds, r + stages)
            emit.copies_wait(asked - r - 1)
            emit.warp_barrier()
            stage = mine + (r % stages) * tile.UNIT
            unit, k, v, first, stop = unit_of(r)
            if spec.fresh:
                insert_own(places, stage, unit, position, ops.own, k, v)
            running = tile.absorb(places, running, stage, queries, first, stop, spec.scale)
            if r + stages < spec.rounds:
                emit.warp_barrier()
                ask(r + stages)
                emit.copies_commit()
        emit.warp_barrier()
        tile.store_result(lane, running, mine)
        emit.barrier()
        for j in range(spec.jobs):
            mine_head = lane.warp + spec.warps * j
            merged = join_warps(spec, lane, ops.units, stages * tile.UNIT, mine_head % tile.HEADS)
            if spec.splits == 1:
                store_out(spec, ops, lane, model_layer, row, head * tile.HEADS + mine_head, merged)
                continue
            target = ops.parts + ((rank * own_heads + mine_head % own_heads) * PART)
            to = mine_head // own_heads
            emit.store_remote(target + lane.lane * 16, to, *[x.bits() for x in merged.out])
            with emit.when(lane.lane.equals(0)):
                emit.store_remote(target + tile.WIDTH * 4, to, merged.top.bits(), merged.total.bits())
        if spec.splits == 1:
            return
        emit.cluster_barrier()
        with emit.when(lane.warp < own_heads):
            parts = []
            for s in range(spec.splits):
                at = ops.parts + (lane.warp * PART + s * own_heads * PART)
                top, total = emit.load_float(at, 2, offset=tile.WIDTH * 4)
                parts.append(tile.Merged(top, total, emit.load_float(at + lane.lane * 16, 4)))
            merged = tile.merge(parts, spec.scale)
            final = head * tile.HEADS + rank * own_heads + lane.warp
            store_out(spec, ops, lane, model_layer, row, final, merged)

    return emit.kernel(
        program,
        name="attend_ring",
        out=[jax.ShapeDtypeStruct((spec.rows, spec.heads * tile.WIDTH), jnp.bfloat16)],
        shared=[
            spec.warps * stages * tile.UNIT,
            tile.HEADS * tile.Q_ROW,
            OWN,
            16 if spec.splits == 1 else tile.HEADS * PART,
        ],
        grid=spec.rows * spec.kv_heads * spec.splits,
        warps=spec.warps,
        in_place=2 if spec.fresh else 0,
        cluster=spec.splits,
    )
