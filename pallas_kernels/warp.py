"""What one warp does with one slice of a weight tile: load it, multiply it with staged activations.

A tile is 16 rows; a warp's slice of it is ``blocks`` consecutive blocks of 128 columns (see ``layout``). Activations
lie in shared memory, one row of ``row_bytes`` per token, as float16 for NVFP4 weights and bfloat16 for BF16 weights.

Float16 activations: codes are exact in float16, so the products are exact as long as the activations are. bfloat16 has
more range than float16, so each token's slice is first multiplied by the power of two that brings its largest value to
[2^14, 2^15); the inverse goes onto the float32 sums. What underflows is below 2^-39 of the slice's largest value, far
below the rounding of a float32 sum.

One token: the seven spare columns of the product hold something useful. Product i of a block carries the activations
only in column i, so column i of the sum is the partial sum of scale group i, and the block scale is applied to 4 sums
per block and lane instead of to 64 weights. Several tokens: columns are tokens and the scale goes onto the weight, in
float16, where code x scale x 2^-14 is exact as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from pallas_kernels import emit
from pallas_kernels.layout import BF16_WORDS, NVFP4_WORDS

NVFP4_BYTES = NVFP4_WORDS * 4  # of one block
BF16_BYTES = BF16_WORDS * 4
ROW_PAD = 32  # bytes between token rows: the 8 tokens of a fragment then hit different banks


def block_bytes(nvfp4: bool) -> int:
    """Bytes of one block of a tile."""
    return NVFP4_BYTES if nvfp4 else BF16_BYTES


def column_tiles(tokens: int) -> int:
    """How many products of 8 token columns a weight fragment feeds."""
    return -(-tokens // 8)


class Columns:
    """Width of a partial-sum row: 1 for one NVFP4 token, else whole groups of 8 tokens."""

    def __init__(self, tokens: int, nvfp4: bool):
        self.single = tokens == 1 and nvfp4
        self.count = 1 if self.single else 8 * column_tiles(tokens)


def load_slice(lane: emit.Lane, at: emit.Address, blocks: int, *, nvfp4: bool, single: bool, kind: str = emit.STREAM):
    """The lane's weights of a slice, one list of words per block: 8 code words + 1 (single) or 4 scale words, or 32."""
    wide = at + lane.lane * 16
    if not nvfp4:
        return [
            [w for i in range(8) for w in emit.load(wide, 4, offset=BF16_BYTES * b + 512 * i, kind=kind)]
            for b in range(blocks)
        ]
    scales = at + (lane.lane * 4 if single else lane.g * 16)
    loaded = []
    for b in range(blocks):
        codes = [w for h in range(2) for w in emit.load(wide, 4, offset=NVFP4_BYTES * b + 512 * h, kind=kind)]
        loaded.append(codes + emit.load(scales, 1 if single else 4, offset=NVFP4_BYTES * b + 1024, kind=kind))
    return loaded


def dot_partial(
    lane: emit.Lane, weights: Sequence[Sequence[emit.Int]], x: emit.Address | Sequence[emit.Int], chains: int = 2
) -> tuple[emit.Float, emit.Float]:
    """One token, NVFP4: this lane's part of the sums for rows g and g + 8, x 2^-14; the four lanes q hold the rest.

    x: shared memory, the slice's first activation; or what this lane would read there, two words for each block (see
    ``own_halves``). ``chains`` independent product chains hide the product's latency.
    """
    blocks = [(functools.partial(_operand, codes), functools.partial(emit.e4m3_quad, s)) for *codes, s in weights]
    return _dot(lane, blocks, x, chains)


def decoded(weights: Sequence[Sequence[emit.Int]]) -> list[tuple[list[list[emit.Int]], list[emit.Float]]]:
    """Words of ``load_slice`` (NVFP4, single) -> what ``dot_decoded`` takes, per block: 8 A operands and 4 scales. In
    registers (36 a block): worth it where the weights arrive before the activations."""
    return [([emit.decode_codes(code) for code in codes], emit.e4m3_quad(scale)) for *codes, scale in weights]


def dot_decoded(
    lane: emit.Lane, weights: Sequence[tuple], x: emit.Address | Sequence[emit.Int], chains: int = 2
) -> tuple[emit.Float, emit.Float]:
    """``dot_single`` of weights that are ``decoded``."""
    blocks = [(operands.__getitem__, lambda s=scales: s) for operands, scales in weights]
    low, high = _dot(lane, blocks, x, chains)
    return emit.sum_lanes(low, (1, 2)), emit.sum_lanes(high, (1, 2))


def _operand(codes: Sequence[emit.Int], i: int) -> list[emit.Int]:
    return emit.decode_codes(codes[i])


def _dot(lane: emit.Lane, blocks: Sequence[tuple[Callable, Callable]], x, chains: int):
    """blocks: (A operand of product i, the four scales), made when they are needed."""
    mine = x + (lane.g * 32 + lane.q * 8) if isinstance(x, emit.Address) else None
    in_column = [lane.g.equals(i) for i in range(8)]
    low, high = emit.Float(0.0), emit.Float(0.0)
    for b, (operand, scales) in enumerate(blocks):
        pair = x[2 * b : 2 * b + 2] if mine is None else emit.load(mine, 2, offset=256 * b)
        sums = [[emit.Float(0.0)] * 4 for _ in range(chains)]
        for i in range(8):
            column = [emit.select(in_column[i], half, 0) for half in pair]
            sums[i % chains] = emit.mma("f16", sums[i % chains], operand(i), column)
        total = [sum(parts[1:], parts[0]) for parts in zip(*sums, strict=True)]
        s = scales()
        low = emit.fma(total[1], s[1], emit.fma(total[0], s[0], low))
        high = emit.fma(total[3], s[3], emit.fma(total[2], s[2], high))
    return low, high


def dot_single(
    lane: emit.Lane, weights: Sequence[Sequence[emit.Int]], x: emit.Address | Sequence[emit.Int], chains: int = 2
) -> tuple[emit.Float, emit.Float]:
    """``dot_partial``, complete in every lane of a row."""
    low, high = dot_partial(lane, weights, x, chains)
    return emit.sum_lanes(low, (1, 2)), emit.sum_lanes(high, (1, 2))


def dot_row(
    lane: emit.Lane, weights: Sequence[Sequence[emit.Int]], x: emit.Address, *, nvfp4: bool
) -> tuple[emit.Float, emit.Float]:
    """One token, weights of either kind (loaded as ``single``): the sums for rows g and g + 8, in the lanes q = 0."""
    if nvfp4:
        return dot_single(lane, weights, x)
    row = x + lane.q * 8  # every column of the product is the same token
    sums = [[[emit.Float(0.0)] * 4] for _ in range(2)]
    for b, words in enumerate(weights):
        sums[b % 2] = dot_tokens(sums[b % 2], words, [row], b, nvfp4=False)
    low, _, high, _ = [a + b for a, b in zip(sums[0][0], sums[1][0], strict=True)]
    return low, high


def weight_operands(weights: Sequence[emit.Int], *, nvfp4: bool) -> list[list[emit.Int]]:
    """A block's words -> the A operands of its 8 products (NVFP4: weight x 2^-14)."""
    if not nvfp4:
        return [list(weights[4 * i : 4 * i + 4]) for i in range(8)]
    scales = [emit.e4m3_quad_broadcast(word) for word in weights[8:]]
    operands = []
    for i in range(8):
        quad = scales[i // 2]
        by_half = quad[i % 2], quad[2 + i % 2]
        codes = emit.decode_codes(weights[i])
        operands.append([emit.multiply_f16_pair(codes[j], by_half[j % 2]) for j in range(4)])
    return operands


def token_rows(lane: emit.Lane, x: emit.Address, row_bytes: int, tokens: int) -> list[emit.Address]:
    """Per column tile, where this lane's token row begins. Spare columns repeat the last token."""
    rows = []
    for tile in range(column_tiles(tokens)):
        token = lane.g + 8 * tile
        if tokens < 8 * (tile + 1):
            token = token.minimum(tokens - 1)
        rows.append(x + (token * row_bytes + lane.q * 8))
    return rows


def dot_tokens(sums, weights: Sequence[emit.Int], rows: Sequence[emit.Address], block: int, *, nvfp4: bool):
    """Add one block's products: sums[column tile] = 4 floats (rows g, g, g+8, g+8; tokens 2q, 2q+1)."""
    kind = "f16" if nvfp4 else "bf16"
    for i, operand in enumerate(weight_operands(weights, nvfp4=nvfp4)):
        for tile, row in enumerate(rows):
            x = emit.load(row, 2, offset=256 * block + 32 * i)
            sums[tile] = emit.mma(kind, sums[tile], operand, x)
    return sums


# -- staging activations -------------------------------------------------------------------------------------------


def power_of_two(largest: emit.Int) -> tuple[emit.Float, emit.Float]:
    """float32 bits of a slice's largest magnitude -> (factor that brings it to [2^14, 2^15), its inverse)."""
    exponent = (largest >> 23).maximum(15)
    return (emit.Int(268) - exponent << 23).bits_as_float(), (exponent - 14 << 23).bits_as_float()


def largest_magnitude(words: Sequence[emit.Int]) -> emit.Int:
    """float32 bits of the largest magnitude among bfloat16 pairs of this lane."""
    top = emit.Int(0)
    for word in words:
        top = top.maximum(word & 0x7FFF0000).maximum((word << 16) & 0x7FFF0000)
    return top


class Stage:
    """Puts activations into shared memory; warp w takes the columns of slice w, ``blocks`` blocks wide.

    shared: start of the staged rows. inverse: float32 [warps][tokens padded to 8], the factor that undoes each slice's
    power of two. common: every warp will read every slice, so all slices of a token share one power of two.
    """

    def __init__(
        self,
        lane: emit.Lane,
        *,
        shared: emit.Address,
        row_bytes: int,
        inverse: emit.Address,
        tokens: int,
        blocks: int,
        warps: int,
        nvfp4: bool,
        common: bool = False,
    ):
        self.lane, self.shared, self.row_bytes, self.inverse = lane, shared, row_bytes, inverse
        self.tokens, self.blocks, self.warps, self.nvfp4, self.common = tokens, blocks, warps, nvfp4, common
        self.slots = 8 * column_tiles(tokens)
        self.first = lane.warp * (blocks * 256) + lane.lane * 8  # byte offset of this lane in a row

    def inverse_at(self, warp: emit.Int, token: emit.Int | int) -> emit.Address:
        """Where the inverse factor of a warp's slice of a token lies."""
        return self.inverse + (warp * (self.slots * 4) + emit.as_int(token) * 4)

    def load(self, source: emit.Address, token: int, row_bytes: int) -> list[emit.Int]:
        """This lane's words of one token's slice: 2 per block."""
        at = source + (self.first + token * row_bytes)
        return [word for b in range(self.blocks) for word in emit.load(at, 2, offset=256 * b)]

    def keep(self, words: dict[int, list[emit.Int]]) -> None:
        """Store tokens' words (bfloat16 pairs) for the products. The caller synchronises afterwards."""
        if not self.nvfp4:
            for token, pairs in words.items():
                self._store(token, pairs)
            return
        largest = {token: emit.warp_maximum(largest_magnitude(pairs)) for token, pairs in words.items()}
        if self.common:
            for token, top in largest.items():
                with emit.when(self.lane.lane.equals(0)):
                    emit.store(self.inverse_at(self.lane.warp, token), top)
            emit.barrier()
            for token in words:
                tops = [emit.load(self.inverse_at(emit.Int(w), token))[0] for w in range(self.warps)]
                for top in tops:
                    largest[token] = largest[token].maximum(top)
            emit.barrier()
        for token, pairs in words.items():
            factor, inverse = power_of_two(largest[token])
            with emit.when(self.lane.lane.equals(0)):
                emit.store_float(self.inverse_at(self.lane.warp, token), inverse)
            halves = [emit.bf16_pair(word) for word in pairs]
            self._store(token, [emit.to_f16_pair(low * factor, high * factor) for low, high in halves])

    def _store(self, token: int, words: Sequence[emit.Int]) -> None:
        at = self.shared + (self.first + token * self.row_bytes)
        for b in range(self.blocks):
            emit.store(at, words[2 * b], words[2 * b + 1], offset=256 * b)

    def plain(self, x: emit.Address, row_bytes: int, first: Sequence[list[emit.Int]] = ()) -> None:
        """Stage activations as they are. first: the first tokens' words, where the caller has loaded them."""
        self.keep(dict(enumerate(first)))
        group = self.tokens if self.common else max(1, 16 // self.blocks)
        for start in range(len(first), self.tokens, group):
            chosen = range(start, min(start + group, self.tokens))
            self.keep({token: self.load(x, token, row_bytes) for token in chosen})

    def normed(
        self,
        delta: emit.Address | None,
        residual: emit.Address,
        weight: emit.Address,
        eps: float,
        *,
        scratch: emit.Address,
        row_bytes: int,
        residual_out: emit.Address | None,
        normed_out: emit.Address | None,
    ) -> None:
        """Add, RMS-normalise, round, stage.

        s = delta + residual in float32; staged value bf16(s * rsqrt(mean(s^2) + eps) * weight), from the unrounded s.
        Block 0 writes bf16(s) to residual_out and the staged values to normed_out, where given. scratch: float32
        [warps][tokens padded to 8]. One block barrier.
        """
        columns = self.blocks * 128 * self.warps
        sums = {}
        for token in range(self.tokens):
            pairs = [emit.bf16_pair(word) for word in self.load(residual, token, row_bytes)]
            values = [value for pair in pairs for value in pair]
            if delta is not None:
                added = [value for word in self.load(delta, token, row_bytes) for value in emit.bf16_pair(word)]
                values = [a + b for a, b in zip(added, values, strict=True)]
            sums[token] = values
        scale = [
            value
            for b in range(self.blocks)
            for word in emit.load(weight + self.first, 2, offset=256 * b)
            for value in emit.bf16_pair(word)
        ]
        for token, values in sums.items():
            square = emit.Float(0.0)
            for value in values:
                square = emit.fma(value, value, square)
            square = emit.sum_lanes(square, (1, 2, 4, 8, 16))
            with emit.when(self.lane.lane.equals(0)):
                emit.store_float(scratch + (self.lane.warp * (self.slots * 4) + token * 4), square)
        emit.barrier()
        first_block = emit.block_index().equals(0)
        words = {}
        for token, values in sums.items():
            parts = [emit.load_float(scratch + (w * self.slots * 4 + token * 4))[0] for w in range(self.warps)]
            factor = emit.rsqrt(emit.fma(sum(parts[1:], parts[0]), 1.0 / columns, eps))
            normed = [value * factor * weight for value, weight in zip(values, scale, strict=True)]
            words[token] = _pairs(normed)
            for target, content in ((residual_out, _pairs(values)), (normed_out, words[token])):
                if target is None:
                    continue
                at = target + (self.first + token * row_bytes)
                with emit.when(first_block):
                    for b in range(self.blocks):
                        emit.store(at, content[2 * b], content[2 * b + 1], offset=256 * b)
        self.keep(words)


def _pairs(values: Sequence[emit.Float]) -> list[emit.Int]:
    return [emit.to_bf16_pair(values[i], values[i + 1]) for i in range(0, len(values), 2)]


def load_activations(lane: emit.Lane, source: emit.Address, blocks: int) -> list[emit.Int]:
    """The lane's words of ``blocks`` x 128 activations of one token, for ``stage_slice``."""
    return [word for b in range(blocks) for word in emit.load(source + lane.lane * 8, 2, offset=256 * b)]


def own_halves(words: Sequence[emit.Int]) -> tuple[list[emit.Int], emit.Float]:
    """Activations of one token as ``load_activations`` loads them -> (float16 pairs for ``dot_single``, the factor that
    undoes their power of two). A lane loads just the columns that it multiplies, so nothing goes through shared memory.
    """
    factor, inverse = power_of_two(emit.warp_maximum(largest_magnitude(words)))
    halves = [emit.bf16_pair(word) for word in words]
    return [emit.to_f16_pair(low * factor, high * factor) for low, high in halves], inverse


def stage_slice(
    lane: emit.Lane, words: Sequence[emit.Int], shared: emit.Address, blocks: int, *, nvfp4: bool
) -> emit.Float | None:
    """One warp stages one token's ``blocks`` x 128 activations for itself alone; a warp barrier must follow.

    Returns the factor that undoes their power of two, None for BF16 weights.
    """
    inverse = None
    if nvfp4:
        factor, inverse = power_of_two(emit.warp_maximum(largest_magnitude(words)))
        halves = [emit.bf16_pair(word) for word in words]
        words = [emit.to_f16_pair(low * factor, high * factor) for low, high in halves]
    for b in range(blocks):
        emit.store(shared + lane.lane * 8, words[2 * b], words[2 * b + 1], offset=256 * b)
    return inverse


def multiply_slice(
    lane: emit.Lane, columns: Columns, weights, stage: Stage, slice_start: emit.Address, target: emit.Address
) -> None:
    """A warp's part of a tile's sums for all staged tokens, float32 [16][columns.count], at ``target``.

    weights: as loaded with ``single = columns.single``. slice_start: the warp's columns of the first token, staged as
    the warp's own slice.
    """
    if columns.single:
        (inverse,) = emit.load_float(stage.inverse_at(lane.warp, 0))
        low, high = dot_single(lane, weights, slice_start)
        with emit.when(lane.q.equals(0)):
            emit.store_float(target + lane.g * 4, low * inverse)
            emit.store_float(target + lane.g * 4, high * inverse, offset=32)
        return
    rows = token_rows(lane, slice_start, stage.row_bytes, stage.tokens)
    total = [[emit.Float(0.0)] * 4 for _ in rows]
    for b, words in enumerate(weights):
        total = dot_tokens(total, words, rows, b, nvfp4=stage.nvfp4)
    at = target + (lane.g * (columns.count * 4) + lane.q * 8)
    for c, part in enumerate(total):
        if stage.nvfp4:
            inverse = emit.load_float(stage.inverse_at(lane.warp, lane.q * 2 + 8 * c), 2)
            part = [value * inverse[i % 2] for i, value in enumerate(part)]
        emit.store_float(at, part[0], part[1], offset=32 * c)
        emit.store_float(at, part[2], part[3], offset=32 * c + 8 * columns.count * 4)
