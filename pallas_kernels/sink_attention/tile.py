"""What one warp does with a unit of 16 keys: bring it, score it, absorb it into a running softmax.

Tensor cores multiply the transposed way: scores are keys x heads and outputs are dims x heads, so that the 8 query
heads of a kv head fill the 8 columns of a product and no lane works on padding. Then every lane holds two heads
(2q and 2q + 1), and a softmax over keys is a softmax over the lanes that share q.

A unit's K and V lie in shared memory as 16 rows of 256 bytes each. The 16-byte pieces of row r are stored in the order
piece ^ (r % 8): the eight rows that a matrix load reads at once would otherwise all start in the same bank.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels import emit

KEYS = 16
HEADS = 8  # query heads of a kv head: the columns of a product
WIDTH = 128
ROW = WIDTH * 2  # bytes
HALF = KEYS * ROW  # bytes of a unit's K; V follows
UNIT = 2 * HALF
Q_ROW = ROW + 16  # bytes between staged query heads: 8 heads then start in different banks
OUT_ROW = (WIDTH + 4) * 4  # bytes between the heads of a warp's float32 result, for the same reason
RESULT = HEADS * OUT_ROW + HEADS * 8  # bytes of a warp's result: outputs, then (maximum, sum) of each head
NOTHING = -1e30  # running maximum before the first key: finite, so that differences of two of them are no NaN


class Places:
    """A lane's offsets into a unit."""

    def __init__(self, lane: emit.Lane):
        self.lane = lane
        r, upper, middle = lane.lane & 7, lane.lane >> 4, (lane.lane >> 3) & 1
        self.row = upper  # copy i brings row 2 i + upper
        self.copy = [upper * ROW + (((lane.lane & 15) ^ ((upper + 2 * i) & 7)) << 4) for i in range(4)]
        # Matrices of a load, for K: keys 0-7 and 8-15 of dims d .. d+7, then of d+8 ..; for V: dims before keys.
        self.k = [(r + middle * 8) * ROW + (((upper ^ r) ^ (2 * s)) << 4) for s in range(4)]
        self.v = [(r + upper * 8) * ROW + (((middle ^ r) ^ (2 * s)) << 4) + HALF for s in range(4)]


def request(
    places: Places, stage: emit.Address, k: emit.Address, v: emit.Address, first: emit.Int, stop: emit.Int
) -> None:
    """Start copying rows first <= r < stop of a unit whose 16 rows begin at ``k`` and ``v``; zeros elsewhere.

    Rows outside are not even read: they may hold NaN, which zero probability does not remove.
    """
    offset = places.lane.lane * 16
    for i in range(8):
        row = places.row + 2 * i
        present = emit.both(row >= first, row < stop)
        to = stage + (places.copy[i % 4] + 2 * ROW * i)
        emit.copy16(to, k + offset + 2 * ROW * i, present)
        emit.copy16(to + HALF, v + offset + 2 * ROW * i, present)


def insert_row(places: Places, stage: emit.Address, row: emit.Int, own: emit.Address) -> list[emit.Int]:
    """Put the row at ``own`` (K, then V: 256 bytes each) into a unit; lanes 0-15 hold K's pieces, 16-31 V's.

    Returns the lane's piece. A warp barrier must follow.
    """
    lane = places.lane.lane
    piece = emit.load(own + lane * 16, 4)
    at = stage + ((lane >> 4) * HALF + row * ROW + (((lane & 15) ^ (row & 7)) << 4))
    emit.store(at, *piece)
    return piece


def load_queries(lane: emit.Lane, staged: emit.Address) -> list[list[emit.Int]]:
    """The eight B operands (16 dims x 8 heads) of staged query heads."""
    at = staged + (lane.g * Q_ROW + lane.q * 4)
    return [[emit.load(at, offset=32 * s)[0], emit.load(at, offset=32 * s + 16)[0]] for s in range(8)]


@dataclasses.dataclass
class Running:
    """Softmax so far of the lane's heads 2q, 2q + 1: maxima (complete), sums (of this lane's keys), and outputs:
    out[4 t ..] = dims 16 t + g and 16 t + g + 8 of both heads."""

    top: list[emit.Float]
    sums: list[emit.Float]
    out: list[emit.Float]

    @classmethod
    def empty(cls) -> Running:
        return cls([emit.Float(NOTHING)] * 2, [emit.Float(0.0)] * 2, [emit.Float(0.0)] * 32)

    def flat(self) -> list[emit.Float]:
        return [*self.top, *self.sums, *self.out]

    @classmethod
    def of(cls, values: list[emit.Float]) -> Running:
        return cls(values[:2], values[2:4], values[4:])


def absorb(
    places: Places,
    running: Running,
    stage: emit.Address,
    queries: list[list[emit.Int]],
    first: emit.Int,
    stop: emit.Int,
    scale: float,
) -> Running:
    """Add rows first <= r < stop of a unit. scale: of the scores, times log2(e)."""
    lane = places.lane
    parts = [[emit.Float(0.0)] * 4 for _ in range(2)]  # two chains hide the product's latency
    for s in range(8):
        keys = emit.load_matrices(stage + places.k[s % 4] + 128 * (s // 4))
        parts[s % 2] = emit.mma("bf16", parts[s % 2], keys, queries[s])
    scores = [a + b for a, b in zip(*parts, strict=True)]  # keys g, g, g + 8, g + 8; heads 2q, 2q + 1
    rows = [lane.g, lane.g + 8]
    seen = [emit.both(row >= first, row < stop) for row in rows]
    scores = [emit.select(seen[i // 2], x, float("-inf")) for i, x in enumerate(scores)]
    top = []
    for head in range(2):
        best = scores[head].maximum(scores[2 + head])
        for distance in (4, 8, 16):
            best = best.maximum(emit.shuffle_xor(best, distance))
        top.append(running.top[head].maximum(best))
    shrink = [emit.exp2((old - new) * scale) for old, new in zip(running.top, top, strict=True)]
    shift = [emit.Float(0.0) - new * scale for new in top]
    p = [emit.exp2(emit.fma(x, scale, shift[i % 2])) for i, x in enumerate(scores)]
    sums = [emit.fma(running.sums[i], shrink[i], p[i] + p[2 + i]) for i in range(2)]
    weights = [emit.transpose_pairs(emit.to_bf16_pair(*p[2 * half : 2 * half + 2])) for half in range(2)]
    out = []
    for t in range(8):
        values = emit.load_matrices(stage + places.v[t % 4] + 128 * (t // 4), transposed=True)
        before = [x * shrink[i % 2] for i, x in enumerate(running.out[4 * t : 4 * t + 4])]
        out += emit.mma("bf16", before, values, weights)
    return Running(top, sums, out)


def store_result(lane: emit.Lane, running: Running, at: emit.Address) -> None:
    """A warp's softmax to shared memory (``RESULT`` bytes)."""
    sums = [emit.sum_lanes(x, (4, 8, 16)) for x in running.sums]
    with emit.when(lane.g.equals(0)):
        emit.store_float(at + lane.q * 16, running.top[0], sums[0], running.top[1], sums[1], offset=HEADS * OUT_ROW)
    mine = at + (lane.q * (2 * OUT_ROW) + lane.g * 4)
    for i, value in enumerate(running.out):
        emit.store_float(mine, value, offset=(i % 2) * OUT_ROW + 64 * (i // 4) + 32 * (i % 4 // 2))


@dataclasses.dataclass
class Merged:
    """Softmax of one head over several parts: maximum, sum, and the lane's dims 4 l .. 4 l + 3."""

    top: emit.Float
    total: emit.Float
    out: list[emit.Float]


def merge(parts: list[Merged], scale: float) -> Merged:
    """Join softmaxes over disjoint keys, in order."""
    top = parts[0].top
    for part in parts[1:]:
        top = top.maximum(part.top)
    total, out = emit.Float(0.0), [emit.Float(0.0)] * 4
    for part in parts:
        weight = emit.exp2((part.top - top) * scale)
        total = emit.fma(part.total, weight, total)
        out = [emit.fma(new, weight, old) for new, old in zip(part.out, out, strict=True)]
    return Merged(top, total, out)


def load_result(lane: emit.Lane, at: emit.Address, head: emit.Int) -> Merged:
    """One head of a warp's stored softmax."""
    top, total = emit.load_float(at + head * 8, 2, offset=HEADS * OUT_ROW)
    return Merged(top, total, emit.load_float(at + (head * OUT_ROW + lane.lane * 16), 4))


def finish(merged: Merged, sink: emit.Float, scale: float) -> list[emit.Int]:
    """Add the sink to the denominator, divide, round: two words of the output. scale as in ``absorb``."""
    log2e = 1.4426950408889634
    extra = emit.exp2(emit.fma(sink, log2e, emit.Float(0.0) - merged.top * scale))
    inverse = emit.divide(1.0, merged.total + extra)
    a, b, c, d = (x * inverse for x in merged.out)
    return [emit.to_bf16_pair(a, b), emit.to_bf16_pair(c, d)]
