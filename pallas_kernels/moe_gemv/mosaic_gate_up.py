"""Gate, up and SwiGLU of the selected experts and of the shared one.

The work is cut into tiles of 8 gate rows + 8 up rows x D. A block takes the shared expert's tile of its own number for
all tokens, and every ``grid``-th of the (token, rank, tile) triples, one token each; its warps split the columns, so a
warp needs only its own slice of the activations. The order is made for latency:

    shared weights requested -> logits -> selection -> first routed weights requested -> activations staged
    -> shared product -> routed products, one group requested ahead -> one block barrier a group -> SwiGLU -> store

With one token every warp selects for itself, without a barrier, and requests an expert's weights as soon as it knows
that expert's number, before it looks for the next one.

Experts that several tokens share are read again from the L2 cache.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import emit, warp
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.layout import ROWS
from pallas_kernels.moe_gemv import mosaic_select
from pallas_kernels.moe_gemv.mosaic_select import LOG2E
from pallas_kernels.nvfp4_gemv.mosaic import silu_exact

WARPS = 8
GROUP = {True: 3, False: 1}  # routed tiles requested together: what fits the registers twice, NVFP4 or BF16
MAX_SHARED = 2  # shared tiles of a block


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about one kernel. tiles: of one expert; blocks: of 128 columns in a row."""

    tokens: int
    active: int
    experts: int
    tiles: int
    blocks: int
    shared_tiles: int
    nvfp4: bool
    cores: int
    sliced: bool  # the stacks hold one layer, and no index operand says which
    scales: int  # global scales of an expert as stored, some of them padding
    shared_scales: int  # of the shared expert

    @property
    def tasks(self) -> int:
        """(token, rank, tile) triples."""
        return self.tokens * self.active * self.tiles

    @property
    def grid(self) -> int:
        """As many blocks as give each the same number of triples, at most one a core."""
        return max(-(-self.tasks // self.rounds), min(self.shared_tiles, self.cores))

    @property
    def rounds(self) -> int:
        """Triples of a block."""
        return -(-self.tasks // self.cores)

    @property
    def width(self) -> int:
        """Activations of a token: its experts' in order of rank, then the shared expert's."""
        return 8 * (self.active * self.tiles + self.shared_tiles)


@emit.cached
def build(spec: Spec):
    """Jitted ([index], logits, x, words, scale, shared words, shared scale) -> [act [B, A*F + S], ids, weights]."""
    mosaic_select.check(spec.experts, spec.active)
    if spec.blocks % WARPS:
        raise KernelUnsupported(f"{spec.blocks * 128} columns are no multiple of {WARPS * 128}")
    shared_each = -(-spec.shared_tiles // spec.grid)
    if shared_each > MAX_SHARED:
        raise KernelUnsupported(f"{spec.shared_tiles} shared tiles for {spec.grid} blocks")
    group = min(GROUP[spec.nvfp4], spec.rounds)
    columns = warp.Columns(spec.tokens, spec.nvfp4)
    slice_blocks = spec.blocks // WARPS
    if slice_blocks > 2:
        raise KernelUnsupported(f"{spec.blocks * 128} columns do not fit the registers of {WARPS} warps")
    slice_bytes = slice_blocks * warp.block_bytes(spec.nvfp4)
    tile_bytes = spec.blocks * warp.block_bytes(spec.nvfp4)
    row_bytes = spec.blocks * 256 + warp.ROW_PAD
    slots = 8 * warp.column_tiles(spec.tokens)
    code_scale = emit.CODE_SCALE if spec.nvfp4 else 1.0
    one_sum = WARPS * ROWS * 4  # bytes: the warps' parts of a routed tile
    shared_sum = WARPS * ROWS * columns.count * 4

    def program(*addresses):
        index, logits, x, words, scale, shared_words, shared_scale, *rest = [None] * spec.sliced + list(addresses)
        act, ids_out, mix_out, *areas = rest
        chosen, sums, shared_sums, staged, small = areas
        lane, block = emit.Lane(), emit.block_index()
        layer = emit.Int(0) if spec.sliced else emit.load(index)[0]

        # What does not depend on the routing.
        shared_tiles = [block + i * spec.grid for i in range(shared_each)]
        shared_weights = []
        for tile in shared_tiles:
            at = shared_words.index(layer * spec.shared_tiles + tile.minimum(spec.shared_tiles - 1), tile_bytes)
            at = at + lane.warp * slice_bytes
            shared_weights.append(warp.load_slice(lane, at, slice_blocks, nvfp4=spec.nvfp4, single=columns.single))
        shared_scales = emit.load_float(shared_scale.index(layer, 4 * spec.shared_scales), 2)

        choice = (_OneToken if spec.tokens == 1 else _SeveralTokens)(spec, lane, logits, chosen)

        def place(i: emit.Int | int):
            """(token * A + rank, tile) of the block's i-th triple, or of the last one."""
            task = (block + emit.as_int(i) * spec.grid).minimum(spec.tasks - 1)
            return task // spec.tiles, task % spec.tiles

        def expert_of(i: emit.Int | int, pair: emit.Int) -> emit.Int:
            """Its expert's number in the stack."""
            most = min((i + 1) * spec.grid, spec.tasks) - 1 if isinstance(i, int) else spec.tasks - 1
            return layer * spec.experts + choice.expert(pair, most // spec.tiles)

        def request(start: emit.Int | int) -> list:
            """Words of a group of triples, flat, then the finishing thread's two global scales."""
            flat = []
            for j in range(group):
                pair, tile = place(start + j)
                at = words.index(expert_of(start + j, pair) * spec.tiles + tile, tile_bytes) + lane.warp * slice_bytes
                for block_words in warp.load_slice(lane, at, slice_blocks, nvfp4=spec.nvfp4, single=True):
                    flat += block_words
            mine = (lane.thread >> 3).minimum(group - 1) + start
            expert = expert_of(mine, place(mine)[0])
            return flat + emit.load_float(scale.index(expert, 4 * spec.scales), 2)

        held = request(0)
        stage = warp.Stage(
            lane,
            shared=staged,
            row_bytes=row_bytes,
            inverse=small,
            tokens=spec.tokens,
            blocks=slice_blocks,
            warps=WARPS,
            nvfp4=spec.nvfp4,
        )
        stage.plain(x, spec.blocks * 256)
        with emit.when(block.equals(0)):
            choice.store(ids_out, mix_out)
        emit.warp_barrier()
        here = staged + lane.warp * (slice_blocks * 256)

        for i, weights in enumerate(shared_weights):
            target = shared_sums + (lane.warp * (ROWS * columns.count * 4) + i * shared_sum)
            warp.multiply_slice(lane, columns, weights, stage, here, target)

        def finish(start: emit.Int | int, parity: emit.Int | int, held: list) -> None:
            *flat, gate_scale, up_scale = held
            area = sums + emit.as_int(parity) * (group * one_sum)
            per_tile = len(flat) // group
            for j in range(group):
                token = place(start + j)[0] // spec.active if spec.tokens > 1 else emit.Int(0)
                mine = flat[j * per_tile : (j + 1) * per_tile]
                width = per_tile // slice_blocks
                weights = [mine[b * width : (b + 1) * width] for b in range(slice_blocks)]
                low, high = warp.dot_row(lane, weights, here + token * row_bytes, nvfp4=spec.nvfp4)
                if spec.nvfp4:
                    (inverse,) = emit.load_float(stage.inverse_at(lane.warp, token))
                    low, high = low * inverse, high * inverse
                with emit.when(lane.q.equals(0)):
                    at = area + (lane.warp * (ROWS * 4) + lane.g * 4 + j * one_sum)
                    emit.store_float(at, low)
                    emit.store_float(at, high, offset=32)
            emit.barrier()
            j, row = lane.thread >> 3, lane.thread & 7
            number = start + j
            inside = emit.both(j < group, block + number * spec.grid < spec.tasks)
            with emit.when(emit.both(inside, number < spec.rounds)):
                at = area + (j * one_sum + row * 4)
                gate = _sum_warps(at, 0) * (gate_scale * code_scale)
                up = _sum_warps(at, 32) * (up_scale * code_scale)
                sigmoid = emit.reciprocal(emit.exp2(gate * -LOG2E) + 1.0)
                pair, tile = place(number)
                token, rank = pair // spec.active, pair % spec.active
                offset = (rank * spec.tiles + tile) * 8 + row
                emit.store_bf16(act + (token * spec.width + offset) * 2, gate * sigmoid * up)

        # The last group needs no successor; the shared tiles' sums are complete after any group's barrier.
        last = (spec.rounds - 1) // group * group

        def step(start: emit.Int, carry):
            parity, *held = carry
            following = request(start + group)
            finish(start, parity, held)
            return [parity ^ 1, *following]

        parity = emit.Int(0)
        if last:
            parity, *held = emit.loop(0, last, group, [parity, *held], step)
        finish(emit.Int(last), parity, held)
        for i, tile in enumerate(shared_tiles):
            _finish_shared(spec, lane, columns, tile, shared_sums + i * shared_sum, shared_scales, act)

    out = [
        jax.ShapeDtypeStruct((spec.tokens, spec.width), jnp.bfloat16),
        jax.ShapeDtypeStruct((spec.tokens, spec.active), jnp.int32),
        jax.ShapeDtypeStruct((spec.tokens, spec.active), jnp.float32),
    ]
    shared = [
        spec.tokens * spec.active * 4,
        2 * group * one_sum,
        shared_each * shared_sum,
        spec.tokens * row_bytes,
        WARPS * slots * 4,
    ]
    return emit.kernel(program, name="moe_gate_up", out=out, shared=shared, grid=spec.grid, warps=WARPS)


class _OneToken:
    """Every warp selects for itself; an expert is looked for when first asked for."""

    def __init__(self, spec: Spec, lane, logits, chosen):
        self.spec, self.lane = spec, lane
        self.keys, self.best = mosaic_select.keys_of(lane, logits, spec.experts), []

    def expert(self, pair: emit.Int, most: int) -> emit.Int:
        """The expert of ``pair``, which is at most ``most``."""
        while len(self.best) <= most:
            top, self.keys = mosaic_select.take_best(self.keys)
            self.best.append(top)
        key = self.best[0]
        for rank in range(1, most + 1):
            key = emit.select(pair.equals(rank), self.best[rank], key)
        return mosaic_select.expert_of(key)

    def store(self, ids_out: emit.Address, mix_out: emit.Address) -> None:
        """Write ids and weights; called by one block."""
        with emit.when(self.lane.thread.equals(0)):
            _store_choice(self.best, ids_out, mix_out)


class _SeveralTokens:
    """Warp w selects for tokens w, w + 8, ...; the experts' numbers go through shared memory."""

    def __init__(self, spec: Spec, lane, logits, chosen):
        self.spec, self.lane, self.chosen, self.best = spec, lane, chosen, []
        for start in range(0, spec.tokens, WARPS):
            token = (lane.warp + start).minimum(spec.tokens - 1)
            best = mosaic_select.select(lane, logits + token * (spec.experts * 2), spec.experts, spec.active)
            self.best.append(best)
            with emit.when(self._mine(start)):
                for rank, key in enumerate(best):
                    emit.store(chosen + token * (spec.active * 4), mosaic_select.expert_of(key), offset=4 * rank)
        emit.barrier()

    def _mine(self, start: int):
        return emit.both(self.lane.lane.equals(0), self.lane.warp + start < self.spec.tokens)

    def expert(self, pair: emit.Int, most: int) -> emit.Int:
        """The expert of ``pair``."""
        return emit.load(self.chosen + pair * 4)[0]

    def store(self, ids_out: emit.Address, mix_out: emit.Address) -> None:
        """Write ids and weights; called by one block."""
        for i, best in enumerate(self.best):
            first = (self.lane.warp + i * WARPS) * (self.spec.active * 4)
            with emit.when(self._mine(i * WARPS)):
                _store_choice(best, ids_out + first, mix_out + first)


def _store_choice(best, ids_out: emit.Address, mix_out: emit.Address) -> None:
    for rank, (key, weight) in enumerate(zip(best, mosaic_select.weights_of(best), strict=True)):
        emit.store(ids_out, mosaic_select.expert_of(key), offset=4 * rank)
        emit.store_float(mix_out, weight, offset=4 * rank)


def _sum_warps(at: emit.Address, offset: int) -> emit.Float:
    parts = [emit.load_float(at, offset=offset + w * ROWS * 4)[0] for w in range(WARPS)]
    return sum(parts[1:], parts[0])


def _finish_shared(spec: Spec, lane, columns, tile, sums, scales, act) -> None:
    """Add the warps, scale, round gate and up, SwiGLU, store. One (row, token) per thread and pass."""
    code_scale = emit.CODE_SCALE if spec.nvfp4 else 1.0
    width = columns.count * 4
    for start in range(0, 8 * spec.tokens, WARPS * 32):
        item = lane.thread + start
        row, token = item & 7, item >> 3
        with emit.when(emit.both(item < 8 * spec.tokens, tile < spec.shared_tiles)):
            totals = []
            for half in range(2):
                at = sums + (row * width + token * 4)
                offsets = [(w * ROWS + 8 * half) * width for w in range(WARPS)]
                parts = [emit.load_float(at, offset=offset)[0] for offset in offsets]
                totals.append(sum(parts[1:], parts[0]))
            gate, up = (
                emit.round_bf16(total * (scale * code_scale)) for total, scale in zip(totals, scales, strict=True)
            )
            offset = (spec.active * spec.tiles + tile) * 8 + row
            emit.store_bf16(act + (token * spec.width + offset) * 2, silu_exact(gate) * up)
