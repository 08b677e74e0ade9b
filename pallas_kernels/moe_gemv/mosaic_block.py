"""A whole mixture-of-experts block for one token in one launch: norm, router, selection, gate and up, down, sum.

As many blocks as the output has tiles of 16 columns (128), all of them running at the same time, one a core. What one
block computes and others need goes through an exchange buffer in global memory as words with a tag (``emit.publish``):
256 logits, then the activations between up and down. A hand-over costs one trip through the L2 cache; a kernel boundary
costs that trip, the launch, the layer number's trip and the wait for the slowest block, and weights cannot be requested
across it. Here they are:

    x + residual | layer -> router rows, norm weights, a little later the shared expert's tiles
    norm -> 2 logits -> published
    warp 0: 256 logits -> selection -> scales and routed gate/up tiles requested | the others: shared gate/up product
    routed products, tile after tile; behind the first the routed down tiles are requested
    SwiGLU -> published                               | down tiles decoded while the activations travel
    activations of the warp's own expert -> down product -> sum in order of rank -> out

The copy engine brings the weights: loads into registers share a scoreboard, so that the first use of one waits for all,
and only one warp has to know which experts were chosen. A lane multiplies just the columns it
loaded, so activations stay in its registers.

Tags: the buffer's first word counts launches; a launch tags with that count + 1 and its block 0 stores the new count at
the end, when every block has published and hence read it. Every place is written in every launch, so the tag of a
launch is never there beforehand, also when the count wraps.
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

WARPS = 8
LOGITS = 2  # of a block: one published word
MAX_ROUNDS = 6  # routed tiles of a block: what fits the shared memory together (18 KB each)
MAX_SLICE = 2  # blocks of 128 columns of a warp
COUNT_BYTES = 128  # the count has a cache line to itself
# Of the logits: 128 blocks that ask the same kilobyte over and over queue up where it lies. With 1, 8 and 32 copies a
# launch took 11.8, 10.8 and 10.6 us.
COPIES = 32
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

    def check(self, cores: int) -> None:
        """Raise KernelUnsupported where the kernel's division of labour does not fit."""
        mosaic_select.check(self.experts, self.active)
        if self.grid > cores:
            raise KernelUnsupported(f"{self.grid} blocks that wait for each other on {cores} cores")
        if self.blocks % WARPS or self.blocks // WARPS > MAX_SLICE or self.grid % 32 or self.grid // 32 not in (2, 4):
            raise KernelUnsupported(f"{self.blocks * BLOCK} columns over {WARPS} warps")
        if self.experts != LOGITS * self.grid:
            raise KernelUnsupported(f"{self.experts} experts for {self.grid} blocks of {LOGITS}")
        if self.rounds > MAX_ROUNDS or self.shared_tiles > self.grid:
            raise KernelUnsupported(f"{self.tasks} routed and {self.shared_tiles} shared tiles for {self.grid} blocks")
        if (
            self.tiles * 8 % BLOCK
            or self.shared_tiles % self.tiles
            or not self.active < self.items <= WARPS
            or self.down_blocks > 4
        ):
            widths = f"{self.tiles * 8} columns, shared {self.shared_tiles * 8}"
            raise KernelUnsupported(f"{self.active} experts of {widths}, {WARPS} warps")


def exchange_words(columns: int, experts: int, active: int, width: int, shared_width: int) -> int:
    """int32 words of the exchange buffer: the count, then 8 bytes for every two logits (in several copies) and every
    two activations."""
    return COUNT_BYTES // 4 + COPIES * experts + active * width + shared_width


@emit.cached
def build(spec: Spec):
    """Jitted (index, x, residual, norm weight, router, gate/up words, scale, down words, scale, the same four of the
    shared expert, exchange) -> [out [1, D], residual [1, D], logits [1, E], ids [1, A], weights [1, A], exchange]."""
    grid, tiles, active, rounds = spec.grid, spec.tiles, spec.active, spec.rounds
    blocks = spec.blocks // WARPS  # of a warp's slice
    slice_bytes, tile_bytes = blocks * warp.NVFP4_BYTES, spec.blocks * warp.NVFP4_BYTES
    down_bytes = spec.down_blocks * warp.NVFP4_BYTES
    shared_down_bytes = (spec.items - active) * down_bytes
    row_bytes = spec.blocks * BLOCK * 2
    one_sum = WARPS * ROWS * 4 + 32  # the warps' parts of a tile; neighbours start 8 banks apart
    exchange_logits, exchange_act = COUNT_BYTES, COUNT_BYTES + COPIES * grid * 8
    # Numbers of arrivals: routed tiles, the shared one, router rows, norm weights, selection, each warp's down tile.
    shared_tile, of_router, of_norm, selected, of_down = range(rounds, rounds + 5)

    def program(*addresses):
        index, x, residual, norm, router, words, scale, down, down_scale, *rest = addresses
        shared_words, shared_scale, shared_down, shared_down_scale, exchange, *rest = rest
        out, residual_out, logits_out, ids_out, mix_out, *areas = rest
        squares, dots, parts, sums, small, gate_up_area, down_area, rows_area, norm_area, arrivals = areas
        mix, chosen = small, small + 4 * active  # of each rank: its weight, its key
        up_scales, down_scales = small + 8 * active, small + 16 * active
        lane, block = emit.Lane(), emit.block_index()
        leader, first_warp, first_block = lane.lane.equals(0), lane.warp.equals(0), block.equals(0)
        mine = lane.warp * (blocks * 256) + lane.lane * 8  # this lane's columns in a row of bfloat16

        def row(at: emit.Address) -> list[emit.Int]:
            return [word for b in range(blocks) for word in emit.load(at + mine, 2, offset=256 * b)]

        def arrival(number: int, of: emit.Int | int = 0) -> emit.Address:
            return arrivals + (emit.as_int(of) * 8 + number * 8)

        def bring_tile(number: int, at: emit.Address) -> None:
            emit.bulk_copy(gate_up_area + number * tile_bytes, at, tile_bytes, arrival(number))

        def bring_down(of: emit.Int, at: emit.Address) -> None:
            emit.bulk_copy(down_area + of * down_bytes, at, down_bytes, arrival(of_down, of))

        # What depends on nothing, then what needs the layer's number alone. One lane starts a copy, each of another
        # warp: the lanes of a warp would start theirs one after the other, 50 cycles each.
        layer, layer_of_norm = emit.load(index, 2)
        (count,) = emit.load(exchange)
        branch, stream = row(x), row(residual)
        with emit.when(leader):
            emit.arrival_init(arrival(of_down, lane.warp))
            with emit.when(first_warp):
                for number in range(of_down):
                    emit.arrival_init(arrival(number))
            emit.arrival_fence()
        emit.barrier()
        with emit.when(lane.thread.equals(32)):
            at = router.index(layer * grid + block, LOGITS * row_bytes)
            emit.bulk_copy(rows_area, at, LOGITS * row_bytes, arrival(of_router))
        with emit.when(lane.thread.equals(64)):
            emit.bulk_copy(norm_area, norm.index(layer_of_norm, row_bytes), row_bytes, arrival(of_norm))
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
        # The shared expert's tiles only now: beside them the router rows, for which all wait, would come 0.4 us later.
        # Not behind them: the logits would travel 0.7 us longer while so much else does.
        with emit.when(lane.thread.equals(96)):
            own_tile = block.minimum(spec.shared_tiles - 1)
            bring_tile(shared_tile, shared_words.index(layer * spec.shared_tiles + own_tile, tile_bytes))
        with emit.when(emit.both(leader, emit.both(lane.warp >= active, lane.warp < spec.items))):
            at = shared_down.index(layer * grid + block, shared_down_bytes)
            bring_down(lane.warp, at + (lane.warp - active) * down_bytes)
        shared_scales = emit.load_float(shared_scale.index(layer, 4 * spec.scales[2]), 2)
        shared_scales += emit.load_float(shared_down_scale.index(layer, 4 * spec.scales[3]))
        factor = emit.rsqrt(emit.fma(_total(squares), 1.0 / (spec.blocks * BLOCK), spec.eps))
        emit.arrival_wait(arrival(of_norm), 0)
        normed = _pairs([v * factor * weight for v, weight in zip(values, _floats(row(norm_area)), strict=True)])
        inputs = _floats(normed)
        emit.arrival_wait(arrival(of_router), 0)
        for r in range(LOGITS):
            product = emit.Float(0.0)
            for value, weight in zip(inputs, _floats(row(rows_area + r * row_bytes)), strict=True):
                product = emit.fma(value, weight, product)
            product = emit.sum_lanes(product, BUTTERFLY)
            with emit.when(leader):
                emit.store_float(dots + (lane.warp * 4 + r * WARPS * 4), product)
        emit.barrier()

        with emit.when(first_warp):
            logit = _total(dots + (lane.lane & 1) * (WARPS * 4))
            other = emit.shuffle_xor(logit, 1)
            even = (lane.lane & 1).equals(0)
            pair = emit.to_bf16_pair(emit.select(even, logit, other), emit.select(even, other, logit))
            with emit.when(lane.lane < COPIES):
                emit.publish(exchange + (lane.lane * (grid * 8) + block * 8 + exchange_logits), pair, tag)
            with emit.when(leader):
                emit.store(logits_out + block * 4, pair)
        # Warp 0 alone waits for all logits, selects and requests.
        with emit.when(first_warp):
            each = grid // 32
            at = exchange + (block % COPIES * (grid * 8) + lane.lane * (each * 8) + exchange_logits)
            logits = emit.receive(at, tag, words=2, pieces=each // 2, stride=16)
            emit.warp_barrier()
            left, best = mosaic_select.descending(mosaic_select.keys_from(lane, logits)), []

            def select_until(most: int) -> None:
                nonlocal left
                while len(best) <= most:
                    top, left = mosaic_select.take_first(left, active - 1 - len(best))
                    best.append(top)

            def request(i: int) -> None:
                task = (block + i * grid).minimum(spec.tasks - 1)
                least, most = min(i * grid, spec.tasks - 1) // tiles, (min((i + 1) * grid, spec.tasks) - 1) // tiles
                select_until(most)
                expert = layer * spec.experts + mosaic_select.expert_of(_pick(best, task // tiles, least, most))
                with emit.when(leader):
                    bring_tile(i, words.index(expert * tiles + task % tiles, tile_bytes))

            request(0)
            select_until(active - 1)
            # Lane r looks after rank r. Its scales go first: behind all the weights they would come last.
            key = _pick(best, lane.lane, 0, active - 1)
            expert = layer * spec.experts + mosaic_select.expert_of(key)
            with emit.when(lane.lane < active):
                emit.store(chosen + lane.lane * 4, key)
                emit.copy_word(up_scales + lane.lane * 8, scale.index(expert, 4 * spec.scales[0]), 2)
                emit.copy_word(down_scales + lane.lane * 4, down_scale.index(expert, 4 * spec.scales[1]))
            emit.copies_commit()
            for i in range(1, rounds):
                request(i)
            emit.warp_barrier()
            with emit.when(leader):
                emit.arrive(arrival(selected))

        own, inverse = warp.own_halves(normed)

        def multiply(number: int) -> None:
            emit.arrival_wait(arrival(number), 0)
            at = gate_up_area + (lane.warp * slice_bytes + number * tile_bytes)
            low, high = warp.dot_single(lane, warp.load_slice(lane, at, blocks, nvfp4=True, single=True), own)
            with emit.when(lane.q.equals(0)):
                at = parts + (lane.warp * (ROWS * 4) + lane.g * 4 + number * one_sum)
                emit.store_float(at, low * inverse)
                emit.store_float(at, high * inverse, offset=32)

        multiply(shared_tile)
        with emit.when(lane.warp.equals(1)):
            emit.arrival_wait(arrival(selected), 0)
            best = [emit.load(chosen, offset=4 * rank)[0] for rank in range(active)]
            key = _pick(best, lane.lane, 0, active - 1)
            score = mosaic_select.score_of(key)
            with emit.when(lane.lane < active):
                emit.store_float(mix + lane.lane * 4, score)
            emit.warp_barrier()
            every = [emit.load_float(mix, offset=4 * rank)[0] for rank in range(active)]
            emit.warp_barrier()
            weight = mosaic_select.share_of(score, every)
            with emit.when(lane.lane < active):
                emit.store_float(mix + lane.lane * 4, weight)
                with emit.when(first_block):
                    emit.store(ids_out + lane.lane * 4, mosaic_select.expert_of(key))
                    emit.store_float(mix_out + lane.lane * 4, weight)
        with emit.when(first_block):  # only now: everyone waited for its logits
            kept = _pairs(values)
            for b in range(blocks):
                emit.store(residual_out + mine, kept[2 * b], kept[2 * b + 1], offset=256 * b)

        # Routed gate and up, SwiGLU, and the activations to everyone.
        for i in range(rounds):
            multiply(i)
            if i == 0:  # down tiles are requested behind those for which everyone waits
                with emit.when(emit.both(leader, lane.warp < active)):
                    emit.arrival_wait(arrival(selected), 0)
                    (key,) = emit.load(chosen + lane.warp * 4)
                    expert = layer * spec.experts + mosaic_select.expert_of(key)
                    bring_down(lane.warp, down.index(expert * grid + block, down_bytes))
        emit.barrier()
        with emit.when(first_warp):
            emit.copies_wait(0)
            emit.warp_barrier()
            for start in range(0, rounds, 4):
                number, row_of_tile = ((lane.lane >> 3) + start).minimum(rounds - 1), lane.lane & 7
                task = block + number * grid
                rank = task.minimum(spec.tasks - 1) // tiles
                gate_scale, up_scale = emit.load_float(up_scales + rank * 8, 2)
                gate, up = _gate_up(parts + number * one_sum, row_of_tile)
                gate, up = gate * (gate_scale * emit.CODE_SCALE), up * (up_scale * emit.CODE_SCALE)
                value = gate * emit.reciprocal(emit.exp2(gate * -LOG2E) + 1.0) * up
                there = emit.both(task < spec.tasks, lane.lane < 8 * (rounds - start))
                _publish_pair(exchange + exchange_act, lane, task, value, tag, there)
        with emit.when(lane.warp.equals(1)):
            gate, up = _gate_up(parts + shared_tile * one_sum, lane.lane & 7)
            gate = emit.round_bf16(gate * (shared_scales[0] * emit.CODE_SCALE))
            up = emit.round_bf16(up * (shared_scales[1] * emit.CODE_SCALE))
            there = emit.both(block < spec.shared_tiles, lane.lane < 8)
            _publish_pair(exchange + exchange_act, lane, block + spec.tasks, silu_exact(gate) * up, tag, there)

        # Down: warp w takes item w.
        with emit.when(lane.warp < spec.items):
            emit.arrival_wait(arrival(of_down, lane.warp), 0)
            at = down_area + lane.warp * down_bytes
            weights = warp.decoded(warp.load_slice(lane, at, spec.down_blocks, nvfp4=True, single=True))
            at = exchange + (lane.warp * (spec.down_blocks * 512) + lane.lane * 16 + exchange_act)
            act = emit.receive(at, tag, words=2, pieces=spec.down_blocks, stride=512)
            emit.warp_barrier()
            halves, inverse_act = warp.own_halves(act)
            low, high = warp.dot_decoded(lane, weights, halves)
            with emit.when(lane.q.equals(0)):
                at = sums + (lane.warp * (ROWS * 4) + lane.g * 4)
                emit.store_float(at, low * inverse_act)
                emit.store_float(at, high * inverse_act, offset=32)
        emit.barrier()
        with emit.when(lane.thread < ROWS):
            of_item = [emit.load_float(sums + lane.thread * 4, offset=i * ROWS * 4)[0] for i in range(spec.items)]
            total = emit.Float(0.0)
            for rank in range(active):
                factor = emit.load_float(down_scales, offset=4 * rank)[0] * emit.CODE_SCALE
                y = emit.round_bf16(of_item[rank] * factor)
                total = emit.fma(emit.load_float(mix, offset=4 * rank)[0], y, total)
            pieces = of_item[active:]
            shared = emit.round_bf16(sum(pieces[1:], pieces[0]) * (shared_scales[2] * emit.CODE_SCALE))
            emit.store_bf16(out + (block * ROWS + lane.thread) * 2, emit.round_bf16(total) + shared)
        with emit.when(emit.both(first_block, lane.thread.equals(0))):
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
            WARPS * 4,
            LOGITS * WARPS * 4,
            (rounds + 1) * one_sum,
            WARPS * ROWS * 4,
            20 * active,
            (rounds + 1) * tile_bytes,
            WARPS * down_bytes,
            LOGITS * row_bytes,
            row_bytes,
            (of_down + WARPS) * 8,
        ],
        grid=grid,
        warps=WARPS,
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


def _total(at: emit.Address) -> emit.Float:
    """The sum of the warps' floats, in order."""
    parts = [part for i in range(0, WARPS, 4) for part in emit.load_float(at, 4, offset=4 * i)]
    return sum(parts[1:], parts[0])


def _gate_up(at: emit.Address, row: emit.Int) -> list[emit.Float]:
    """Sums of a gate row and its up row over the warps, in order."""
    at = at + row * 4
    halves = [[emit.load_float(at, offset=(w * ROWS + 8 * h) * 4)[0] for w in range(WARPS)] for h in range(2)]
    return [sum(parts[1:], parts[0]) for parts in halves]


def _publish_pair(at: emit.Address, lane, tile: emit.Int, value: emit.Float, tag: emit.Int, there) -> None:
    """A lane has row (lane & 7) of 8 activations of a tile; the even ones publish theirs with the next one's."""
    pair = emit.to_bf16_pair(value, emit.shuffle_xor(value, 1))
    with emit.when(emit.both(there, (lane.lane & 1).equals(0))):
        emit.publish(at + (tile * 8 + (lane.lane & 7)) * 4, pair, tag)
