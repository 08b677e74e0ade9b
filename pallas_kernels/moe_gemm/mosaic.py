"""The grouped products for NVIDIA GPUs: weights unpacked into the register operand, tokens in shared memory.

Blocks stay for the whole launch and take items in turn: a tile of rows (of one expert) times some tiles of 16 weight
rows. Two groups of four warps share the tokens; each warp has whole weight tiles, whose words in memory are just what
its A operand needs (``layout``), so decode and prefill read one copy of the weights. Along the sum, pieces of 128
columns go through a ring in shared memory that runs ahead over the end of an item: while the last pieces of one item
are multiplied, the first ones of the next are on their way. A tile with few rows takes a narrower product.

Per 128 columns and tile of 128 rows a warp spends 25 instructions on unpacking for each wgmma of 64 cycles.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import device, emit
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.layout import BLOCK, ROWS, Tiles
from pallas_kernels.moe_gemm.routing import Groups

WARPS = 8
THREADS = 32 * WARPS
SHARED_BYTES = 225 << 10  # of a block, out of 227 KB
LOG2E = 1.4426950408889634
PIECE_BYTES = 2 * BLOCK  # of a token's 128 columns


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about one kernel."""

    experts: int
    tiles: int  # of 16 weight rows, of one expert
    blocks: int  # of 128 columns
    rows: int  # of a tile of tokens
    nvfp4: bool
    paired: bool  # gate and up: the result is their product; rows are gathered
    wide: bool  # by wgmma
    cores: int
    scales: int  # global scales of a layer as stored

    @property
    def groups(self) -> int:
        """Products of 64 weight rows that four warps do side by side."""
        return 2 if self.nvfp4 and self.tiles % 16 == 0 else 1

    @property
    def item_tiles(self) -> int:
        return WARPS * self.groups

    @property
    def items(self) -> int:
        """Items of a tile of rows."""
        return self.tiles // self.item_tiles

    @property
    def tile_bytes(self) -> int:
        """Bytes of 16 weight rows x 128 columns."""
        return 1152 if self.nvfp4 else 4096

    @property
    def weight_bytes(self) -> int:
        return self.item_tiles * self.tile_bytes

    @property
    def token_bytes(self) -> int:
        return self.rows * PIECE_BYTES

    @property
    def slot_bytes(self) -> int:
        """A piece of the ring: tokens, then weights; tokens lie in rows of 1,024 bytes."""
        return -(-(self.token_bytes + self.weight_bytes) // 1024) * 1024

    @property
    def out_features(self) -> int:
        """Of an item."""
        return self.item_tiles * (8 if self.paired else ROWS)

    @property
    def out_bytes(self) -> int:
        return self.rows * self.out_features * 2

    @property
    def stages(self) -> int:
        return max(2, min(self.blocks + 1, (SHARED_BYTES - self.out_bytes - 8 * self.rows) // self.slot_bytes))

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows that a product is compiled for."""
        step = 16 if self.rows == 128 else 8 if self.rows == 32 else 16
        least = {128: 48, 64: 16, 32: 8}[self.rows]
        return tuple(range(least, self.rows + 1, step))


def gate_up(x, groups: Groups, weight: Tiles, layer):
    """See ``api.gate_up``."""
    return _run(x, groups, weight, layer, paired=True)


def down(act, groups: Groups, weight: Tiles, layer):
    """See ``api.down``."""
    return _run(act, groups, weight, layer, paired=False)


def _run(x, groups: Groups, weight: Tiles, layer, *, paired: bool):
    if not isinstance(weight, Tiles):
        raise KernelUnsupported(f"weights stored as {type(weight).__name__}")
    rows, columns = weight.shape[-2:]
    if x.dtype != jnp.bfloat16 or weight.words.ndim != 5 or weight.paired != paired:
        raise KernelUnsupported(f"activations of {x.dtype}, weights of rank {weight.words.ndim}")
    if len(weight.segments) != (2 if paired else 1):
        raise KernelUnsupported(f"segments {weight.segments}")
    if rows % (WARPS * ROWS) or columns % BLOCK:
        raise KernelUnsupported(f"weights of {rows} x {columns}, no multiples of {WARPS * ROWS} x {BLOCK}")
    if x.shape[0] * columns * 2 >= 1 << 32:
        raise KernelUnsupported(f"{x.shape[0]} rows of {columns}: more than 4 GB")
    layers, experts = weight.words.shape[:2]
    here = device.current()
    scales = weight.global_scale.size // layers
    spec = Spec(
        experts,
        rows // ROWS,
        columns // BLOCK,
        groups.rows,
        weight.nvfp4,
        paired,
        here.capability[0] == 9,
        here.cores,
        scales,
    )
    operands = (emit.index_operand(layer), groups.total, groups.expert, groups.count, groups.token)
    (out,) = kernel(spec, groups.token.shape[0])(*operands, x, weight.words, weight.global_scale)
    return out


@emit.cached
def kernel(spec: Spec, places: int):
    """(index, total, expert, count, token, x, words, scale) -> [bfloat16 [places, features]]."""
    features = spec.tiles * (8 if spec.paired else ROWS)

    def program(index, total, expert, count, token, x, words, scale, out, ring, stage, table):
        _program(spec, index, total, expert, count, token, x, words, scale, out, ring, stage, table)

    return emit.kernel(
        program,
        name="moe_gemm_gate_up" if spec.paired else "moe_gemm_down",
        out=[jax.ShapeDtypeStruct((places, features), jnp.bfloat16)],
        shared=[spec.stages * spec.slot_bytes, spec.out_bytes, 8 * spec.rows],
        grid=spec.cores,
        warps=WARPS,
    )


class _Item:
    """Where an item's operands are. number: of the item; live: whether it exists."""

    def __init__(self, spec: Spec, number: emit.Int, total: emit.Int, expert: emit.Address, first: emit.Address):
        self.live = number < total
        safe = number.minimum(total - 1)
        self.tile, self.part = safe // spec.items, safe % spec.items
        self.expert = emit.load(expert + self.tile * 4)[0]
        self.first = first


def _program(spec, index, total, expert, count, token, x, words, scale, out, ring, stage, table):
    lane = emit.Lane()
    (layer,) = emit.load(index)
    items = emit.load(total)[0] * spec.items
    layer_words = words.index(layer, spec.experts * spec.tiles * spec.blocks * spec.tile_bytes)
    copies = _Copies(spec, lane, x, layer_words, ring, table)
    begin = emit.block_index()

    with emit.when(begin < items):
        first = _Item(spec, begin, items, expert, token)
        if spec.paired:
            copies.tabulate(token, first.tile, emit.Int(0))
            emit.barrier()
        for b in range(spec.stages - 1):
            copies.start(first, emit.Int(b), emit.Int(b), emit.Int(0))
            emit.copies_commit()

        def body(number, carry):
            slot, parity = carry
            mine = _Item(spec, number, items, expert, token)
            following = _Item(spec, number + spec.cores, items, expert, token)
            if spec.paired:
                copies.tabulate(token, following.tile, parity ^ 1)
            (real,) = emit.load(count + mine.tile * 4)
            least = 0
            for width in spec.widths:
                last = width == spec.widths[-1]
                chosen = real >= least + 1 if last else emit.both(real >= least + 1, real < width + 1)
                with emit.when(chosen):
                    _item(spec, lane, copies, mine, following, width, real, slot, parity, scale, layer, stage, out)
                least = width
            slot = slot + spec.blocks % spec.stages
            return [emit.select(slot < spec.stages, slot, slot - spec.stages), parity ^ 1]

        emit.loop(begin, items, spec.cores, [emit.Int(0), emit.Int(0)], body)


class _Copies:
    """Brings pieces into the ring."""

    def __init__(self, spec: Spec, lane: emit.Lane, x, words, ring, table):
        self.spec, self.lane, self.x, self.words, self.ring, self.table = spec, lane, x, words, ring, table
        # Tokens: 16 lanes take a row's 256 bytes; the place of a 16-byte piece depends on the row's low bits.
        self.row, piece = lane.thread >> 4, lane.thread & 15
        self.piece = piece * 16
        self.token_at = (
            (piece >> 3) * (spec.rows * emit.ROW) + self.row * emit.ROW + (((piece & 7) ^ (self.row & 7)) << 4)
        )
        # Weights: so many lanes take a tile.
        self.share = THREADS // spec.item_tiles
        self.weight_tile, self.weight_piece = lane.thread // self.share, (lane.thread % self.share) * 16

    def tabulate(self, token: emit.Address, tile: emit.Int, parity: emit.Int) -> None:
        """Where the rows of a tile begin, into shared memory; a barrier must follow."""
        spec = self.spec
        with emit.when(self.lane.thread < spec.rows):
            (row,) = emit.load(token + ((tile * spec.rows + self.lane.thread) * 4))
            emit.store(
                self.table + (parity * (4 * spec.rows) + self.lane.thread * 4), row * (spec.blocks * PIECE_BYTES)
            )

    def start(self, item: _Item, block: emit.Int, slot: emit.Int, parity: emit.Int) -> None:
        """Request piece ``block`` of an item into ``slot``."""
        spec = self.spec
        at = self.ring + slot * spec.slot_bytes
        for i in range(spec.rows * 16 // THREADS):
            if spec.paired:
                (offset,) = emit.load(self.table + (parity * (4 * spec.rows) + self.row * 4), offset=64 * i)
            else:
                offset = (item.tile * spec.rows + self.row + 16 * i) * (spec.blocks * PIECE_BYTES)
            source = self.x + (offset + block * PIECE_BYTES + self.piece)
            emit.copy16(at + (self.token_at + 16 * emit.ROW * i), source, item.live)
        weights = at + (self.weight_tile * spec.tile_bytes + self.weight_piece) + spec.token_bytes
        number = (item.expert * spec.items + item.part) * spec.item_tiles + self.weight_tile
        source = self.words.index(number * spec.blocks + block, spec.tile_bytes) + self.weight_piece
        whole, rest = divmod(spec.tile_bytes // 16, self.share)
        for i in range(whole):
            emit.copy16(weights + 16 * self.share * i, source + 16 * self.share * i, item.live)
        if rest:
            with emit.when(self.weight_piece < 16 * rest):
                emit.copy16(weights + 16 * self.share * whole, source + 16 * self.share * whole, item.live)


def _item(spec, lane, copies, mine, following, width, real, slot, parity, scale, layer, stage, out):
    """One item: all pieces, then the result."""
    group, warp = lane.warp >> 2, lane.warp & 3
    ahead = spec.stages - 1
    zeros = [emit.Float(0.0)] * (spec.groups * width // 2)

    def piece(block, carry):
        slot, *sums = carry
        emit.copies_wait(spec.stages - 2)
        emit.async_fence()
        emit.barrier()  # everybody's copies are there, and nobody multiplies the slot that is filled next
        coming = block + ahead
        over = coming >= spec.blocks
        target = slot + ahead
        target = emit.select(target < spec.stages, target, target - spec.stages)
        chosen = _Chosen(over, mine, following)
        copies.start(
            chosen, emit.select(over, coming - spec.blocks, coming), target, emit.select(over, parity ^ 1, parity)
        )
        emit.copies_commit()
        sums = _multiply(spec, lane, copies.ring + slot * spec.slot_bytes, sums, width, group, warp)
        slot = slot + 1
        return [emit.select(slot < spec.stages, slot, emit.Int(0)), *sums]

    _, *sums = emit.loop(0, spec.blocks, 1, [slot, *zeros], piece)
    (_deliver_act if spec.paired else _deliver)(
        spec, lane, sums, mine, width, real, group, warp, scale, layer, stage, out
    )


class _Chosen:
    """One item or the other."""

    def __init__(self, other, a: _Item, b: _Item):
        self.live = emit.either(emit.negate(other), b.live)
        self.tile, self.part = emit.select(other, b.tile, a.tile), emit.select(other, b.part, a.part)
        self.expert = emit.select(other, b.expert, a.expert)


def _multiply(spec: Spec, lane, at: emit.Address, sums, width: int, group, warp):
    """Add 128 columns' products."""
    weights = []
    for m in range(spec.groups):
        tile = at + (((group * spec.groups + m) * 4 + warp) * spec.tile_bytes) + spec.token_bytes
        if spec.nvfp4:
            codes = emit.load(tile + lane.lane * 16, 4) + emit.load(tile + lane.lane * 16, 4, offset=512)
            weights.append((codes, emit.load(tile + lane.g * 16, 4, offset=1024)))
        else:
            weights.append((tile + lane.lane * 16, None))
    half = width // 2
    parts = [sums[m * half : (m + 1) * half] for m in range(spec.groups)]
    quads = {}
    for i in range(8):
        values = at + ((i // 4) * (spec.rows * emit.ROW) + 32 * (i % 4))
        for m in range(spec.groups):
            codes, scales = weights[m]
            if spec.nvfp4:
                if i % 2 == 0:
                    quads[m] = emit.e4m3_bf16(scales[i // 2])
                by_half = quads[m][i % 2], quads[m][2 + i % 2]
                decoded = emit.decode_codes_bf16(codes[i])
                operand = [emit.multiply_bf16_pair(decoded[j], by_half[j % 2]) for j in range(4)]
            else:
                operand = emit.load(codes, 4, offset=512 * i)
            parts[m] = emit.multiply_group(spec.wide, parts[m], operand, values, columns=width)
            if i or m:
                emit.group_wait(1, wide=spec.wide)
    return emit.group_wait(0, [value for part in parts for value in part], wide=spec.wide)


def _scales(spec: Spec, scale: emit.Address, layer, expert) -> list[emit.Float]:
    """Global scales of the item's expert, with what undoes the unpacking's factor."""
    segments = 2 if spec.paired else 1
    at = scale.index(layer, spec.scales * 4) + expert * (4 * spec.scales // spec.experts)
    factor = emit.WEIGHT_SCALE if spec.nvfp4 else 1.0
    return [emit.load_float(at, offset=4 * i)[0] * factor for i in range(segments)]


def _deliver_act(spec, lane, sums, mine, width, real, group, warp, scale, layer, stage, out):
    """bf16(silu(gate) * up) by way of shared memory, in product order."""
    gate_scale, up_scale = _scales(spec, scale, layer, mine.expert)
    pitch = spec.out_features * 2
    words = {}
    for m in range(spec.groups):
        for j in range(width // 8):
            part = sums[m * width // 2 + 4 * j : m * width // 2 + 4 * j + 4]
            act = []
            for e in range(2):
                gate, up = part[e] * gate_scale, part[2 + e] * up_scale
                act.append(emit.divide(gate, emit.exp2(gate * -LOG2E) + 1.0) * up)
            words[m, j] = emit.to_bf16_pair(*act)
    # A matrix: 8 features of a tile x 8 tokens. Four of them: four times 8 tokens.
    for m in range(spec.groups):
        chunk = (group * spec.groups + m) * 4 + warp
        for j in range(0, width // 8, 4):
            four = [words[m, min(j + i, width // 8 - 1)] for i in range(4)]
            matrix = (lane.lane >> 3).minimum(width // 8 - 1 - j)
            row = (matrix + j) * 8 + (lane.lane & 7)
            emit.store_matrices(stage + (row * pitch + ((chunk ^ (row & 7)) << 4)), four)
    emit.barrier()
    pairs = spec.out_features // 16
    steps = -(-width * pairs // THREADS)
    for step in range(steps):
        place = lane.thread + step * THREADS
        row, pair = place // pairs, place % pairs
        with emit.when(row < real):
            at = stage + row * pitch
            low = emit.load(at + (((pair * 2) ^ (row & 7)) << 4), 4)
            high = emit.load(at + (((pair * 2 + 1) ^ (row & 7)) << 4), 4)
            to = out.index(mine.tile * spec.rows + row, spec.tiles * 16) + (mine.part * pitch + pair * 32)
            emit.store(to, low[0], low[2], high[0], high[2])
            emit.store(to, low[1], low[3], high[1], high[3], offset=16)


def _deliver(spec, lane, sums, mine, width, real, group, warp, scale, layer, stage, out):
    """bf16(sum * scale) by way of shared memory."""
    (factor,) = _scales(spec, scale, layer, mine.expert)
    pitch = spec.out_features * 2
    for m in range(spec.groups):
        chunk = ((group * spec.groups + m) * 4 + warp) * 2
        for j in range(0, width // 8, 2):
            four = []
            for i in range(2):
                at = m * width // 2 + 4 * min(j + i, width // 8 - 1)
                part = [value * factor for value in sums[at : at + 4]]
                four += [emit.to_bf16_pair(*part[:2]), emit.to_bf16_pair(*part[2:])]
            matrix = lane.lane >> 3
            row = ((matrix >> 1).minimum(width // 8 - 1 - j) + j) * 8 + (lane.lane & 7)
            emit.store_matrices(stage + (row * pitch + (((chunk + (matrix & 1)) ^ (row & 7)) << 4)), four)
    emit.barrier()
    pieces = spec.out_features // 8
    for step in range(-(-width * pieces // THREADS)):
        place = lane.thread + step * THREADS
        row, piece = place // pieces, place % pieces
        with emit.when(row < real):
            data = emit.load(stage + (row * pitch + ((piece ^ (row & 7)) << 4)), 4)
            to = out.index(mine.tile * spec.rows + row, spec.tiles * 32) + (mine.part * pitch + piece * 16)
            emit.store(to, *data)
