"""A whole mixture-of-experts block for one token in one launch: norm, router, selection, gate and up, down, sum.

As many blocks as the output has tiles of 16 columns (128), all of them running at the same time, one a core. What one
block computes and others need goes through an exchange buffer in global memory as words with a tag (``emit.publish``):
256 logits, then the activations between up and down. A hand-over costs one trip through the L2 cache; a kernel boundary
costs that trip, the launch, the layer number's trip and the wait for the slowest block, and weights cannot be requested
across it. Here they are:

    x + residual | layer -> router rows, norm weights, shared expert's tiles (up: registers, down: shared memory)
    norm -> 2 logits -> published          | shared gate/up product while they travel
    256 logits -> selection -> routed gate/up tiles -> registers, then routed down tiles -> shared memory
    routed gate/up products -> SwiGLU -> published
    activations of the warp's own expert -> down product -> sum in order of rank -> out

A lane multiplies just the columns it loaded, so activations stay in its registers. Tags: the buffer's first word counts
launches; a launch tags with that count + 1 and its block 0 stores the new count at the end, when every block has
published and hence read it. Every place is written in every launch, so the tag of a launch is never there beforehand,
also when the count wraps.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import emit, warp
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.layout import BLOCK, ROWS
from pallas_kernels.moe_gemv import mosaic_select
from pallas_kernels.moe_gemv.mosaic_select import LOG2E
from pallas_kernels.nvfp4_gemv.mosaic import silu_exact

LOGITS = 2  # of a block: one published word
MAX_ROUNDS = 3  # routed tiles of a block, all in registers
MAX_SLICE = 2  # blocks of 128 columns of a warp
COUNT_BYTES = 128  # the count has a cache line to itself
BUTTERFLY = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about one kernel. tiles: of a routed expert's gate and up; blocks: of 128 columns in a row."""

    active: int
    experts: int
    tiles: int
    blocks: int
    shared_tiles: int
    eps: float
    warps: int
    scales: tuple[int, int, int, int]  # global scales as stored: gate/up, down, the same of the shared expert

    @property
    def grid(self) -> int:
        return self.blocks * BLOCK // ROWS

    @property
    def tasks(self) -> int:
        """(rank, tile) pairs of gate and up."""
        return self.active * self.tiles

    @property
    def rounds(self) -> int:
        return -(-self.tasks // self.grid)

    @property
    def down_blocks(self) -> int:
        """Of 128 columns in an expert's down row."""
        return self.tiles * 8 // BLOCK

    @property
    def items(self) -> int:
        """Pieces of a down row: the experts in order of rank, then the shared one cut to their width."""
        return self.active + self.shared_tiles // self.tiles

    @property
    def cuts(self) -> int:
        """Warps that share an item's columns."""
        return self.warps // self.items

    def check(self, cores: int) -> None:
        """Raise KernelUnsupported where the kernel's division of labour does not fit."""
        mosaic_select.check(self.experts, self.active)
        if self.grid > cores:
            raise KernelUnsupported(f"{self.grid} blocks that wait for each other on {cores} cores")
        slices = self.blocks % self.warps == 0 and self.blocks // self.warps <= MAX_SLICE
        if not slices or self.grid % self.warps or self.grid // self.warps > 32:
            raise KernelUnsupported(f"{self.blocks * BLOCK} columns over {self.warps} warps")
        if self.experts != LOGITS * self.grid:
            raise KernelUnsupported(f"{self.experts} experts for {self.grid} blocks of {LOGITS}")
        if self.rounds > MAX_ROUNDS or self.shared_tiles > self.grid:
            raise KernelUnsupported(f"{self.tasks} routed and {self.shared_tiles} shared tiles for {self.grid} blocks")
        if self.tiles * 8 % BLOCK or self.shared_tiles % self.tiles or not 1 <= self.items <= self.warps:
            raise KernelUnsupported(
                f"{self.active} experts of {self.tiles * 8}, shared {self.shared_tiles * 8} columns"
            )
        if self.down_blocks % self.cuts or self.down_blocks // self.cuts > 4:
            raise KernelUnsupported(f"experts of {self.tiles * 8} columns in {self.cuts} pieces")


def exchange_words(columns: int, experts: int, active: int, width: int, shared_width: int) -> int:
    """int32 words of the exchange buffer: the count, then 8 bytes for every two logits and every two activations."""
    return COUNT_BYTES // 4 + experts + active * width + shared_width


@emit.cached
def build(spec: Spec):
    """Jitted (index, x, residual, norm weight, router, gate/up words, scale, down words, scale, the same four of the
    shared expert, exchange) -> [out [1, D], residual [1, D], logits [1, E], ids [1, A], weights [1, A], exchange]."""
    warps, grid, tiles, active = spec.warps, spec.grid, spec.tiles, spec.active
    blocks = spec.blocks // warps  # of a warp's slice
    cut_blocks = spec.down_blocks // spec.cuts
    slice_bytes, tile_bytes = blocks * warp.NVFP4_BYTES, spec.blocks * warp.NVFP4_BYTES
    cut_bytes, down_bytes = cut_blocks * warp.NVFP4_BYTES, spec.down_blocks * warp.NVFP4_BYTES
    shared_down_bytes = (spec.items - active) * down_bytes
    row_bytes = spec.blocks * BLOCK * 2
    one_sum = warps * ROWS * 4 + 32  # the warps' parts of a tile; neighbours start 8 banks apart
    exchange_logits, exchange_act = COUNT_BYTES, COUNT_BYTES + grid * 8

    def program(*addresses):
        index, x, residual, norm, router, words, scale, down, down_scale, *rest = addresses
        shared_words, shared_scale, shared_down, shared_down_scale, exchange, *rest = rest
        out, residual_out, logits_out, ids_out, mix_out, *areas = rest
        squares, dots, keys, parts, sums, mix, item_scales, ring, arrivals = areas
        lane, block = emit.Lane(), emit.block_index()
        leader = lane.lane.equals(0)
        mine = lane.warp * (blocks * 256) + lane.lane * 8  # this lane's columns in a row of bfloat16
        item, cut = lane.warp // spec.cuts, lane.warp % spec.cuts
        routed, used = item < active, item < spec.items
        ring, arrival = ring + lane.warp * cut_bytes, arrivals + lane.warp * 8

        def row(at: emit.Address, kind: str = emit.CACHED) -> list[emit.Int]:
            return [word for b in range(blocks) for word in emit.load(at + mine, 2, offset=256 * b, kind=kind)]

        # What depends on nothing, then what needs the layer's number alone.
        layer, layer_of_norm = emit.load(index, 2)
        (count,) = emit.load(exchange)
        branch, stream = row(x), row(residual)
        with emit.when(leader):
            emit.arrival_init(arrival)
            emit.arrival_fence()
        first = layer * spec.experts + block * LOGITS
        router_rows = [row(router.index(first + r, row_bytes), emit.STREAM) for r in range(LOGITS)]
        norm_row = row(norm.index(layer_of_norm, row_bytes))
        own_tile = block.minimum(spec.shared_tiles - 1)
        at = shared_words.index(layer * spec.shared_tiles + own_tile, tile_bytes) + lane.warp * slice_bytes
        shared_weights = warp.load_slice(lane, at, blocks, nvfp4=True, single=True)
        with emit.when(emit.both(leader, emit.both(emit.negate(routed), used))):
            at = shared_down.index(layer * grid + block, shared_down_bytes)
            emit.bulk_copy(ring, at + ((item - active) * down_bytes + cut * cut_bytes), cut_bytes, arrival)
        shared_scales = emit.load_float(shared_scale.index(layer, 4 * spec.scales[2]), 2)
        tag = count + 1

        # Norm and router.
        values = [a + b for one, other in zip(branch, stream, strict=True) for a, b in _sum_pairs(one, other)]
        square = emit.Float(0.0)
        for value in values:
            square = emit.fma(value, value, square)
        square = emit.sum_lanes(square, BUTTERFLY)
        with emit.when(leader):
            emit.store_float(squares + lane.warp * 4, square)
        emit.barrier()
        factor = emit.rsqrt(emit.fma(_total(squares, warps), 1.0 / (spec.blocks * BLOCK), spec.eps))
        scaled = [value * factor * weight for value, weight in zip(values, _floats(norm_row), strict=True)]
        normed = _pairs(scaled)
        inputs = _floats(normed)
        for r, words_of_row in enumerate(router_rows):
            product = emit.Float(0.0)
            for value, weight in zip(inputs, _floats(words_of_row), strict=True):
                product = emit.fma(value, weight, product)
            product = emit.sum_lanes(product, BUTTERFLY)
            with emit.when(leader):
                emit.store_float(dots + (lane.warp * 4 + r * warps * 4), product)
        emit.barrier()
        with emit.when(lane.warp.equals(0)):
            logit = _total(dots + (lane.lane & 1) * (warps * 4), warps)
            pair = emit.to_bf16_pair(logit, emit.shuffle_xor(logit, 1))
            with emit.when(leader):
                emit.publish(exchange + (block * 8 + exchange_logits), pair, tag)
                emit.store(logits_out + block * 4, pair)

        # The shared expert's gate and up, while the logits travel.
        own, inverse = warp.own_halves(normed)

        def multiply(weights, area: int) -> None:
            low, high = warp.dot_single(lane, weights, own)
            with emit.when(lane.q.equals(0)):
                at = parts + (lane.warp * (ROWS * 4) + lane.g * 4 + area * one_sum)
                emit.store_float(at, low * inverse)
                emit.store_float(at, high * inverse, offset=32)

        multiply(shared_weights, spec.rounds)

        # All logits: each warp waits for a part of them. Then every warp selects for itself.
        each = grid // warps
        place = lane.warp * each + lane.lane.minimum(each - 1)
        (pair,) = emit.receive(exchange + (place * 8 + exchange_logits), tag)
        emit.store(keys + place * 4, pair)
        emit.barrier()
        left, best = mosaic_select.keys_of(lane, keys, spec.experts), []
        held, experts = [], []
        for i in range(spec.rounds):
            task = (block + i * grid).minimum(spec.tasks - 1)
            rank, tile = task // tiles, task % tiles
            least, most = min(i * grid, spec.tasks - 1) // tiles, (min((i + 1) * grid, spec.tasks) - 1) // tiles
            while len(best) <= most:
                top, left = mosaic_select.take_best(left)
                best.append(top)
            experts.append(layer * spec.experts + mosaic_select.expert_of(_pick(best, rank, least, most)))
            at = words.index(experts[-1] * tiles + tile, tile_bytes) + lane.warp * slice_bytes
            held.append(warp.load_slice(lane, at, blocks, nvfp4=True, single=True))
        expert = layer * spec.experts + mosaic_select.expert_of(_pick(best, item, 0, active - 1))
        with emit.when(emit.both(leader, routed)):
            at = down.index(expert * grid + block, down_bytes)
            emit.bulk_copy(ring, at + cut * cut_bytes, cut_bytes, arrival)
        of_tile = _pick(experts, lane.lane >> 3, 0, spec.rounds - 1)
        scales = emit.load_float(scale.index(of_tile, 4 * spec.scales[0]), 2)
        own_scale = emit.select(
            routed,
            down_scale.index(expert, 4 * spec.scales[1]),
            shared_down_scale.index(layer, 4 * spec.scales[3]),
        )
        (own_scale,) = emit.load_float(own_scale)
        with emit.when(block.equals(0)):  # only now: everyone waited for its logits
            kept = _pairs(values)
            for b in range(blocks):
                emit.store(residual_out + mine, kept[2 * b], kept[2 * b + 1], offset=256 * b)
        with emit.when(lane.thread.equals((warps - 1) * 32)):
            for rank, (key, weight) in enumerate(zip(best, mosaic_select.weights_of(best), strict=True)):
                emit.store_float(mix + 4 * rank, weight)
                with emit.when(block.equals(0)):
                    emit.store(ids_out, mosaic_select.expert_of(key), offset=4 * rank)
                    emit.store_float(mix_out, weight, offset=4 * rank)

        # Routed gate and up, SwiGLU, and the activations to everyone.
        for i, weights in enumerate(held):
            multiply(weights, i)
        emit.barrier()
        with emit.when(lane.warp.equals(0)):
            number, row_of_tile = (lane.lane >> 3).minimum(spec.rounds - 1), lane.lane & 7
            gate, up = _gate_up(parts + number * one_sum, row_of_tile, warps)
            gate, up = (gate * (scales[0] * emit.CODE_SCALE)), (up * (scales[1] * emit.CODE_SCALE))
            value = gate * emit.reciprocal(emit.exp2(gate * -LOG2E) + 1.0) * up
            task = block + number * grid
            there = emit.both(task < spec.tasks, lane.lane < 8 * spec.rounds)
            _publish_pair(exchange + exchange_act, lane, task, value, tag, there)
        with emit.when(lane.warp.equals(1)):
            gate, up = _gate_up(parts + spec.rounds * one_sum, lane.lane & 7, warps)
            gate = emit.round_bf16(gate * (shared_scales[0] * emit.CODE_SCALE))
            up = emit.round_bf16(up * (shared_scales[1] * emit.CODE_SCALE))
            there = emit.both(block < spec.shared_tiles, lane.lane < 8)
            _publish_pair(exchange + exchange_act, lane, block + spec.tasks, silu_exact(gate) * up, tag, there)

        # Down.
        with emit.when(used):
            emit.arrival_wait(arrival, 0)
            weights = warp.load_slice(lane, ring, cut_blocks, nvfp4=True, single=True)
            at = exchange + (item * (spec.down_blocks * 512) + cut * (cut_blocks * 512) + lane.lane * 16 + exchange_act)
            act = emit.receive(at, tag, words=2, pieces=cut_blocks, stride=512)
            emit.warp_barrier()
            halves, inverse_act = warp.own_halves(act)
            low, high = warp.dot_single(lane, weights, halves)
            with emit.when(lane.q.equals(0)):
                at = sums + (lane.warp * (ROWS * 4) + lane.g * 4)
                emit.store_float(at, low * inverse_act)
                emit.store_float(at, high * inverse_act, offset=32)
            with emit.when(emit.both(leader, cut.equals(0))):
                emit.store_float(item_scales + item * 4, own_scale * emit.CODE_SCALE)
        emit.barrier()

        def of_item(i: int) -> emit.Float:
            at = sums + lane.thread * 4
            pieces = [emit.load_float(at, offset=(i * spec.cuts + c) * ROWS * 4)[0] for c in range(spec.cuts)]
            return sum(pieces[1:], pieces[0])

        with emit.when(lane.thread < ROWS):
            total = emit.Float(0.0)
            for rank in range(active):
                y = emit.round_bf16(of_item(rank) * emit.load_float(item_scales, offset=4 * rank)[0])
                total = emit.fma(emit.load_float(mix, offset=4 * rank)[0], y, total)
            shared = emit.Float(0.0)
            if spec.items > active:
                pieces = [of_item(i) for i in range(active, spec.items)]
                (factor,) = emit.load_float(item_scales, offset=4 * active)
                shared = emit.round_bf16(sum(pieces[1:], pieces[0]) * factor)
            emit.store_bf16(out + (block * ROWS + lane.thread) * 2, emit.round_bf16(total) + shared)
        with emit.when(emit.both(block.equals(0), lane.thread.equals(0))):
            emit.store(exchange, tag)

    columns, bf16 = spec.blocks * BLOCK, jnp.bfloat16
    return emit.kernel(
        program,
        name="moe_block",
        out=[
            jax.ShapeDtypeStruct((1, columns), bf16),
            jax.ShapeDtypeStruct((1, columns), bf16),
            jax.ShapeDtypeStruct((1, spec.experts), bf16),
            jax.ShapeDtypeStruct((1, active), jnp.int32),
            jax.ShapeDtypeStruct((1, active), jnp.float32),
        ],
        shared=[
            warps * 4,
            LOGITS * warps * 4,
            grid * 4,
            (spec.rounds + 1) * one_sum,
            warps * ROWS * 4,
            active * 4,
            spec.items * 4,
            warps * cut_bytes,
            warps * 8,
        ],
        grid=grid,
        warps=warps,
        in_place=1,
        resident=True,
    )


def _pick(values: list, number: emit.Int, least: int, most: int):
    """values[number], where ``number`` is between ``least`` and ``most``."""
    chosen = values[least]
    for i in range(least + 1, most + 1):
        chosen = emit.select(number >= i, values[i], chosen)
    return chosen


def _floats(words: list[emit.Int]) -> list[emit.Float]:
    return [value for word in words for value in emit.bf16_pair(word)]


def _sum_pairs(one: emit.Int, other: emit.Int):
    return zip(emit.bf16_pair(one), emit.bf16_pair(other), strict=True)


def _pairs(values: list[emit.Float]) -> list[emit.Int]:
    return [emit.to_bf16_pair(values[i], values[i + 1]) for i in range(0, len(values), 2)]


def _total(at: emit.Address, count: int) -> emit.Float:
    """The sum of ``count`` (a multiple of 4) floats, in order."""
    parts = [part for i in range(0, count, 4) for part in emit.load_float(at, 4, offset=4 * i)]
    return sum(parts[1:], parts[0])


def _gate_up(at: emit.Address, row: emit.Int, warps: int) -> list[emit.Float]:
    """Sums of a gate row and its up row over the warps, in order."""
    at = at + row * 4
    halves = [[emit.load_float(at, offset=(w * ROWS + 8 * h) * 4)[0] for w in range(warps)] for h in range(2)]
    return [sum(parts[1:], parts[0]) for parts in halves]


def _publish_pair(at: emit.Address, lane, tile: emit.Int, value: emit.Float, tag: emit.Int, there) -> None:
    """A lane has row (lane & 7) of 8 activations of a tile; the even ones publish theirs with the next one's."""
    pair = emit.to_bf16_pair(value, emit.shuffle_xor(value, 1))
    with emit.when(emit.both(there, (lane.lane & 1).equals(0))):
        emit.publish(at + (tile * 8 + (lane.lane & 7)) * 4, pair, tag)
