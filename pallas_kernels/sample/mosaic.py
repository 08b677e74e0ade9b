"""The candidates on NVIDIA GPUs: one block per row, no sort.

At least k scores reach the k-th largest tile maximum, so every score among the k largest lies in a tile whose maximum
does: k tiles unless maxima tie, out of thousands. The k-th largest of a set held in registers is found bit by bit: 32
rounds of counting the keys above a trial value.

    tile maxima (37 KB) -> k-th largest -> list of tiles -> their scores (1 KB) -> k-th largest -> ids and scores
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import emit
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.sample.shapes import MAX_CANDIDATES, MAX_TOP_K, TILE

WARPS = 16
THREADS = WARPS * 32
TILES_LISTED = THREADS * 4 // TILE  # a thread then reads four scores
MAX_EACH = 64  # tile maxima of a thread, in registers
ABOVE_MINUS_INFINITY = 0x00800000  # the lowest key of a number above it
NAN_KEY = 0xFFFFFFFE


def top_candidates(scores, top_k, tile_max):
    """See ``api.top_candidates``."""
    rows, vocab = scores.shape
    if scores.dtype != jnp.float32 or top_k.dtype != jnp.int32:
        raise KernelUnsupported(f"scores of {scores.dtype}, top_k of {top_k.dtype}")
    if vocab % TILE or vocab // TILE > THREADS * MAX_EACH:
        raise KernelUnsupported(f"a vocabulary of {vocab}: no multiple of {TILE}, or too large")
    return _kernel(rows, vocab)(scores, top_k, tile_max)


@emit.cached
def _kernel(rows: int, vocab: int):
    tiles = vocab // TILE
    each = -(-tiles // THREADS)

    def program(scores, top_k, tile_max, ids_out, scores_out, listed, counts):
        lane, row = emit.Lane(), emit.block_index()
        (wanted,) = emit.load(top_k + row * 4)
        wanted = emit.select(wanted >= 0x80000000, 1, wanted).maximum(1).minimum(MAX_TOP_K)

        # Thread t holds the maxima of tiles t * each ...
        at = tile_max.index(row, tiles * 4)
        keys = []
        for j in range(each):
            tile = lane.thread * each + j
            (bits,) = emit.load(at + tile.minimum(tiles - 1) * 4)
            keys.append(emit.select(tile < tiles, _key(bits), 0))
        threshold = _kth_largest(lane, keys, wanted, counts)

        with emit.when(lane.thread < TILES_LISTED):
            emit.store(listed + lane.thread * 4, emit.Int(tiles))
        emit.barrier()

        def keep_tile(j: int, place: emit.Int) -> None:
            with emit.when(place < TILES_LISTED):
                emit.store(listed + place * 4, lane.thread * each + j)

        _compact(lane, keys, threshold, counts, keep_tile, in_order=TILES_LISTED)
        emit.barrier()

        # Thread t holds four scores of the listed tile t / 4.
        (tile,) = emit.load(listed + (lane.thread >> 2) * 4)
        first = tile.minimum(tiles - 1) * TILE + (lane.thread & 3) * 4
        found = emit.load(scores.index(row, vocab * 4) + first * 4, 4)
        keys = [emit.select(tile < tiles, _key(bits), 0) for bits in found]
        threshold = _kth_largest(lane, keys, wanted, counts)

        def keep_score(j: int, place: emit.Int) -> None:
            with emit.when(place < MAX_CANDIDATES):
                at = (row * MAX_CANDIDATES + place) * 4
                emit.store(ids_out + at, first + j)
                emit.store(scores_out + at, found[j])

        total = _compact(lane, keys, threshold, counts, keep_score)
        with emit.when(emit.both(lane.thread >= total, lane.thread < MAX_CANDIDATES)):
            at = (row * MAX_CANDIDATES + lane.thread) * 4
            emit.store(ids_out + at, emit.Int(0xFFFFFFFF))
            emit.store_float(scores_out + at, emit.Float(float("-inf")))

    out = [jax.ShapeDtypeStruct((rows, MAX_CANDIDATES), dtype) for dtype in (jnp.int32, jnp.float32)]
    shared = [TILES_LISTED * 4, 2 * WARPS * 4]
    return emit.kernel(program, name="top_candidates", out=out, shared=shared, grid=rows, warps=WARPS)


def _key(bits: emit.Int) -> emit.Int:
    """float32 bits -> an unsigned integer in the same order; both zeros equal, NaN of either sign on top."""
    bits = emit.select(bits.equals(0x80000000), 0, bits)
    key = bits ^ emit.select(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000)
    return emit.select((bits & 0x7FFFFFFF) >= 0x7F800001, NAN_KEY, key)


def _kth_largest(lane: emit.Lane, keys, wanted: emit.Int, counts: emit.Address) -> emit.Int:
    """The ``wanted``-th largest key of the block, or the lowest key above -inf when there are fewer above it."""

    def step(i: emit.Int, carry):
        (found,) = carry
        trial = found | (emit.Int(0x80000000) >> i)
        count = emit.Int(0)
        for key in keys:
            count = count + emit.select(key >= trial, 1, 0)
        area = counts + (i & 1) * (WARPS * 4)  # the other one may still be read
        return [emit.select(_block_total(lane, count, area) >= wanted, trial, found)]

    (found,) = emit.loop(0, 32, 1, [emit.Int(0)], step)
    emit.barrier()
    return found.maximum(ABOVE_MINUS_INFINITY)


def _block_total(lane: emit.Lane, count: emit.Int, area: emit.Address) -> emit.Int:
    total = emit.warp_total(count)
    with emit.when(lane.lane.equals(0)):
        emit.store(area + lane.warp * 4, total)
    emit.barrier()
    parts = [part for w in range(0, WARPS, 4) for part in emit.load(area, 4, offset=4 * w)]
    return sum(parts[1:], parts[0])


def _compact(lane: emit.Lane, keys, threshold: emit.Int, counts: emit.Address, keep, in_order: int = 0) -> emit.Int:
    """keep(j, place) for each key above the threshold, then for those equal to it, in order of (thread, j).

    Up to ``in_order`` keys in all are not parted into above and equal. Both places come from one scan: counts above in
    the upper, equal in the lower half of a word. Returns the total.
    """
    above = [key >= threshold + 1 for key in keys]
    equal = [key.equals(threshold) for key in keys]
    mine = emit.Int(0)
    for a, e in zip(above, equal, strict=True):
        mine = mine + emit.select(a, 1 << 16, emit.select(e, 1, 0))
    before, total = emit.Int(0), mine
    for distance in (1, 2, 4, 8, 16):
        other = emit.shuffle_xor_int(total, distance)
        before = emit.select((lane.lane & distance).equals(0), before, before + other)
        total = total + other
    with emit.when(lane.lane.equals(0)):
        emit.store(counts + lane.warp * 4, total)
    emit.barrier()
    total = emit.Int(0)
    for w in range(WARPS):
        (part,) = emit.load(counts, offset=4 * w)
        before = emit.select(emit.Int(w) < lane.warp, before + part, before)
        total = total + part
    all_above, total = total >> 16, (total >> 16) + (total & 0xFFFF)
    next_above, next_equal = before >> 16, all_above + (before & 0xFFFF)
    together = emit.Int(in_order) >= total
    for j, (a, e) in enumerate(zip(above, equal, strict=True)):
        with emit.when(emit.either(a, e)):
            apart = emit.select(a, next_above, next_equal)
            keep(j, emit.select(together, next_above + next_equal - all_above, apart))
        next_above = next_above + emit.select(a, 1, 0)
        next_equal = next_equal + emit.select(e, 1, 0)
    return total
