"""The GEMV kernels for NVIDIA GPUs.

``split``: a block owns a tile of 16 rows; its warps split the columns; every weight is requested at the very start,
before the activations are looked at. For matrices of up to some ten megabytes, where latency is what costs.

``stream``: every warp owns whole tiles and pulls them through a private ring in shared memory with the copy engine; no
block barrier in the loop. For the head, where bandwidth is what costs.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import device, emit, tuned, warp
from pallas_kernels.add_rms_norm.mosaic import add_rms_norm
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.layout import ROWS, Tiles

MAX_TOKENS = 16
MAX_NORM_TOKENS = 2  # with 4, repeating the norm in each block costs more (7.5 us) than its own kernel (5.0 + 1.4)
RING_UNITS, UNIT_BLOCKS = 4, 4  # measured best on an H200: 4 units of 4.6 KB per warp
LOG2E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about one kernel; equal specs share one compiled kernel."""

    tiles: int
    blocks: int  # of 128 columns, in a whole row
    tokens: int
    nvfp4: bool
    paired: bool
    segment_tiles: tuple[int, ...]  # tiles of each segment (one entry when paired)
    norm: str  # "none", "norm" (no addition), "add" (residual + x first)
    eps: float
    epilogue: str  # "none", "swiglu", "logits"
    normed_out: bool
    warps: int
    scales_stored: int  # global scales of a layer as stored, some of them padding
    sliced: bool  # the stacks hold one layer, and no index operand says which

    @property
    def columns(self) -> int:
        return self.blocks * 128

    @property
    def rows_out(self) -> int:
        return self.tiles * (8 if self.epilogue == "swiglu" else ROWS)


def warps_for(blocks: int, nvfp4: bool, norm: bool = False) -> int:
    """Warps per block, a multiple of 4 that divides: about 4 blocks of weights in flight per warp, 2 for BF16 weights
    and in front of a fused norm, which more warps get over with sooner (qkv: 4.6 us with 8, 4.8 with 4)."""
    wish = blocks // (4 if nvfp4 and not norm else 2)
    fitting = [w for w in (4, 8, 12, 16) if blocks % w == 0]
    if not fitting:
        raise KernelUnsupported(f"{blocks * 128} columns do not split over 4, 8, 12 or 16 warps in blocks of 128")
    return min(fitting, key=lambda w: (abs(w - wish), w))


def gemv(x, weight: Tiles, layer, *, norm=None, epilogue="none", normed_out=False, warps=None):
    """See ``api.gemv``."""
    from pallas_kernels.nvfp4_gemv.api import Result

    tokens = x.shape[0]
    if norm is not None and tokens > MAX_NORM_TOKENS:
        normed, residual = add_rms_norm(x, norm.weight, norm.layer, residual=norm.residual, eps=norm.eps)
        result = gemv(normed, weight, layer, epilogue=epilogue, warps=warps)
        keep = norm.residual is not None
        return result._replace(residual=residual if keep else None, normed=normed if normed_out else None)
    spec = _spec(x, weight, norm, epilogue, normed_out, warps)
    (words, scale), sliced = emit.slice_layer(layer, weight.words, weight.global_scale)
    (norm_weight,), norm_sliced = ((None,), True) if norm is None else emit.slice_layer(norm.layer, norm.weight)
    if sliced and norm_sliced:
        spec, operands = dataclasses.replace(spec, sliced=True), [x, words, scale]
    else:
        words, scale, norm_weight = weight.words, weight.global_scale, None if norm is None else norm.weight
        operands = [emit.index_operand(layer, 0 if norm is None else norm.layer), x, words, scale]
    if norm is not None:
        operands += [norm_weight] + ([] if norm.residual is None else [norm.residual])
    if epilogue == "logits" and weight.nvfp4:
        outputs = iter(stream(spec, device.current().cores)(*operands))
    else:
        outputs = iter(split(spec)(*operands))
    return Result(
        next(outputs),
        next(outputs) if epilogue == "logits" else None,
        next(outputs) if spec.norm == "add" else None,
        next(outputs) if normed_out else None,
    )


def _spec(x, weight: Tiles, norm, epilogue: str, normed_out: bool, warps: int | None) -> Spec:
    tokens, columns = x.shape
    rows, width = weight.shape[-2:]
    if width != columns:
        raise ValueError(f"activations of {columns} columns, weights of {width}")
    if not isinstance(weight, Tiles):
        raise KernelUnsupported(f"weights stored as {type(weight).__name__}")
    if tokens > MAX_TOKENS:
        raise KernelUnsupported(f"{tokens} tokens; the kernel takes up to {MAX_TOKENS}")
    if x.dtype != jnp.bfloat16 or weight.words.ndim != 4:
        raise KernelUnsupported(f"activations of {x.dtype}, weights of rank {weight.words.ndim}")
    if weight.paired != (epilogue == "swiglu"):
        raise KernelUnsupported(f"epilogue {epilogue} with paired = {weight.paired} tiles")
    if any(n % ROWS for n in weight.segments):
        raise KernelUnsupported(f"segments {weight.segments} are no multiples of {ROWS}")
    blocks = columns // 128
    if warps is None:
        key = f"{rows}x{columns} m{tokens} {'nvfp4' if weight.nvfp4 else 'bf16'}{' norm' if norm is not None else ''}"
        rule = {"warps": warps_for(blocks, weight.nvfp4, norm is not None)}
        streamed = epilogue == "logits" and weight.nvfp4  # has no choice
        warps = rule["warps"] if streamed else tuned.lookup("nvfp4_gemv", key, rule)["warps"]
    if blocks % warps or warps % 4 or warps > 16:
        raise ValueError(f"{warps} warps for {blocks} blocks of columns: expected 4, 8, 12 or 16, a divisor")
    return Spec(
        tiles=rows // ROWS,
        blocks=blocks,
        tokens=tokens,
        nvfp4=weight.nvfp4,
        paired=weight.paired,
        segment_tiles=(rows // ROWS,) if weight.paired else tuple(n // ROWS for n in weight.segments),
        norm="none" if norm is None else "norm" if norm.residual is None else "add",
        eps=0.0 if norm is None else norm.eps,
        epilogue=epilogue,
        normed_out=normed_out,
        warps=warps,
        scales_stored=weight.global_scale.shape[-1],
        sliced=False,
    )


def _outputs(spec: Spec):
    dtype = jnp.float32 if spec.epilogue == "logits" else jnp.bfloat16
    out = [jax.ShapeDtypeStruct((spec.tokens, spec.rows_out), dtype)]
    if spec.epilogue == "logits":
        out.append(jax.ShapeDtypeStruct((spec.tokens, spec.tiles), jnp.float32))
    if spec.norm == "add":
        out.append(jax.ShapeDtypeStruct((spec.tokens, spec.columns), jnp.bfloat16))
    if spec.normed_out:
        out.append(jax.ShapeDtypeStruct((spec.tokens, spec.columns), jnp.bfloat16))
    return out


@dataclasses.dataclass
class _Operands:
    """The kernel's references as addresses, by name."""

    index: emit.Address | None
    x: emit.Address
    words: emit.Address
    scale: emit.Address
    norm: emit.Address | None
    residual: emit.Address | None
    out: emit.Address
    tile_max: emit.Address | None
    residual_out: emit.Address | None
    normed_out: emit.Address | None


def _name_operands(spec: Spec, addresses) -> _Operands:
    at = iter(addresses)
    take = lambda present: next(at) if present else None  # noqa: E731
    inputs = [take(not spec.sliced), *(next(at) for _ in range(3))]
    norm, residual = take(spec.norm != "none"), take(spec.norm == "add")
    return _Operands(
        *inputs,
        norm,
        residual,
        next(at),
        take(spec.epilogue == "logits"),
        take(spec.norm == "add"),
        take(spec.normed_out),
    )


def _layers(ops: _Operands) -> list[emit.Int]:
    """Where in their stacks the weights and the norm's weights lie."""
    return [emit.Int(0), emit.Int(0)] if ops.index is None else emit.load(ops.index, 2)


def _stage(
    spec: Spec,
    lane,
    ops: _Operands,
    layer_of_norm: emit.Int,
    staged: emit.Address,
    inverse: emit.Address,
    scratch: emit.Address,
    *,
    common: bool,
) -> warp.Stage:
    stage = warp.Stage(
        lane,
        shared=staged,
        row_bytes=_row_bytes(spec),
        inverse=inverse,
        tokens=spec.tokens,
        blocks=spec.blocks // spec.warps,
        warps=spec.warps,
        nvfp4=spec.nvfp4,
        common=common,
    )
    row_bytes = spec.columns * 2
    if spec.norm == "none":
        stage.plain(ops.x, row_bytes)
        return stage
    stage.normed(
        ops.x if spec.norm == "add" else None,
        ops.residual if spec.norm == "add" else ops.x,
        ops.norm.index(layer_of_norm, row_bytes),
        spec.eps,
        scratch=scratch,
        row_bytes=row_bytes,
        residual_out=ops.residual_out,
        normed_out=ops.normed_out,
    )
    return stage


def _row_bytes(spec: Spec) -> int:
    return spec.columns * 2 + warp.ROW_PAD


def _segment(spec: Spec, tile: emit.Int) -> emit.Int:
    """Which segment a tile's rows belong to (unpaired)."""
    segment, edge = emit.Int(0), 0
    for width in spec.segment_tiles[:-1]:
        edge += width
        segment = emit.select(tile >= edge, segment + 1, segment)
    return segment


def _global_scale(spec: Spec, ops: _Operands, layer: emit.Int, segment: emit.Int | int) -> emit.Float:
    """The segment's scale, with the factor that the decoded codes lack."""
    at = ops.scale.index(layer * spec.scales_stored + segment, 4)
    return emit.load_float(at)[0] * (emit.CODE_SCALE if spec.nvfp4 else 1.0)


def silu_exact(gate: emit.Float) -> emit.Float:
    """gate / (1 + exp(-gate)) with an IEEE division."""
    return emit.divide(gate, emit.exp2(gate * -LOG2E) + 1.0)


# -- split ---------------------------------------------------------------------------------------------------------


@emit.cached
def split(spec: Spec):
    """Jitted kernel for ``spec``: one tile per block, columns split over the warps."""
    columns = warp.Columns(spec.tokens, spec.nvfp4)
    blocks = spec.blocks // spec.warps
    slots = 8 * warp.column_tiles(spec.tokens)

    def program(*addresses):
        *named, sums, staged, small = addresses
        ops = _name_operands(spec, named)
        lane = emit.Lane()
        tile = emit.block_index()
        layer, layer_of_norm = _layers(ops)
        at = ops.words.index(layer * spec.tiles + tile, spec.blocks * warp.block_bytes(spec.nvfp4))
        at = at + lane.warp * (blocks * warp.block_bytes(spec.nvfp4))
        weights = warp.load_slice(lane, at, blocks, nvfp4=spec.nvfp4, single=columns.single)
        # Requested now: at the end, where they are used, each would be a trip to memory of its own.
        scales = [_global_scale(spec, ops, layer, s) for s in ((0, 1) if spec.paired else (_segment(spec, tile),))]

        scratch = small + spec.warps * slots * 4
        stage = _stage(spec, lane, ops, layer_of_norm, staged, small, scratch, common=False)
        emit.warp_barrier()

        mine = sums + lane.warp * (ROWS * columns.count * 4)
        slice_start = staged + lane.warp * (blocks * 256)
        warp.multiply_slice(lane, columns, weights, stage, slice_start, mine)
        emit.barrier()
        _finish(spec, ops, lane, tile, sums, columns, scales)

    return emit.kernel(
        program,
        name=f"gemv_{spec.epilogue}",
        out=_outputs(spec),
        shared=[spec.warps * ROWS * columns.count * 4, spec.tokens * _row_bytes(spec), 2 * spec.warps * slots * 4],
        grid=spec.tiles,
        warps=spec.warps,
    )


def _finish(spec: Spec, ops: _Operands, lane, tile: emit.Int, sums: emit.Address, columns, scales) -> None:
    """Add the warps' sums in order, apply the global scale and the epilogue, store."""
    rows = 8 if spec.epilogue == "swiglu" else ROWS
    width = columns.count * 4

    def total(row: emit.Int, token: emit.Int) -> emit.Float:
        at = sums + (row * width + token * 4)
        parts = [emit.load_float(at, offset=w * ROWS * width)[0] for w in range(spec.warps)]
        return sum(parts[1:], parts[0])

    count, threads = rows * spec.tokens, spec.warps * 32
    for start in range(0, count, threads):
        item = lane.thread + start
        with emit.when(item < count):
            row, token = item % rows, item // rows
            place = token * spec.rows_out + tile * rows + row
            if spec.epilogue == "swiglu":
                gate = emit.round_bf16(total(row, token) * scales[0])
                up = emit.round_bf16(total(row + 8, token) * scales[1])
                emit.store_bf16(ops.out + place * 2, silu_exact(gate) * up)
            elif spec.epilogue == "logits":
                emit.store_float(ops.out + place * 4, total(row, token) * scales[0])
            else:
                emit.store_bf16(ops.out + place * 2, total(row, token) * scales[0])
    if spec.epilogue == "logits":
        with emit.when(lane.thread < spec.tokens):
            token = lane.thread
            best = total(emit.Int(0), token)
            for row in range(1, ROWS):
                best = best.maximum(total(emit.Int(row), token), nan=True)
            emit.store_float(ops.tile_max + (token * spec.tiles + tile) * 4, best * scales[0])


# -- stream --------------------------------------------------------------------------------------------------------


@emit.cached
def stream(spec: Spec, cores: int = 132, warps: int = 8):
    """Jitted kernel for ``spec``: one block per core, every warp streams whole tiles."""
    spec = dataclasses.replace(spec, warps=warps)
    if spec.blocks % (warps * 1) or spec.blocks % UNIT_BLOCKS:
        raise KernelUnsupported(f"{spec.columns} columns do not stream in units of {UNIT_BLOCKS * 128}")
    columns = warp.Columns(spec.tokens, True)
    slots = 8 * warp.column_tiles(spec.tokens)
    unit_bytes = UNIT_BLOCKS * warp.NVFP4_BYTES
    units = spec.blocks // UNIT_BLOCKS  # of a tile
    workers = cores * warps

    def program(*addresses):
        *named, staged, small, ring, arrivals = addresses
        ops = _name_operands(spec, named)
        lane = emit.Lane()
        worker = emit.block_index() * warps + lane.warp
        leader = lane.lane.equals(0)
        layer, layer_of_norm = _layers(ops)
        base = ops.words.index(layer * spec.tiles, spec.blocks * warp.NVFP4_BYTES)
        ring = ring + lane.warp * (RING_UNITS * unit_bytes)
        arrivals = arrivals + lane.warp * (RING_UNITS * 8)
        tiles_here = (emit.Int(spec.tiles - 1 + workers) - worker) // workers
        count = tiles_here * units

        def request(unit: emit.Int, slot: emit.Int | int) -> None:
            tile = worker + unit // units * workers
            source = base.index(tile, spec.blocks * warp.NVFP4_BYTES) + unit % units * unit_bytes
            slot = emit.as_int(slot)
            emit.bulk_copy(ring + slot * unit_bytes, source, unit_bytes, arrivals + slot * 8)

        with emit.when(leader):
            for slot in range(RING_UNITS):
                emit.arrival_init(arrivals + slot * 8)
            emit.arrival_fence()
            for slot in range(RING_UNITS):
                with emit.when(emit.Int(slot) < count):
                    request(emit.Int(slot), slot)

        scratch = small + warps * slots * 4
        stage = _stage(spec, lane, ops, layer_of_norm, staged, small, scratch, common=True)
        emit.barrier()
        scale = _global_scale(spec, ops, layer, 0)
        rows = warp.token_rows(lane, staged, _row_bytes(spec), spec.tokens)
        chains = 1 if columns.single else UNIT_BLOCKS if spec.tokens <= 8 else 2
        zeros = [emit.Float(0.0)] * (2 if columns.single else 4 * len(rows) * chains)
        if columns.single:
            inverse = [emit.load_float(stage.inverse_at(emit.Int(0), 0))[0]]
        else:
            inverse = [
                v
                for c in range(len(rows))
                for v in emit.load_float(stage.inverse_at(emit.Int(0), lane.q * 2 + 8 * c), 2)
            ]

        def step(unit: emit.Int, carry):
            part, slot, parity, *sums = carry
            emit.arrival_wait(arrivals + slot * 8, parity)
            here = ring + slot * unit_bytes
            weights = warp.load_slice(lane, here, UNIT_BLOCKS, nvfp4=True, single=columns.single)
            offset = part * (UNIT_BLOCKS * 256)
            if columns.single:
                parts = warp.dot_partial(lane, weights, staged + offset, chains=1)
                sums = [total + part for total, part in zip(sums, parts, strict=True)]
            else:
                groups = [[sums[4 * (c + len(rows) * k) :][:4] for c in range(len(rows))] for k in range(chains)]
                here_rows = [row + offset for row in rows]
                for b, words in enumerate(weights):
                    k = b % chains
                    groups[k] = warp.dot_tokens(groups[k], words, here_rows, b, nvfp4=True)
                sums = [value for group in groups for quad in group for value in quad]
            emit.warp_barrier()
            following = unit + RING_UNITS
            with emit.when(emit.both(leader, following < count)):
                request(following, slot)
            last = part.equals(units - 1)
            with emit.when(last):
                tile = worker + unit // units * workers
                if columns.single:
                    _store_single(spec, ops, lane, tile, sums, scale * inverse[0])
                else:
                    _store_tokens(spec, ops, lane, tile, sums, len(rows), chains, scale, inverse)
            wrapped = slot.equals(RING_UNITS - 1)
            sums = [emit.select(last, zero, value) for zero, value in zip(zeros, sums, strict=True)]
            return [
                emit.select(last, 0, part + 1),
                emit.select(wrapped, 0, slot + 1),
                emit.select(wrapped, parity ^ 1, parity),
                *sums,
            ]

        emit.loop(0, count, 1, [emit.Int(0), emit.Int(0), emit.Int(0), *zeros], step)

    return emit.kernel(
        program,
        name="gemv_stream",
        out=_outputs(spec),
        shared=[
            spec.tokens * _row_bytes(spec),
            2 * warps * slots * 4,
            warps * RING_UNITS * unit_bytes,
            8 * warps * RING_UNITS,
        ],
        grid=cores,
        warps=warps,
    )


def _store_single(spec: Spec, ops: _Operands, lane, tile: emit.Int, sums, scale: emit.Float) -> None:
    low, high = (emit.sum_lanes(value, (1, 2)) * scale for value in sums)
    with emit.when(lane.q.equals(0)):
        at = ops.out + (tile * ROWS + lane.g) * 4
        emit.store_float(at, low)
        emit.store_float(at, high, offset=32)
    best = low.maximum(high, nan=True)
    for distance in (4, 8, 16):
        best = best.maximum(emit.shuffle_xor(best, distance), nan=True)
    with emit.when(lane.lane.equals(0)):
        emit.store_float(ops.tile_max + tile * 4, best)


def _store_tokens(
    spec: Spec, ops: _Operands, lane, tile: emit.Int, sums, tiles: int, chains: int, scale, inverse
) -> None:
    for c in range(tiles):
        quads = [sums[4 * (c + tiles * k) :][:4] for k in range(chains)]
        total = [sum(parts[1:], parts[0]) for parts in zip(*quads, strict=True)]
        values = [value * (scale * inverse[2 * c + i % 2]) for i, value in enumerate(total)]
        for i in range(2):
            token = lane.q * 2 + 8 * c + i
            best = values[i].maximum(values[2 + i], nan=True)
            for distance in (4, 8, 16):
                best = best.maximum(emit.shuffle_xor(best, distance), nan=True)
            with emit.when(token < spec.tokens):
                at = ops.out + (token * (spec.tiles * ROWS) + tile * ROWS + lane.g) * 4
                emit.store_float(at, values[i])
                emit.store_float(at, values[2 + i], offset=32)
                with emit.when(lane.g.equals(0)):
                    emit.store_float(ops.tile_max + (token * spec.tiles + tile) * 4, best)
