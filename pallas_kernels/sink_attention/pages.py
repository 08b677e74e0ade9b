"""Full layers, several rows: a fixed number of blocks, whatever the batch, shares all units of all rows evenly (each
block derives its range from the lengths it reads). Of the blocks that meet a (row, kv head), the last one joins their
results."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import emit
from pallas_kernels.sink_attention import tile
from pallas_kernels.sink_attention.block import (
    OWN,
    Named,
    Row,
    Spec,
    arrive,
    insert_own,
    join_partials,
    join_warps,
    saturating,
    store_out,
    store_partial,
    store_zeros,
)


@dataclasses.dataclass(frozen=True)
class Paged(Spec):
    """page: tokens in a page. pages: of a layer. width: entries of a block table."""

    page: int
    pages: int
    width: int


@dataclasses.dataclass(frozen=True)
class Pages(Paged):
    """blocks: of the grid."""

    blocks: int


def scan(spec: Paged, ops, lane, layer, model_layer, row, head, slot, position, first, stop) -> None:
    """Units first <= u < stop of one (row, kv head), shared out over the block's warps; each leaves its result where
    its units were (``join_warps``). The block is in step before and after."""
    per_page, page_bytes = spec.page // tile.KEYS, spec.page * tile.ROW
    here = Row(spec, lane, ops, model_layer, row, head, position)
    places = tile.Places(lane)
    table = ops.tables.index(slot, spec.width * 4)
    to_read = position + (0 if spec.fresh else 1)
    mine = ops.units + lane.warp * (spec.stages * tile.UNIT)
    rounds = (stop - first + (spec.warps - 1)) // spec.warps

    def unit_of(r):
        return first + lane.warp + emit.as_int(r) * spec.warps

    def page_of(r) -> emit.Int:
        entry = (unit_of(r) // per_page).minimum(spec.width - 1)
        return emit.load(table.index(entry, 4))[0]

    def where(unit, page):
        page = (layer * spec.pages + page.minimum(spec.pages - 1)) * spec.kv_heads + head
        offset = unit % per_page * tile.HALF
        return ops.k.index(page, page_bytes) + offset, ops.v.index(page, page_bytes) + offset

    def ask(r, page, slot_in_ring) -> None:
        unit = unit_of(r)
        rows = emit.select(unit < stop, saturating(to_read, unit * 16), 0)
        k, v = where(unit, page)
        tile.request(places, mine + slot_in_ring * tile.UNIT, k, v, emit.Int(0), rows)

    pages = [page_of(r) for r in range(spec.stages)]
    for r in range(spec.stages - 1):
        ask(r, pages[r], emit.Int(r))
        emit.copies_commit()
    here.stage(ops.queries, ops.own, stop.equals((position >> 4) + 1))
    emit.barrier()
    queries = tile.load_queries(lane, ops.queries)

    def one_unit(r, carry):
        stage_now, stage_next, page_next, *flat = carry
        emit.copies_wait(spec.stages - 2)
        emit.warp_barrier()
        ask(r + (spec.stages - 1), page_next, stage_next)
        emit.copies_commit()
        page_after = page_of(r + spec.stages)
        unit, stage = unit_of(r), mine + stage_now * tile.UNIT
        if spec.fresh:
            with emit.when(emit.both(unit.equals(position >> 4), unit < stop)):
                insert_own(places, stage, unit, position, ops.own, *where(unit, page_of(r)))
        rows = emit.select(unit < stop, saturating(position + 1, unit * 16), 0)
        state = tile.absorb(places, tile.Running.of(flat), stage, queries, emit.Int(0), rows, spec.scale)
        following = emit.select(stage_now.equals(spec.stages - 1), 0, stage_now + 1)
        return [following, stage_now, page_after, *state.flat()]

    initial = [emit.Int(0), emit.Int(spec.stages - 1), pages[-1], *tile.Running.empty().flat()]
    _, _, _, *flat = emit.loop(0, rounds, 1, initial, one_unit)
    emit.copies_wait(0)
    emit.warp_barrier()
    tile.store_result(lane, tile.Running.of(flat), mine)
    emit.barrier()


class _Work:
    """How units are shared out. Units are numbered through rows, then kv heads, then positions; block b has those from
    b * share on. A block and a (row, kv head) that meet leave a partial result in slot block + pair: both numbers only
    grow along the units, and one of them does at each meeting, so slots are distinct."""

    def __init__(self, spec: Pages, lane, ops):
        self.spec, self.lane = spec, lane
        self.units = []  # the lane's rows lane, lane + 32, ...
        for start in range(0, spec.rows, 32):
            row = (lane.lane + start).minimum(spec.rows - 1)
            (slot,) = emit.load(ops.slots + row * 4)
            (position,) = emit.load(ops.start + row * 4)
            units = emit.select(slot < spec.slots, (position >> 4) + 1, 0)
            self.units.append(emit.select(lane.lane + start < spec.rows, units, 0))
        self.total = self.sum_where(lambda _: None) * spec.kv_heads
        even = (self.total + (spec.blocks - 1)) // spec.blocks
        self.share = even.maximum(spec.warps)  # at least a unit per warp

    def sum_where(self, predicate) -> emit.Int:
        """Units (of one kv head) of the rows for which ``predicate(row)`` holds."""
        total = emit.Int(0)
        for i, units in enumerate(self.units):
            chosen = predicate(self.lane.lane + 32 * i)
            total = total + (units if chosen is None else emit.select(chosen, units, 0))
        return emit.warp_total(total)


@emit.cached
def kernel(spec: Pages):
    """(operands ``spec.names``, tables, arrivals, k, v) -> [out, partial results and their extremes, what was written
    in place]."""
    names = (
        (*spec.names, "tables", "arrivals", "k", "v") if spec.fresh else (*spec.names, "tables", "k", "v", "arrivals")
    )
    names += ("out", "partial", "extremes", "units", "queries", "own", "lengths", "note")
    stride = spec.stages * tile.UNIT

    def program(*addresses):
        ops = Named(names, addresses)
        lane, block = emit.Lane(), emit.block_index()
        layer, model_layer = emit.load(ops.index, 2)
        work = _Work(spec, lane, ops)
        low = (work.share * block).minimum(work.total)
        high = (low + work.share).minimum(work.total)
        with emit.when(lane.warp.equals(0)):
            for i, units in enumerate(work.units):
                row = lane.lane + 32 * i
                with emit.when(row < spec.rows):
                    emit.store(ops.lengths + row * 4, units)
        emit.barrier()

        def one_row(row, carry):
            (offset,) = carry
            (units,) = emit.load(ops.lengths + row * 4)
            end = offset + units * spec.kv_heads
            begin, until = low.maximum(offset), high.minimum(end)
            with emit.when(begin < until):
                per_head = units.maximum(1)
                first, last = (begin - offset) // per_head, (until - 1 - offset) // per_head

                def one_head(head, _):
                    base = offset + head * units
                    segment(row, head, base, units, saturating(begin, base), until.minimum(base + units) - base)
                    return []

                emit.loop(first, last + 1, 1, [], one_head)
            return [end]

        def segment(row, head, base, units, first, stop):
            """Units first <= u < stop of one (row, kv head), whose own ones are numbered from ``base`` on."""
            (slot,) = emit.load(ops.slots + row * 4)
            (position,) = emit.load(ops.start + row * 4)
            scan(spec, ops, lane, layer, model_layer, row, head, slot, position, first, stop)
            pair = row * spec.kv_heads + head
            heads = [(lane.warp + spec.warps * j) % tile.HEADS for j in range(spec.jobs)]
            merged = [join_warps(spec, lane, ops.units, stride, mine) for mine in heads]
            alone = emit.both(first.equals(0), stop.equals(units))
            with emit.when(alone):
                for mine, result in zip(heads, merged, strict=True):
                    store_out(spec, ops, lane, model_layer, row, head * tile.HEADS + mine, result)
            with emit.when(emit.negate(alone)):
                for mine, result in zip(heads, merged, strict=True):
                    store_partial(ops, lane, (block + pair) * tile.HEADS + mine, result)
                earliest = base // work.share
                count = (base + units - 1) // work.share - earliest + 1
                with emit.when(arrive(lane, ops.arrivals.index(pair, 4), ops.note, count)):
                    for mine in heads:
                        first_place = (earliest + pair) * tile.HEADS + mine
                        result = join_partials(spec, ops, lane, lambda i, at=first_place: at + i * tile.HEADS, count)
                        store_out(spec, ops, lane, model_layer, row, head * tile.HEADS + mine, result)
            emit.barrier()  # the next segment overwrites what other warps still read

        emit.loop(0, spec.rows, 1, [emit.Int(0)], one_row)

        def zeros(row, _):
            with emit.when(emit.load(ops.lengths + row * 4)[0].equals(0)):
                for start in range(0, spec.kv_heads, spec.warps):
                    with emit.when(lane.warp + start < spec.kv_heads):
                        store_zeros(spec, ops, lane, row, lane.warp + start)
            return []

        emit.loop(block, spec.rows, spec.blocks, [], zeros)

    partials = (spec.blocks + spec.rows * spec.kv_heads, tile.HEADS)
    return emit.kernel(
        program,
        name="attend_pages",
        out=[
            jax.ShapeDtypeStruct((spec.rows, spec.heads * tile.WIDTH), jnp.bfloat16),
            jax.ShapeDtypeStruct((*partials, tile.WIDTH), jnp.float32),
            jax.ShapeDtypeStruct((*partials, 2), jnp.float32),
        ],
        shared=[spec.warps * stride, tile.HEADS * tile.Q_ROW, OWN, -(-spec.rows // 4) * 16, 16],
        grid=spec.blocks,
        warps=spec.warps,
        in_place=3 if spec.fresh else 1,
    )
