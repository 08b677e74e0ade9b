"""What every block of the decode attention kernels does, whatever its share of the keys: it norms and rotates its own
query heads from the raw qkv row while the first keys are on their way, puts the row's own k and v into the unit and the
cache, joins its warps' results and finishes heads."""

from __future__ import annotations

import dataclasses

from pallas_kernels import emit
from pallas_kernels.qk_norm_rope_write import warp as heads
from pallas_kernels.sink_attention import tile

LOG2E = 1.4426950408889634
OWN = 2 * tile.ROW  # k and v of the row's own token
PART = (tile.WIDTH + 4) * 4  # bytes of one head's result: outputs, maximum, sum, padding
SMALL = ("index", "qkv", "q_norm", "k_norm", "sinks", "slots", "start")


@dataclasses.dataclass(frozen=True)
class Spec:
    """What all kernels have to know. layers of the cache are counted apart from those of the model.

    fresh: the row's own token is not in the cache yet; the kernel writes it.
    """

    rows: int
    kv_heads: int
    slots: int
    eps: float
    positions: int  # rows of the RoPE table; 0 without
    warps: int
    stages: int
    fresh: bool

    @property
    def scale(self) -> float:
        return tile.WIDTH**-0.5 * LOG2E

    @property
    def heads(self) -> int:
        return self.kv_heads * tile.HEADS

    @property
    def names(self) -> tuple[str, ...]:
        """Operands in front of the cache."""
        return SMALL + (("rope",) if self.positions else ())

    @property
    def jobs(self) -> int:
        """Query heads of a warp."""
        return tile.HEADS // self.warps if self.warps < tile.HEADS else 1

    @property
    def qkv_bytes(self) -> int:
        return (self.heads + 2 * self.kv_heads) * heads.BYTES


class Named:
    """Operands by name."""

    def __init__(self, names, addresses):
        for name, address in zip(names, addresses, strict=True):
            setattr(self, name, address)


class Row:
    """Addresses and registers of one (row, kv head)."""

    def __init__(self, spec: Spec, lane, ops, model_layer, row, head, position):
        self.spec, self.lane = spec, lane
        self.row, self.head, self.position = row, head, position
        raw = ops.qkv.index(row, spec.qkv_bytes)
        first = head * tile.HEADS
        self.q = [
            heads.load_head(lane, raw.index(first + (lane.warp + spec.warps * j) % tile.HEADS, heads.BYTES))
            for j in range(spec.jobs)
        ]
        self.q_norm = heads.load_head(lane, ops.q_norm.index(model_layer, heads.BYTES))
        if spec.fresh:
            self.k = heads.load_head(lane, raw.index(head + spec.heads, heads.BYTES))
            self.v = emit.load(raw.index(head + (spec.heads + spec.kv_heads), heads.BYTES) + lane.lane * 8, 2)
            self.k_norm = heads.load_head(lane, ops.k_norm.index(model_layer, heads.BYTES))
        self.rotation = None
        if spec.positions:
            self.rotation = heads.load_rotation(lane, ops.rope, position.minimum(spec.positions - 1))

    def stage(self, queries: emit.Address, own: emit.Address, owner) -> None:
        """Norm and rotate: query heads to ``queries``; k and v to ``own`` where the predicate ``owner`` holds."""
        lane, eps = self.lane, self.spec.eps
        for j, x in enumerate(self.q):
            words = heads.norm_rotate(lane, x, self.q_norm, eps, self.rotation)
            target = lane.warp + self.spec.warps * j
            with emit.when(target < tile.HEADS):
                emit.store(queries + (target * tile.Q_ROW + lane.lane * 8), *words)
        if not self.spec.fresh:
            return
        words = heads.norm_rotate(lane, self.k, self.k_norm, eps, self.rotation)
        with emit.when(emit.both(owner, lane.warp.equals(0))):
            emit.store(own + lane.lane * 8, *words)
            emit.store(own + lane.lane * 8, *self.v, offset=tile.ROW)


def insert_own(places, stage, unit, position, own, k: emit.Address, v: emit.Address) -> None:
    """In the warp that holds the row's own position: put k and v into the unit and into the cache."""
    lane = places.lane
    with emit.when(unit.equals(position >> 4)):
        row = position & 15
        piece = tile.insert_row(places, stage, row, own)
        offset = row * tile.ROW + (lane.lane & 15) * 16
        with emit.when(lane.lane < 16):
            emit.store(k + offset, *piece)
        with emit.when(lane.lane >= 16):
            emit.store(v + offset, *piece)
        emit.warp_barrier()


def store_out(spec: Spec, ops, lane, model_layer, row, head, merged: tile.Merged) -> None:
    """Finish one query head (counted over all kv heads) and store it."""
    sink = emit.load_float(ops.sinks.index(model_layer * spec.heads + head, 4))[0]
    at = ops.out.index(row * spec.heads + head, heads.BYTES) + lane.lane * 8
    emit.store(at, *tile.finish(merged, sink, spec.scale))


def saturating(a: emit.Int, b: emit.Int) -> emit.Int:
    """max(a - b, 0)."""
    return a.maximum(b) - b


def store_zeros(spec: Spec, ops, lane, row, head) -> None:
    """The outputs of one kv head of a row that is not there; by one warp."""
    for j in range(tile.HEADS):
        at = ops.out.index(row * spec.heads + head * tile.HEADS + j, heads.BYTES)
        emit.store(at + lane.lane * 8, emit.Int(0), emit.Int(0))


def join_warps(spec: Spec, lane, results: emit.Address, stride: int, head: emit.Int) -> tile.Merged:
    """One query head over the block's warps, whose results lie ``stride`` bytes apart."""
    parts = [tile.load_result(lane, results + w * stride, head) for w in range(spec.warps)]
    return tile.merge(parts, spec.scale)


# -- results that several blocks have of one (row, kv head) ----------------------------------------------------------

DEPTH = 8  # partial results that a warp requests at once


def store_partial(ops, lane, index, merged: tile.Merged) -> None:
    """One head's result to place ``index`` of global memory."""
    emit.store_float(ops.partial.index(index, tile.WIDTH * 4) + lane.lane * 16, *merged.out)
    with emit.when(lane.lane.equals(0)):
        emit.store_float(ops.extremes.index(index, 8), merged.top, merged.total)


def arrive(lane, counter: emit.Address, note: emit.Address, expected: emit.Int):
    """Predicate, for the whole block: it is the last of ``expected`` ones that arrive here with partial results.

    The last one sets the counter back, so it is zero before and after every launch. note: four bytes of shared memory.
    """
    emit.barrier()
    with emit.when(lane.thread.equals(0)):
        before = emit.atomic_add(counter, 1)
        with emit.when(before.equals(expected - 1)):
            emit.store(counter, emit.Int(0))
        emit.store(note, before)
    emit.barrier()
    return emit.load(note)[0].equals(expected - 1)


def join_partials(spec: Spec, ops, lane, place, count: emit.Int, depth: int = DEPTH) -> tile.Merged:
    """One head over ``count`` partial results, in their order whoever arrived last; place(i): where the i-th lies."""

    def part(i) -> tile.Merged:
        """The i-th; one that is not there counts nothing."""
        index, there = place(i.minimum(count - 1)), i < count
        top, total = emit.load_float(ops.extremes.index(index, 8), 2, kind=emit.COHERENT)
        at = ops.partial.index(index, tile.WIDTH * 4) + lane.lane * 16
        out = emit.load_float(at, 4, kind=emit.COHERENT)
        return tile.Merged(emit.select(there, top, tile.NOTHING), emit.select(there, total, 0.0), out)

    def some(i, carry):
        before = tile.Merged(carry[0], carry[1], carry[2:])
        after = tile.merge([before, *(part(i + j) for j in range(depth))], spec.scale)
        return [after.top, after.total, *after.out]

    empty = [emit.Float(tile.NOTHING), *[emit.Float(0.0)] * 5]
    top, total, *out = emit.loop(0, count, depth, empty, some)
    return tile.Merged(top, total, out)
