"""Attention of many tokens for NVIDIA GPUs, on the tensor cores.

A block takes 16 tokens and the eight query heads of one kv head: 128 rows that share every key. Two groups of four
warps have 64 rows each; a lane has the rows of one head of two tokens. Keys and values come 64 positions at a time
through a ring in shared memory: one page of the cache, or a ninth of a window's ring, or tokens of the piece itself,
chosen row by row. q stays in registers as the A operand; so do the probabilities, which the scores' layout makes A
operands as they are. Blocks with the most keys come first.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import device, emit
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.flash_attention.pieces import TILE

WARPS = 8
THREADS = 32 * WARPS
KEYS = 64  # positions of a piece of the ring
WIDTH = 128
HEADS = 8  # query heads of a kv head
ROW_BYTES = 2 * WIDTH
HALF = KEYS * emit.ROW  # bytes of 64 positions x 64 dims
SLOT = 4 * HALF  # keys, then values
STAGES = 4
LOG2E = 1.4426950408889634
NOTHING = -1e30  # below every score, and finite


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about one kernel. rows: of a unit (a page or a ring); units: of a layer; entries: of a slot's
    block table, 0 for rings; window: 0 for all keys."""

    places: int
    kv_heads: int
    heads: int  # of a token's qkv
    units: int
    rows: int
    entries: int
    window: int
    wide: bool


def attend_pages(qkv, tiles, sinks, sinks_layer, k_pages, v_pages, layer, tables, *, window=None):
    """See ``api.attend_pages``."""
    spec = _spec(qkv, k_pages, tables.shape[1], window or 0)
    if spec.rows != KEYS:
        raise KernelUnsupported(f"pages of {spec.rows} tokens; the kernel takes {KEYS}")
    operands = (tiles, tables, qkv, sinks, k_pages, v_pages)
    return kernel(spec)(emit.index_operand(layer, sinks_layer), *operands)[0]


def attend_ring(qkv, tiles, sinks, sinks_layer, k_ring, v_ring, layer, *, window: int):
    """See ``api.attend_ring``."""
    spec = _spec(qkv, k_ring, 0, window)
    if spec.rows % KEYS:
        raise KernelUnsupported(f"rings of {spec.rows} places, no multiple of {KEYS}")
    if spec.rows < window - 1:
        raise ValueError(f"a window of {window} in rings of {spec.rows} places")
    return kernel(spec)(emit.index_operand(layer, sinks_layer), tiles, tiles, qkv, sinks, k_ring, v_ring)[0]


def _spec(qkv, cache, entries: int, window: int) -> Spec:
    _, units, kv_heads, rows, width = cache.shape
    heads = qkv.shape[1] // width
    if qkv.dtype != jnp.bfloat16 or cache.dtype != jnp.bfloat16 or width != WIDTH:
        raise KernelUnsupported(f"{qkv.dtype} heads of {width}; the kernel takes bfloat16 heads of {WIDTH}")
    if heads - 2 * kv_heads != HEADS * kv_heads:
        raise KernelUnsupported(f"{heads - 2 * kv_heads} query heads on {kv_heads}; the kernel takes {HEADS} for each")
    if qkv.shape[0] % TILE:
        raise KernelUnsupported(f"{qkv.shape[0]} places, no multiple of {TILE}")
    return Spec(qkv.shape[0], kv_heads, heads, units, rows, entries, window, device.current().capability[0] == 9)


@emit.cached
def kernel(spec: Spec):
    """(index, tiles, tables, qkv, sinks, k, v) -> [bfloat16 [places, query heads * width]]."""
    features = HEADS * spec.kv_heads * WIDTH

    def program(index, tiles, tables, qkv, sinks, k, v, out, ring):
        _Block(spec, index, tiles, tables, qkv, sinks, k, v, out, ring).run()

    return emit.kernel(
        program,
        name="flash_attention_pages" if spec.entries else "flash_attention_ring",
        out=[jax.ShapeDtypeStruct((spec.places, features), jnp.bfloat16)],
        shared=[STAGES * SLOT],
        grid=spec.places // TILE * spec.kv_heads,
        warps=WARPS,
    )


class _Block:
    """One block's work."""

    def __init__(self, spec: Spec, index, tiles, tables, qkv, sinks, k, v, out, ring):
        self.spec, self.lane = spec, emit.Lane()
        self.qkv, self.tables, self.k, self.v, self.out, self.ring = qkv, tables, k, v, out, ring
        lane = self.lane
        layer, sinks_layer = emit.load(index, 2)
        item = emit.Int(spec.places // TILE * spec.kv_heads - 1) - emit.block_index()
        self.tile, self.head = item // spec.kv_heads, item % spec.kv_heads
        self.slot, self.position, self.count, self.start = emit.load(tiles + self.tile * 32, 4)
        (self.place,) = emit.load(tiles + self.tile * 32, offset=16)
        self.end = self.position + self.count  # of the keys
        query_head = self.head * HEADS + lane.g
        heads = HEADS * spec.kv_heads
        (self.sink,) = emit.load_float(sinks + (sinks_layer * heads + query_head) * 4)
        self.unit = layer * spec.units
        self.group, warp = lane.warp >> 2, lane.warp & 3
        self.tokens = [self.group * 8 + warp * 2 + h for h in range(2)]  # of the lane's rows, in the tile
        self.at = [self.position + token for token in self.tokens]
        self.query_head = query_head
        # Copies: 16 lanes take a row of 256 bytes.
        self.row, piece = lane.thread >> 4, lane.thread & 15
        self.piece = piece * 16
        self.to = (piece >> 3) * HALF + self.row * emit.ROW + (((piece & 7) ^ (self.row & 7)) << 4)
        if spec.window:
            first = self.position + 1
            self.low = emit.select(first < spec.window, emit.Int(0), first - spec.window)
        else:
            self.low = emit.Int(0)

    def run(self) -> None:
        spec = self.spec
        first = self.low // KEYS
        stop = emit.select(self.count.equals(0), first, (self.end + (KEYS - 1)) // KEYS)
        queries = self.queries()
        for i in range(STAGES - 1):
            self.start_copies(first + i, stop, emit.Int(i))
            emit.copies_commit()
        state = [emit.Float(NOTHING)] * 2 + [emit.Float(0.0)] * (2 + WIDTH // 2)

        def step(masked: bool):
            def body(block, carry):
                slot, *state = carry
                emit.copies_wait(STAGES - 2)
                emit.async_fence()
                emit.barrier()
                target = slot + (STAGES - 1)
                target = emit.select(target < STAGES, target, target - STAGES)
                self.start_copies(block + (STAGES - 1), stop, target)
                emit.copies_commit()
                state = self.absorb(state, queries, self.ring + slot * SLOT, block, masked)
                slot = slot + 1
                return [emit.select(slot < STAGES, slot, emit.Int(0)), *state]

            return body

        carry = [emit.Int(0), *state]
        if not spec.window:
            whole = (self.position + 1) // KEYS  # every row sees all keys of the blocks before
            whole = whole.minimum(stop)
            carry = emit.loop(first, whole, 1, carry, step(False))
            first = whole
        carry = emit.loop(first, stop, 1, carry, step(True))
        self.deliver(carry[1:])

    def queries(self) -> list[list[emit.Int]]:
        """The A operands of eight products."""
        spec = self.spec
        rows = [
            self.qkv.index(self.tile * TILE + token, spec.heads * ROW_BYTES)
            + (self.query_head * ROW_BYTES + self.lane.q * 4)
            for token in self.tokens
        ]
        return [
            [emit.load(rows[h], offset=32 * s + 16 * c)[0] for c in range(2) for h in range(2)]
            for s in range(WIDTH // 16)
        ]

    def start_copies(self, block: emit.Int, stop: emit.Int, slot: emit.Int) -> None:
        """Request 64 positions into a slot of the ring; zeros where the request has no such key."""
        spec = self.spec
        with emit.when(block < stop):
            if spec.entries:
                (page,) = emit.load(self.tables + (self.slot * spec.entries + block) * 4)
                unit, inside = page.minimum(spec.units - 1), emit.Int(0)
            else:
                unit, inside = self.slot, (block % (spec.rows // KEYS)) * KEYS
            number = ((self.unit + unit) * spec.kv_heads + self.head) * spec.rows + inside
            at = self.ring + slot * SLOT + self.to
            for kv, cache in enumerate((self.k, self.v)):
                old = cache.index(number, ROW_BYTES) + self.piece
                for i in range(KEYS // 16):
                    row = self.row + 16 * i
                    position = block * KEYS + row
                    there = emit.both(position >= self.low, position < self.end)
                    source = old + row * ROW_BYTES
                    if not spec.entries:
                        fresh = position >= self.start
                        place = emit.select(fresh, self.place + position - self.start, emit.Int(0))
                        own = (spec.heads - (2 - kv) * spec.kv_heads + self.head) * ROW_BYTES + self.piece
                        new = self.qkv.index(place, spec.heads * ROW_BYTES) + own
                        source = emit.select(fresh, new, source)
                    emit.copy16(at + (2 * HALF * kv + 16 * emit.ROW * i), source, there)

    def absorb(self, state, queries, at: emit.Address, block: emit.Int, masked: bool):
        """Add 64 keys. state: maxima and sums (of this lane's keys) of both rows, then the outputs."""
        spec = self.spec
        scale = WIDTH**-0.5 * LOG2E
        top, sums, out = state[:2], state[2:4], state[4:]
        scores = [emit.Float(0.0)] * (KEYS // 2)
        for s in range(WIDTH // 16):
            keys = at + ((s // 4) * HALF + 32 * (s % 4))
            scores = emit.multiply_group(spec.wide, scores, queries[s], keys, columns=KEYS)
        scores = emit.group_wait(0, scores, wide=spec.wide)
        if masked:
            scores = self.mask(scores, block)
        best = []
        for h in range(2):
            most = top[h]
            for j in range(KEYS // 8):
                most = most.maximum(scores[4 * j + 2 * h]).maximum(scores[4 * j + 2 * h + 1])
            for distance in (1, 2):
                most = most.maximum(emit.shuffle_xor(most, distance))
            best.append(most)
        shrink = [emit.exp2((old - new) * scale) for old, new in zip(top, best, strict=True)]
        shift = [emit.Float(0.0) - new * scale for new in best]
        p = [emit.exp2(emit.fma(x, scale, shift[i % 4 // 2])) for i, x in enumerate(scores)]
        sums = [total * shrink[h] for h, total in enumerate(sums)]
        for i, x in enumerate(p):
            sums[i % 4 // 2] = sums[i % 4 // 2] + x
        out = [x * shrink[i % 4 // 2] for i, x in enumerate(out)]
        for s in range(KEYS // 16):
            operand = [
                emit.to_bf16_pair(*p[4 * j + 2 * h : 4 * j + 2 * h + 2]) for j in (2 * s, 2 * s + 1) for h in range(2)
            ]
            values = at + (2 * HALF + 16 * emit.ROW * s)
            out = emit.multiply_group(spec.wide, out, operand, values, columns=WIDTH, leading=HALF)
        out = emit.group_wait(0, out, wide=spec.wide)
        return [*best, *sums, *out]

    def mask(self, scores, block: emit.Int):
        """-inf for keys that a row does not see."""
        base = block * KEYS + self.lane.q * 2
        limits = []
        for h in range(2):
            above = self.at[h] + 1
            high = emit.select(base < above, above - base, emit.Int(0))
            low = emit.Int(0)
            if self.spec.window:
                begin = emit.select(above < self.spec.window, emit.Int(0), above - self.spec.window)
                low = emit.select(base < begin, begin - base, emit.Int(0))
            limits.append((low, high))
        masked = []
        for i, x in enumerate(scores):
            low, high = limits[i % 4 // 2]
            place = emit.Int(8 * (i // 4) + i % 2)
            seen = place < high
            if self.spec.window:
                seen = emit.both(seen, place >= low)
            masked.append(emit.select(seen, x, float("-inf")))
        return masked

    def deliver(self, state) -> None:
        """Add the sink, divide, round, store."""
        scale = WIDTH**-0.5 * LOG2E
        top, sums, out = state[:2], state[2:4], state[4:]
        for h in range(2):
            total = emit.sum_lanes(sums[h], (1, 2))
            extra = emit.exp2(emit.fma(self.sink, LOG2E, emit.Float(0.0) - top[h] * scale))
            inverse = emit.divide(1.0, total + extra)
            there = self.tokens[h] < self.count
            at = self.out.index(self.tile * TILE + self.tokens[h], HEADS * self.spec.kv_heads * ROW_BYTES)
            at = at + (self.query_head * ROW_BYTES + self.lane.q * 4)
            for j in range(WIDTH // 8):
                pair = emit.to_bf16_pair(*(x * inverse for x in out[4 * j + 2 * h : 4 * j + 2 * h + 2]))
                emit.store(at, emit.select(there, pair, 0), offset=16 * j)
