"""Down projections of the selected experts and the shared one, and their sum.

A block owns 16 output columns of the model: one tile of every expert. A warp takes whole (token, rank) pairs and keeps
each pair's sums to itself: no block barrier until all are done. With one token the shared expert's columns are cut into
pieces as wide as an expert and count as further pairs; with more, the warps split its columns and multiply all tokens
at once.

    ids, shared weights -> scales, first items requested (weights and activations, by the copy engine, a ring per warp)
    -> item after item: 16 sums, its place refilled -> the shared expert's product -> barrier
    -> per (row, token): round each expert's, weighted sum in order of rank, round, add the shared one, round
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import emit, warp
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.layout import ROWS

MAX_BLOCKS = 4  # of 128 columns: an expert's slice of a tile has to fit the registers
RING_BYTES = 100 << 10  # of all warps


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
    act_bytes = spec.blocks * 256
    item_bytes = tile_bytes + act_bytes
    each = -(-items // warps)
    ring = max(1, min(each, RING_BYTES // (warps * item_bytes)))
    if each > 32:
        raise KernelUnsupported(f"{items} experts' slices for {warps} warps")

    def program(*addresses):
        index, ids, mix, act, *rest = [None] * spec.sliced + list(addresses)
        words, scale, shared_words, shared_scale, out, *areas = rest
        if spec.alone:
            sums, ring_area, experts, arrivals, scales_area, mix_area = areas
        else:
            sums, ring_area, experts, arrivals, scales_area, mix_area, shared_sums, staged, small = areas
        lane, tile = emit.Lane(), emit.block_index()
        leader = lane.lane.equals(0)
        layer = emit.Int(0) if spec.sliced else emit.load(index)[0]
        # Lane i looks after the warp's i-th item.
        own = (lane.warp + lane.lane * warps).minimum(spec.pairs - 1)
        (expert,) = emit.load(ids + own * 4)
        shared_tile = shared_words.index(layer * spec.tiles + tile, shared_bytes)
        if not spec.alone:
            at = shared_tile + lane.warp * (slice_blocks * block_bytes)
            shared_weights = warp.load_slice(lane, at, slice_blocks, nvfp4=spec.nvfp4, single=columns.single)
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
            shared_act = act + spec.active * spec.blocks * 256
            early = [
                stage.load(shared_act, token, spec.row_bytes) for token in range(min(spec.tokens, 16 // slice_blocks))
            ]
        ring_area, arrivals = ring_area + lane.warp * (ring * item_bytes), arrivals + lane.warp * (ring * 8)
        experts = experts + lane.warp * 128
        with emit.when(leader):
            for place in range(ring):
                emit.arrival_init(arrivals + place * 8)
            emit.arrival_fence()
        emit.store(experts + lane.lane * 4, expert)
        emit.warp_barrier()
        # What the last step needs besides the sums: whatever is asked for behind the ring comes behind all of it.
        (scale_of_shared,) = emit.load_float(shared_scale.index(layer, 4 * spec.shared_scales))
        with emit.when(lane.warp + lane.lane * warps < spec.pairs):
            at = scale.index(layer * spec.experts + expert, 4 * spec.scales)
            emit.copy_word(scales_area + own * 4, at)
            emit.copy_word(mix_area + own * 4, mix + own * 4)
        emit.copies_commit()

        def bring(i: emit.Int | int, place: emit.Int | int) -> None:
            """One lane: the warp's i-th item into the ring. Pieces of the shared expert's follow the experts'."""
            i, place = emit.as_int(i), emit.as_int(place)
            item = lane.warp + i * warps
            (expert,) = emit.load(experts + i * 4)
            at = words.index((layer * spec.experts + expert) * spec.tiles + tile, tile_bytes)
            if spec.pieces:
                routed = item < spec.pairs
                piece = emit.select(routed, 0, item - spec.pairs)
                at = emit.select(routed, at, shared_tile + piece * tile_bytes)
            source = act + (item * act_bytes if spec.tokens == 1 else _pair_offset(spec, item))
            to, arrival = ring_area + place * item_bytes, arrivals + place * 8
            emit.bulk_copy(to, at, tile_bytes, arrival, item_bytes)
            emit.bulk_copy(to + tile_bytes, source, act_bytes, arrival, 0)

        count = (emit.Int(items + warps - 1) - lane.warp) // warps
        for place in range(ring):
            with emit.when(emit.both(leader, emit.Int(place) < count)):
                bring(place, place)
        if not spec.alone:
            stage.plain(shared_act, spec.row_bytes, early)

        def step(i: emit.Int, carry: list) -> list:
            """The warp's i-th item: 16 sums, without the global scale, into ``sums``."""
            place, phase = carry
            emit.arrival_wait(arrivals + place * 8, phase)
            here = ring_area + place * item_bytes
            weights = warp.load_slice(lane, here, spec.blocks, nvfp4=spec.nvfp4, single=True)
            x = here + tile_bytes
            if spec.nvfp4:
                words, inverse = warp.own_halves(warp.load_activations(lane, x, spec.blocks))
                low, high = (value * inverse for value in warp.dot_single(lane, weights, words))
            else:
                low, high = warp.dot_row(lane, weights, x, nvfp4=False)
            emit.warp_barrier()
            with emit.when(emit.both(leader, i + ring < count)):
                bring(i + ring, place)
            with emit.when(lane.q.equals(0)):
                target = sums + ((lane.warp + i * warps) * (ROWS * 4) + lane.g * 4)
                emit.store_float(target, low)
                emit.store_float(target, high, offset=32)
            wrapped = place.equals(ring - 1)
            return [emit.select(wrapped, 0, place + 1), emit.select(wrapped, phase ^ 1, phase)]

        emit.loop(0, count, 1, [emit.Int(0), emit.Int(0)], step)
        if not spec.alone:
            emit.warp_barrier()
            target = shared_sums + lane.warp * (ROWS * columns.count * 4)
            slice_start = staged + lane.warp * (slice_blocks * 256)
            warp.multiply_slice(lane, columns, shared_weights, stage, slice_start, target)
        emit.copies_wait(0)
        emit.barrier()
        row, token = lane.thread % ROWS, (lane.thread // ROWS).minimum(spec.tokens - 1)

        with emit.when(lane.thread < spec.tokens * ROWS):
            routed = emit.Float(0.0)
            for rank in range(spec.active):
                (total,) = emit.load_float(sums + ((token * spec.active + rank) * ROWS + row) * 4)
                at = (token * spec.active + rank) * 4
                (factor,), (weight,) = emit.load_float(scales_area + at), emit.load_float(mix_area + at)
                routed = emit.fma(weight, emit.round_bf16(total * (factor * code_scale)), routed)
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
    shared = [
        items * ROWS * 4,
        warps * ring * item_bytes,
        warps * 128,
        warps * ring * 8,
        spec.pairs * 4,
        spec.pairs * 4,
    ]
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
