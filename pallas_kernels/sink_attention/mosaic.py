"""Decode attention for NVIDIA GPUs: one query token per row, 8 query heads per kv head, heads of 128 values.

Every block norms and rotates its own query heads from the raw qkv row while the first keys are on their way, so the
step needs no kernel for that. The block that owns the unit with the row's own position takes k and v from shared memory
and writes them to the cache; nobody else reads that unit, so no block waits for another one's write.

``window``: the blocks of a (row, kv head) form a cluster, share the window's units, and merge through each other's
shared memory. ``pages``: a fixed number of blocks, whatever the batch, shares all units of all rows evenly (each block
derives its range from the lengths it reads); partial results go to memory and ``_merge`` joins them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import device, emit, tuned
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.qk_norm_rope_write import warp as heads
from pallas_kernels.sink_attention import tile

LOG2E = 1.4426950408889634
MAX_ROWS = 256
OWN = 2 * tile.ROW  # k and v of the row's own token
MERGE_WARPS, MERGE_DEPTH = 8, 8  # partials that the merging kernel has in flight: their product


@dataclasses.dataclass(frozen=True)
class Spec:
    """What both kernels have to know. layers of the cache are counted apart from those of the model."""

    rows: int
    kv_heads: int
    slots: int
    eps: float
    positions: int  # rows of the RoPE table; 0 without
    warps: int
    stages: int

    @property
    def scale(self) -> float:
        return tile.WIDTH**-0.5 * LOG2E

    @property
    def heads(self) -> int:
        return self.kv_heads * tile.HEADS

    @property
    def qkv_bytes(self) -> int:
        return (self.heads + 2 * self.kv_heads) * heads.BYTES


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


@dataclasses.dataclass(frozen=True)
class Pages(Spec):
    """page: tokens in a page. pages: of a layer. width: entries of a block table. blocks: of the grid."""

    page: int
    pages: int
    width: int
    blocks: int


def _check(qkv, weights, cache, slots) -> int:
    rows, columns = qkv.shape
    kv_heads, width = cache.shape[2], cache.shape[4]
    if qkv.dtype != jnp.bfloat16 or cache.dtype != jnp.bfloat16 or weights.q_norm.dtype != jnp.bfloat16:
        raise KernelUnsupported(f"qkv of {qkv.dtype}, cache of {cache.dtype}, norms of {weights.q_norm.dtype}")
    if width != tile.WIDTH or columns != (tile.HEADS + 2) * kv_heads * width:
        raise KernelUnsupported(
            f"{columns} columns for {kv_heads} kv heads of {width}: need 8 query heads each, of 128"
        )
    if rows > MAX_ROWS:
        raise KernelUnsupported(f"{rows} rows; the kernel takes up to {MAX_ROWS}")
    if slots.shape != (rows,):
        raise ValueError(f"{rows} rows of qkv, slots of shape {slots.shape}")
    return kv_heads


def _check_block(warps: int, stages: int) -> None:
    if warps not in (4, 8):
        raise ValueError(f"{warps} warps: expected 4 or 8")
    room = 227 if device.current().capability[0] in (9, 10) else 99  # KB that one block may have
    need = warps * stages * tile.UNIT // 1024 + 8
    if need > room:
        raise KernelUnsupported(f"{need} KB of shared memory; the device has {room}")


def _small_operands(qkv, weights, layer, slots, start) -> list:
    index = emit.index_operand(layer, weights.layer)
    return [index, qkv, weights.q_norm, weights.k_norm, weights.sinks, slots, start]


# -- the part of a block that knows its row and kv head ------------------------------------------------------------


class Row:
    """Addresses and registers of one (row, kv head)."""

    def __init__(self, spec: Spec, lane, ops, model_layer, row, head, position):
        self.spec, self.lane = spec, lane
        self.row, self.head, self.position = row, head, position
        raw = ops.qkv.index(row, spec.qkv_bytes)
        self.jobs = tile.HEADS // spec.warps if spec.warps < tile.HEADS else 1
        first = head * tile.HEADS
        self.q = [
            heads.load_head(lane, raw.index(first + (lane.warp + spec.warps * j) % tile.HEADS, heads.BYTES))
            for j in range(self.jobs)
        ]
        self.k = heads.load_head(lane, raw.index(head + spec.heads, heads.BYTES))
        self.v = emit.load(raw.index(head + (spec.heads + spec.kv_heads), heads.BYTES) + lane.lane * 8, 2)
        self.q_norm = heads.load_head(lane, ops.q_norm.index(model_layer, heads.BYTES))
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
        words = heads.norm_rotate(lane, self.k, self.k_norm, eps, self.rotation)
        with emit.when(emit.both(owner, lane.warp.equals(0))):
            emit.store(own + lane.lane * 8, *words)
            emit.store(own + lane.lane * 8, *self.v, offset=tile.ROW)


def _insert_own(places, stage, unit, position, own, k: emit.Address, v: emit.Address) -> None:
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


def _store_out(spec: Spec, ops, lane, model_layer, row, head, merged: tile.Merged) -> None:
    """Finish one query head (counted over all kv heads) and store it."""
    sink = emit.load_float(ops.sinks.index(model_layer * spec.heads + head, 4))[0]
    at = ops.out.index(row * spec.heads + head, heads.BYTES) + lane.lane * 8
    emit.store(at, *tile.finish(merged, sink, spec.scale))


def _saturating(a: emit.Int, b: emit.Int) -> emit.Int:
    """max(a - b, 0)."""
    return a.maximum(b) - b


# -- window layers -------------------------------------------------------------------------------------------------


def window_splits(rows: int, kv_heads: int, cores: int) -> int:
    """Blocks of a cluster: as many as still run all at once, a power of two up to 8."""
    return next((s for s in (8, 4, 2) if s * rows * kv_heads <= cores), 1)


def window_rule(rows: int, kv_heads: int, cores: int, splits: int | None = None) -> dict[str, int]:
    """Options of ``attend_ring`` where nothing was measured; 8 warps while a block has a core to itself."""
    splits = splits or window_splits(rows, kv_heads, cores)
    return {"splits": splits, "warps": 8 if rows * kv_heads * splits <= cores else 4, "stages": 3}


def attend_ring(qkv, weights, k_ring, v_ring, layer, slots, start, *, window, splits=None, warps=None, stages=None):
    """See ``api.attend_ring``."""
    kv_heads = _check(qkv, weights, k_ring, slots)
    ring = k_ring.shape[3]
    rows, cores = qkv.shape[0], device.current().cores
    given = {"splits": splits, "warps": warps, "stages": stages}
    config = window_rule(rows, kv_heads, cores, splits) | {k: v for k, v in given.items() if v is not None}
    if all(value is None for value in given.values()):
        config = tuned.lookup("attend_ring", f"window{window} k{kv_heads} b{rows}", config)
    splits, warps, stages = config["splits"], config["warps"], config["stages"]
    if splits not in (1, 2, 4, 8):
        raise ValueError(f"{splits} splits: expected 1, 2, 4 or 8")
    spec = Window(
        rows=rows,
        kv_heads=kv_heads,
        slots=k_ring.shape[1],
        eps=weights.eps,
        positions=0 if weights.rope is None else weights.rope.shape[0],
        warps=warps,
        stages=stages,
        window=window,
        ring=ring,
        splits=splits,
    )
    _check_block(warps, min(spec.stages, spec.rounds))
    if ring % tile.KEYS or ring < spec.units * tile.KEYS:
        raise KernelUnsupported(f"a ring of {ring} places for a window of {window}")
    operands = _small_operands(qkv, weights, layer, slots, start)
    operands += [] if weights.rope is None else [weights.rope]
    return tuple(_window(spec)(*operands, k_ring, v_ring))


class _Named:
    """Operands by name."""

    def __init__(self, names, addresses):
        for name, address in zip(names, addresses, strict=True):
            setattr(self, name, address)


SMALL = ("index", "qkv", "q_norm", "k_norm", "sinks", "slots", "start")


@emit.cached
def _window(spec: Window):
    stages = min(spec.stages, spec.rounds)
    own_heads = tile.HEADS // spec.splits  # query heads that a block of the cluster finishes
    part_bytes = (tile.WIDTH + 4) * 4  # of one head: outputs, maximum, sum, padding
    names = (*SMALL, *(("rope",) if spec.positions else ()), "k", "v", "out", "units", "queries", "own", "parts")

    def program(*addresses):
        ops = _Named(names, addresses)
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
            for j in range(tile.HEADS):
                at = ops.out.index(row * spec.heads + head * tile.HEADS + j, heads.BYTES)
                emit.store(at + lane.lane * 8, emit.Int(0), emit.Int(0))

    def body(ops, lane, rank, row, head, layer, model_layer, slot, position):
        here = Row(spec, lane, ops, model_layer, row, head, position)
        places = tile.Places(lane)
        oldest = _saturating(position, emit.Int(spec.window - 1))
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
            return unit, k_base + offset, v_base + offset, _saturating(oldest, unit * 16), _saturating(there, unit * 16)

        def ask(r: int) -> None:
            unit, k, v, first, stop = unit_of(r)
            own_unit = unit.equals(last_unit)
            stop = emit.select(own_unit, position & 15, stop)
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
            _insert_own(places, stage, unit, position, ops.own, k, v)
            running = tile.absorb(places, running, stage, queries, first, stop, spec.scale)
            if r + stages < spec.rounds:
                emit.warp_barrier()
                ask(r + stages)
                emit.copies_commit()
        emit.warp_barrier()
        tile.store_result(lane, running, mine)
        emit.barrier()
        for j in range(max(1, tile.HEADS // spec.warps)):
            mine_head = lane.warp + spec.warps * j
            parts = [
                tile.load_result(lane, ops.units + w * (stages * tile.UNIT), mine_head % tile.HEADS)
                for w in range(spec.warps)
            ]
            merged = tile.merge(parts, spec.scale)
            if spec.splits == 1:
                _store_out(spec, ops, lane, model_layer, row, head * tile.HEADS + mine_head, merged)
                continue
            target = ops.parts + ((rank * own_heads + mine_head % own_heads) * part_bytes)
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
                at = ops.parts + (lane.warp * part_bytes + s * own_heads * part_bytes)
                top, total = emit.load_float(at, 2, offset=tile.WIDTH * 4)
                parts.append(tile.Merged(top, total, emit.load_float(at + lane.lane * 16, 4)))
            merged = tile.merge(parts, spec.scale)
            final = head * tile.HEADS + rank * own_heads + lane.warp
            _store_out(spec, ops, lane, model_layer, row, final, merged)

    return emit.kernel(
        program,
        name="attend_ring",
        out=[jax.ShapeDtypeStruct((spec.rows, spec.heads * tile.WIDTH), jnp.bfloat16)],
        shared=[
            spec.warps * stages * tile.UNIT,
            tile.HEADS * tile.Q_ROW,
            OWN,
            16 if spec.splits == 1 else tile.HEADS * part_bytes,
        ],
        grid=spec.rows * spec.kv_heads * spec.splits,
        warps=spec.warps,
        in_place=2,
        cluster=spec.splits,
    )


# -- full layers ---------------------------------------------------------------------------------------------------


PAGES_RULE = {"warps": 8, "stages": 3, "blocks_per_core": 1}


def attend_pages(qkv, weights, k_pages, v_pages, layer, tables, slots, start, **options):
    """See ``api.attend_pages``. options: of ``PAGES_RULE``, instead of what was measured."""
    kv_heads = _check(qkv, weights, k_pages, slots)
    config = PAGES_RULE | options if options else tuned.lookup("attend_pages", f"k{kv_heads} b{len(qkv)}", PAGES_RULE)
    warps, stages, blocks_per_core = (config[name] for name in PAGES_RULE)
    page = k_pages.shape[3]
    if page % tile.KEYS or page & (page - 1):
        raise KernelUnsupported(f"pages of {page} tokens")
    if stages < 2:
        raise ValueError(f"{stages} stages: expected 2 or more")
    _check_block(warps, stages)
    spec = Pages(
        rows=qkv.shape[0],
        kv_heads=kv_heads,
        slots=tables.shape[0],
        eps=weights.eps,
        positions=0 if weights.rope is None else weights.rope.shape[0],
        warps=warps,
        stages=stages,
        page=page,
        pages=k_pages.shape[1],
        width=tables.shape[1],
        blocks=device.current().cores * blocks_per_core,
    )
    operands = _small_operands(qkv, weights, layer, slots, start)
    operands += [] if weights.rope is None else [weights.rope]
    partial, extremes, k_pages, v_pages = _pages(spec)(*operands, tables, k_pages, v_pages)
    index = operands[0]
    (out,) = _merge(spec)(index, weights.sinks, slots, start, partial, extremes)
    return out, k_pages, v_pages


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
def _pages(spec: Pages):
    names = (*SMALL, *(("rope",) if spec.positions else ()), "tables", "k", "v", "partial", "extremes")
    names += ("units", "queries", "own", "lengths")
    per_page = spec.page // tile.KEYS
    page_bytes = spec.page * tile.ROW

    def program(*addresses):
        ops = _Named(names, addresses)
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
                    segment(row, head, units, _saturating(begin, base), until.minimum(base + units) - base)
                    return []

                emit.loop(first, last + 1, 1, [], one_head)
            return [end]

        def segment(row, head, units, first, stop):
            """Units first <= u < stop of one (row, kv head)."""
            (slot,) = emit.load(ops.slots + row * 4)
            (position,) = emit.load(ops.start + row * 4)
            here = Row(spec, lane, ops, model_layer, row, head, position)
            places = tile.Places(lane)
            table = ops.tables.index(slot, spec.width * 4)
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
                rows = emit.select(unit < stop, _saturating(position, unit * 16), 0)
                k, v = where(unit, page)
                tile.request(places, mine + slot_in_ring * tile.UNIT, k, v, emit.Int(0), rows)

            pages = [page_of(r) for r in range(spec.stages)]
            for r in range(spec.stages - 1):
                ask(r, pages[r], emit.Int(r))
                emit.copies_commit()
            here.stage(ops.queries, ops.own, stop.equals(units))
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
                with emit.when(emit.both(unit.equals(position >> 4), unit < stop)):
                    own_page = page_of(r)
                    _insert_own(places, stage, unit, position, ops.own, *where(unit, own_page))
                rows = emit.select(unit < stop, _saturating(position + 1, unit * 16), 0)
                state = tile.absorb(places, tile.Running.of(flat), stage, queries, emit.Int(0), rows, spec.scale)
                following = emit.select(stage_now.equals(spec.stages - 1), 0, stage_now + 1)
                return [following, stage_now, page_after, *state.flat()]

            initial = [emit.Int(0), emit.Int(spec.stages - 1), pages[-1], *tile.Running.empty().flat()]
            _, _, _, *flat = emit.loop(0, rounds, 1, initial, one_unit)
            emit.copies_wait(0)
            emit.warp_barrier()
            tile.store_result(lane, tile.Running.of(flat), mine)
            emit.barrier()
            place = block + (row * spec.kv_heads + head)
            for j in range(max(1, tile.HEADS // spec.warps)):
                mine_head = (lane.warp + spec.warps * j) % tile.HEADS
                parts = [
                    tile.load_result(lane, ops.units + w * (spec.stages * tile.UNIT), mine_head)
                    for w in range(spec.warps)
                ]
                merged = tile.merge(parts, spec.scale)
                index = place * tile.HEADS + mine_head
                emit.store_float(ops.partial.index(index, tile.WIDTH * 4) + lane.lane * 16, *merged.out)
                with emit.when(lane.lane.equals(0)):
                    emit.store_float(ops.extremes.index(index, 8), merged.top, merged.total)
            emit.barrier()  # the next segment overwrites what other warps still read

        if spec.rows == 1:
            one_row(emit.Int(0), [emit.Int(0)])
        else:
            emit.loop(0, spec.rows, 1, [emit.Int(0)], one_row)

    partials = (spec.blocks + spec.rows * spec.kv_heads, tile.HEADS)
    return emit.kernel(
        program,
        name="attend_pages",
        out=[
            jax.ShapeDtypeStruct((*partials, tile.WIDTH), jnp.float32),
            jax.ShapeDtypeStruct((*partials, 2), jnp.float32),
        ],
        shared=[spec.warps * spec.stages * tile.UNIT, tile.HEADS * tile.Q_ROW, OWN, -(-spec.rows // 4) * 16],
        grid=spec.blocks,
        warps=spec.warps,
        in_place=2,
    )


@emit.cached
def _merge(spec: Pages):
    """Joins the partial results of ``_pages``: one block per query head and row."""
    names = ("index", "sinks", "slots", "start", "partial", "extremes", "out", "results")
    part_bytes = (tile.WIDTH + 4) * 4

    def program(*addresses):
        ops = _Named(names, addresses)
        lane, block = emit.Lane(), emit.block_index()
        row, query = block // spec.heads, block % spec.heads
        head, column = query // tile.HEADS, query % tile.HEADS
        _, model_layer = emit.load(ops.index, 2)
        work = _Work(spec, lane, ops)
        units = work.sum_where(lambda r: r.equals(row))
        begin = work.sum_where(lambda r: r < row) * spec.kv_heads + head * units
        real = units >= 1
        first = begin // work.share
        count = emit.select(real, (begin + units - 1) // work.share - first + 1, 0)
        pair = row * spec.kv_heads + head

        def part(i) -> tile.Merged:
            """The i-th partial result; one that is not there counts nothing."""
            place = first + pair + i.minimum(count - 1)
            index = place * tile.HEADS + column
            top, total = emit.load_float(ops.extremes.index(index, 8), 2)
            out = emit.load_float(ops.partial.index(index, tile.WIDTH * 4) + lane.lane * 16, 4)
            there = i < count
            return tile.Merged(emit.select(there, top, tile.NOTHING), emit.select(there, total, 0.0), out)

        def some(i, carry):
            before = tile.Merged(carry[0], carry[1], carry[2:])
            parts = [part(i + lane.warp + MERGE_WARPS * j) for j in range(MERGE_DEPTH)]
            after = tile.merge([before, *parts], spec.scale)
            return [after.top, after.total, *after.out]

        empty = [emit.Float(tile.NOTHING), *[emit.Float(0.0)] * 5]
        top, total, *out = emit.loop(0, count, MERGE_WARPS * MERGE_DEPTH, empty, some)
        at = ops.results + lane.warp * part_bytes
        emit.store_float(at + lane.lane * 16, *out)
        with emit.when(lane.lane.equals(0)):
            emit.store_float(at, top, total, offset=tile.WIDTH * 4)
        emit.barrier()
        with emit.when(lane.warp.equals(0)):
            parts = []
            for w in range(MERGE_WARPS):
                at = ops.results + w * part_bytes
                extremes = emit.load_float(at, 2, offset=tile.WIDTH * 4)
                parts.append(tile.Merged(*extremes, emit.load_float(at + lane.lane * 16, 4)))
            merged = tile.merge(parts, spec.scale)
            with emit.when(real):
                _store_out(spec, ops, lane, model_layer, row, query, merged)
            with emit.when(emit.negate(real)):
                at = ops.out.index(row * spec.heads + query, heads.BYTES)
                emit.store(at + lane.lane * 8, emit.Int(0), emit.Int(0))

    return emit.kernel(
        program,
        name="merge_attention",
        out=[jax.ShapeDtypeStruct((spec.rows, spec.heads * tile.WIDTH), jnp.bfloat16)],
        shared=[MERGE_WARPS * part_bytes],
        grid=spec.rows * spec.heads,
        warps=MERGE_WARPS,
    )
