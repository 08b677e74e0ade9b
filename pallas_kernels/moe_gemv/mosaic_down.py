"""Down projections of the selected experts and the shared one, and their sum.

A block owns 16 output columns of the model: one tile of every expert. A warp takes whole (token, rank) pairs and keeps
each pair's sums to itself: no block barrier until all are done. With one token the shared expert's columns are cut into
pieces as wide as an expert and count as further pairs; with more, the warps split its columns and multiply all tokens
at once.

    ids -> weights requested -> the pair's activations staged by the warp -> 16 sums -> ... -> barrier
    -> per (row, token): round each expert's, weighted sum in order of rank, round, add the shared one, round
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import emit, warp
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.layout import ROWS

MAX_BLOCKS = 4  # of 128 columns: an expert's slice of a tile has to fit the registers (twice, when prefetched)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about one kernel. tiles: of the output; blocks: of 128 columns in an expert's row."""

    tokens: int
    active: int
    experts: int
    tiles: int
    blocks: int
    shared_blocks: int
    nvfp4: bool
    sliced: bool  # the stacks hold one layer, and no index operand says which
    scales: int  # global scales of an expert as stored, some of them padding
    shared_scales: int  # of the shared expert

    @property
    def alone(self) -> bool:
        """One token: the shared expert is cut into pieces that count as pairs."""
        return self.tokens == 1 and self.shared_blocks % self.blocks == 0

    @property
    def pairs(self) -> int:
        return self.tokens * self.active

    @property
    def pieces(self) -> int:
        """Of the shared expert's columns, when it counts as pairs."""
        return self.shared_blocks // self.blocks if self.alone else 0

    @property
    def warps(self) -> int:
        if self.alone:
            return min(16, -(-(self.active + self.pieces) // 4) * 4)
        return 8

    @property
    def row_bytes(self) -> int:
        """Of a token's activations: its experts' in order of rank, then the shared one's."""
        return (self.active * self.blocks + self.shared_blocks) * 256


@emit.cached
def build(spec: Spec):
    """Jitted ([index], ids, weights, act, words, scale, shared words, shared scale) -> [out [B, D]]."""
    if spec.blocks > MAX_BLOCKS:
        raise KernelUnsupported(f"experts of {spec.blocks * 128} columns; at most {MAX_BLOCKS * 128}")
    if not spec.alone and spec.shared_blocks % spec.warps:
        raise KernelUnsupported(f"a shared expert of {spec.shared_blocks * 128} columns over {spec.warps} warps")
    if spec.tokens * ROWS > spec.warps * 32:
        raise KernelUnsupported(f"{spec.tokens} tokens for {spec.warps} warps")
    warps = spec.warps
    columns = warp.Columns(spec.tokens, spec.nvfp4)
    block_bytes = warp.block_bytes(spec.nvfp4)
    tile_bytes, shared_bytes = spec.blocks * block_bytes, spec.shared_blocks * block_bytes
    slice_blocks = 0 if spec.alone else spec.shared_blocks // warps
    shared_row = spec.shared_blocks * 256 + warp.ROW_PAD
    items = spec.pairs + spec.pieces
    code_scale = emit.CODE_SCALE if spec.nvfp4 else 1.0
    prefetch = spec.nvfp4 and items > warps

    def program(*addresses):
        index, ids, mix, act, *rest = [None] * spec.sliced + list(addresses)
        words, scale, shared_words, shared_scale, out, *areas = rest
        if spec.alone:
            sums, private = areas
        else:
            sums, private, shared_sums, staged, small = areas
        lane, tile = emit.Lane(), emit.block_index()
        layer = emit.Int(0) if spec.sliced else emit.load(index)[0]
        shared_tile = shared_words.index(layer * spec.tiles + tile, shared_bytes)
        if not spec.alone:
            at = shared_tile + lane.warp * (slice_blocks * block_bytes)
            shared_weights = warp.load_slice(lane, at, slice_blocks, nvfp4=spec.nvfp4, single=columns.single)

        def request(i: emit.Int | int) -> list:
            """Words of the warp's i-th item (or of the last one), flat."""
            item = (lane.warp + emit.as_int(i) * warps).minimum(items - 1)
            (expert,) = emit.load(ids + item.minimum(spec.pairs - 1) * 4)
            at = words.index((layer * spec.experts + expert) * spec.tiles + tile, tile_bytes)
            if spec.pieces:
                routed = item < spec.pairs
                piece = emit.select(routed, 0, item - spec.pairs)
                at = emit.select(routed, at, shared_tile + piece * tile_bytes)
            loaded = warp.load_slice(lane, at, spec.blocks, nvfp4=spec.nvfp4, single=True)
            return [word for block_words in loaded for word in block_words]

        def activations(i: emit.Int | int) -> list:
            """The activations of the warp's i-th item. Pieces of the shared expert's follow the experts' in a row."""
            item = (lane.warp + emit.as_int(i) * warps).minimum(items - 1)
            at = act + (item * (spec.blocks * 256) if spec.tokens == 1 else _pair_offset(spec, item))
            return warp.load_activations(lane, at, spec.blocks)

        held = request(0) if prefetch or items <= warps else []
        # Before the scales below, which wait for the experts' numbers.
        early = activations(0) if items <= warps else None

        # The finishing thread's (row, token): what it will need besides the sums.
        row, token = lane.thread % ROWS, (lane.thread // ROWS).minimum(spec.tokens - 1)
        first = token * (spec.active * 4)
        chosen = [emit.load(ids + first, offset=4 * rank)[0] for rank in range(spec.active)]
        weights = [emit.load_float(mix + first, offset=4 * rank)[0] for rank in range(spec.active)]
        scales = [emit.load_float(scale.index(layer * spec.experts + expert, 4 * spec.scales))[0] for expert in chosen]
        (scale_of_shared,) = emit.load_float(shared_scale.index(layer, 4 * spec.shared_scales))

        mine = private + lane.warp * (spec.blocks * 256)

        def product(i: emit.Int | int, held: list) -> None:
            """The warp's i-th item: 16 sums, without the global scale, into ``sums``."""
            item = (lane.warp + emit.as_int(i) * warps).minimum(items - 1)
            inverse = warp.stage_slice(lane, early or activations(i), mine, spec.blocks, nvfp4=spec.nvfp4)
            emit.warp_barrier()
            width = len(held) // spec.blocks
            split = [held[b * width : (b + 1) * width] for b in range(spec.blocks)]
            low, high = warp.dot_row(lane, split, mine, nvfp4=spec.nvfp4)
            if inverse is not None:
                low, high = low * inverse, high * inverse
            emit.warp_barrier()
            with emit.when(lane.q.equals(0)):
                target = sums + (item * (ROWS * 4) + lane.g * 4)
                emit.store_float(target, low)
                emit.store_float(target, high, offset=32)

        if not spec.alone:
            stage = warp.Stage(
                lane,
                shared=staged,
                row_bytes=shared_row,
                inverse=small,
                tokens=spec.tokens,
                blocks=slice_blocks,
                warps=warps,
                nvfp4=spec.nvfp4,
            )
            stage.plain(act + spec.active * spec.blocks * 256, spec.row_bytes)
            emit.warp_barrier()
            target = shared_sums + lane.warp * (ROWS * columns.count * 4)
            slice_start = staged + lane.warp * (slice_blocks * 256)
            warp.multiply_slice(lane, columns, shared_weights, stage, slice_start, target)

        count = (emit.Int(items + warps - 1) - lane.warp) // warps
        if items <= warps:
            with emit.when(lane.warp < items):
                product(0, held)
        elif prefetch:

            def step(i: emit.Int, held: list) -> list:
                following = request(i + 1)
                product(i, held)
                return following

            emit.loop(0, count, 1, held, step)
        else:

            def step(i: emit.Int, carry: list) -> list:
                product(i, request(i))
                return carry

            emit.loop(0, count, 1, [], step)
        emit.barrier()

        with emit.when(lane.thread < spec.tokens * ROWS):
            routed = emit.Float(0.0)
            for rank in range(spec.active):
                (total,) = emit.load_float(sums + ((token * spec.active + rank) * ROWS + row) * 4)
                y = emit.round_bf16(total * (scales[rank] * code_scale))
                routed = emit.fma(weights[rank], y, routed)
            if spec.alone:
                at = sums + row * 4
                parts = [emit.load_float(at, offset=(spec.pairs + p) * ROWS * 4)[0] for p in range(spec.pieces)]
            else:
                at = shared_sums + (row * columns.count + token) * 4
                parts = [emit.load_float(at, offset=w * ROWS * columns.count * 4)[0] for w in range(warps)]
            shared = emit.round_bf16(sum(parts[1:], parts[0]) * (scale_of_shared * code_scale))
            place = token * (spec.tiles * ROWS) + tile * ROWS + row
            emit.store_bf16(out + place * 2, emit.round_bf16(routed) + shared)

    slots = 8 * warp.column_tiles(spec.tokens)
    shared = [items * ROWS * 4, warps * spec.blocks * 256]
    if not spec.alone:
        shared += [warps * ROWS * columns.count * 4, spec.tokens * shared_row, warps * slots * 4]
    return emit.kernel(
        program,
        name="moe_down",
        out=[jax.ShapeDtypeStruct((spec.tokens, spec.tiles * ROWS), jnp.bfloat16)],
        shared=shared,
        grid=spec.tiles,
        warps=warps,
    )


def _pair_offset(spec: Spec, pair: emit.Int) -> emit.Int:
    return pair // spec.active * spec.row_bytes + pair % spec.active * (spec.blocks * 256)
