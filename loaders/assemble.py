"""Tensors of a checkpoint -> the weight tree on the device, streamed.

Pieces of at most PIECE_BYTES are copied from the mapped file by threads, ahead of the transfers, and put into place
(place.py). Host memory is bounded by a few pieces, whatever the size of the model, and the pages of the mapped file are
given back as soon as they are used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from tqdm import tqdm

from flint_jax.errors import CheckpointError
from loaders import place
from loaders.name_map import Fill, Leaf, Plan
from loaders.parts import scale_refusal
from loaders.place import PACKED, PLAIN, SCALED, BadScale, DeviceLeaf, HostLeaf, planes_of
from loaders.raw import DTYPES, NVFP4, RawTensor, short
from pallas_kernels import nvfp4

log = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20  # of file bytes; a full-size BF16 expert layer (1.5 GiB) becomes 48 pieces
WORKERS = 4
AHEAD = WORKERS + 1  # prepared pieces that may wait: at most (AHEAD + 1) * 2 * PIECE_BYTES on the host

Tree = dict[str, Array | nvfp4.Packed | nvfp4.Scaled]


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a load cost. Bytes; seconds; peak resident memory of this process, and the part that is not mapped files.

    base_anonymous: that part before the load, which the Python process and the GPU runtime take.
    """

    nbytes: int
    seconds: float
    peak_rss: int
    peak_anonymous: int
    base_anonymous: int = 0

    @property
    def short(self) -> str:
        """One line for people."""
        rate = self.nbytes / 1e9 / max(self.seconds, 1e-9)
        return (
            f"loaded {self.nbytes / 1e9:.2f} GB in {self.seconds:.1f} s ({rate:.2f} GB/s); host memory peak "
            f"{self.peak_rss / 2**30:.2f} GiB"
        )

    def __str__(self) -> str:
        return (
            f"{self.short}, of it {self.peak_anonymous / 2**30:.2f} GiB not mapped files "
            f"({self.base_anonymous / 2**30:.2f} GiB before the load)"
        )


def assemble(
    plan: Plan,
    *,
    dtype: str = "bfloat16",
    router_dtype: str | None = None,
    clear_scale_signs: bool = False,
    progress: bool = True,
) -> tuple[Tree, LoadReport]:
    """Load a matched checkpoint onto the default device.

    dtype: compute dtype of plain leaves ("bfloat16" or "float32"; float32 values narrow to nearest even), or "stored":
    bfloat16 where all tensors of a leaf are BF16 or NVFP4, else float32. ``sinks`` is always float32, ``router`` gets
    ``router_dtype`` (default: dtype). Matrices whose tensors are all NVFP4 stay packed; a stack of packed and plain
    tensors becomes ``Scaled`` in ``dtype``.

    Raises CheckpointError for values that are not allowed: a global scale that is not positive and finite, a block
    scale of 0xFF, one of 0x80 to 0xFE unless clear_scale_signs, a selection bias that is not zero.
    """
    began = time.perf_counter()
    memory = _MemoryWatch()
    _check_zero(plan.zero)
    kinds = _leaf_kinds(plan)
    dtypes = _dtypes(plan, dtype, router_dtype)
    scales = _global_scales(plan, kinds)
    targets = {name: _target(leaf, kinds[name], dtypes[name]) for name, leaf in plan.leaves.items()}
    signed: Counter[str] = Counter()
    with _bar(plan.nbytes, progress) as bar, ThreadPoolExecutor(WORKERS, "flint-load") as pool:
        for piece, host in _prepared(pool, _pieces(plan)):
            count = _write(targets[piece.fill.source.leaf], piece, host)
            if count and not clear_scale_signs:
                raise _bad_scale(piece, host)
            signed.update({piece.fill.tensors[0].name: count} if count else {})
            piece.release()
            memory.sample()
            bar.update(piece.nbytes)
        planes = jax.block_until_ready({name: target.arrays() for name, target in targets.items()})
    for name, count in signed.items():
        log.warning("%s: %d NVFP4 block scales had their sign bit set; it was cleared", short(name), count)
    tree: Tree = {}
    for name, leaf in plan.leaves.items():
        if kinds[name] == PACKED:
            tree[name] = nvfp4.Packed(*planes[name], jnp.asarray(scales[name]), leaf.segments)
        elif kinds[name] == SCALED:
            tree[name] = nvfp4.Scaled(planes[name][0], jnp.asarray(scales[name]), leaf.segments)
        else:
            tree[name] = planes[name][0]
    report = LoadReport(plan.nbytes, time.perf_counter() - began, *memory.peaks())
    log.debug("%s", report)
    if progress:
        tqdm.write(report.short, file=sys.stderr)
    return tree, report


def shapes(plan: Plan, *, dtype: str = "bfloat16", router_dtype: str | None = None) -> Tree:
    """The tree that ``assemble`` will give, with a ShapeDtypeStruct for every array; reads no weight."""
    kinds, tree = _leaf_kinds(plan), {}
    for name, plane_dtype in _dtypes(plan, dtype, router_dtype).items():
        leaf, kind = plan.leaves[name], kinds[name]
        planes = [jax.ShapeDtypeStruct(*plane) for plane in planes_of(leaf, kind, plane_dtype)]
        if kind == PLAIN:
            tree[name] = planes[0]
            continue
        scale = jax.ShapeDtypeStruct((*leaf.full_shape[:-2], len(leaf.segments)), jnp.float32)
        made = nvfp4.Packed if kind == PACKED else nvfp4.Scaled
        tree[name] = made(*planes, scale, leaf.segments)
    return tree


def _dtypes(plan: Plan, dtype: str, router_dtype: str | None) -> dict[str, np.dtype]:
    dtypes = _stored_dtypes(plan) if dtype == "stored" else dict.fromkeys(plan.leaves, jnp.dtype(dtype))
    dtypes["sinks"] = jnp.dtype("float32")
    if router_dtype is not None:
        dtypes["router"] = jnp.dtype(router_dtype)
    return dtypes


def _leaf_kinds(plan: Plan) -> dict[str, str]:
    """Per leaf: "plain", "packed", or "scaled" when some tensors of the stack are NVFP4 and others are not."""
    packed: dict[str, set[bool]] = {name: set() for name in plan.leaves}
    for fill in plan.fills:
        packed[fill.source.leaf].add(fill.kind == NVFP4)
    return {name: SCALED if len(found) == 2 else PACKED if True in found else PLAIN for name, found in packed.items()}


def _stored_dtypes(plan: Plan) -> dict[str, np.dtype]:
    wide = {fill.source.leaf for fill in plan.fills if not {t.kind for t in fill.tensors} <= {"BF16", NVFP4}}
    return {name: jnp.dtype("float32" if name in wide else "bfloat16") for name in plan.leaves}


def _check_zero(biases: tuple[RawTensor, ...]) -> None:
    for tensor in biases:
        if np.any(np.asarray(tensor.array(), np.float32) != 0):
            raise CheckpointError(
                f"{short(tensor.name)}: a bias on the choice of experts that is not zero; not supported (the released "
                "model has none)"
            )


def _global_scales(plan: Plan, kinds: dict[str, str]) -> dict[str, np.ndarray]:
    """float32 [stack..., S] for packed and mixed leaves. Slots start as NaN, so one that nobody fills is found."""
    out = {}
    for name, leaf in plan.leaves.items():
        if kinds[name] != PLAIN:
            out[name] = np.full((*leaf.full_shape[:-2], len(leaf.segments)), np.nan, np.float32)
    bad = []
    for fill in plan.fills:
        source = fill.source
        if source.leaf not in out:
            continue
        slots = out[source.leaf] if source.index is None else out[source.leaf][source.index]
        slots = slots if source.segment is None else slots[..., source.segment : source.segment + 1]
        if fill.kind != NVFP4:
            slots[...] = 1.0
            continue
        values = np.ones(1, np.float32) if fill.scale is None else np.array(fill.scale.array(), np.float32).reshape(-1)
        for at in np.flatnonzero(~(np.isfinite(values) & (values > 0))):
            where = f" of expert {at}" if len(values) > 1 else ""
            bad.append(f"{short(fill.scale.name)}{where} is {values[at]}")
        slots[...] = values[:, None] if slots.ndim == 2 else values
    if bad:
        more = f", and {len(bad) - 12} more" if len(bad) > 12 else ""
        raise CheckpointError("global scales must be finite and positive: " + ", ".join(bad[:12]) + more)
    unset = [name for name, values in out.items() if np.isnan(values).any()]
    if unset:
        raise CheckpointError(f"no global scale for a part of {', '.join(unset)}")
    return out


# -- pieces ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
    """Entries ``start`` to ``stop`` of the first axis of what a Fill provides: experts of a layer, or rows."""

    fill: Fill
    start: int
    stop: int
    length: int

    @property
    def nbytes(self) -> int:
        """Share of the file's bytes (entries that two pieces both hold count once, with the first)."""
        total = sum(t.nbytes for t in self.fill.tensors)
        first = -(-self.start // (self.stop - self.start)) * (self.stop - self.start)
        return total * (self.stop - first) // self.length if self.stop > first else 0

    def release(self) -> None:
        """Give the file's pages of the piece back."""
        if len(self.fill.tensors) > 1:
            for tensor in self.fill.tensors[self.start : self.stop]:
                tensor.release()
            return
        tensor = self.fill.tensors[0]
        row = tensor.nbytes // self.length
        tensor.file.release(tensor.offset + self.start * row, (self.stop - self.start) * row)


def _pieces(plan: Plan) -> Iterator[Piece]:
    """Pieces of equal size: the last of a tensor starts early rather than being short, so all share one program."""
    for fill in plan.fills:
        per_expert = len(fill.tensors) > 1
        length = len(fill.tensors) if per_expert else fill.source.shape[0]
        total = sum(t.nbytes for t in fill.tensors)
        step = max(1, min(length, int(length * PIECE_BYTES / max(total, 1))))
        for at in range(0, length, step):
            start = min(at, length - step)
            yield Piece(fill, start, start + step, length)


def _prepared(pool: ThreadPoolExecutor, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, np.ndarray]]:
    """Pieces with their host copies, in order, a few of them prepared ahead."""
    waiting: deque[tuple[Piece, Future]] = deque()
    try:
        for piece in pieces:
            waiting.append((piece, pool.submit(_prepare, piece)))
            if len(waiting) >= AHEAD:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        for _, future in waiting:
            future.cancel()


def _prepare(piece: Piece) -> np.ndarray:
    """A copy of what the file holds for a piece: NVFP4 records, or values in the dtype of the file."""
    fill = piece.fill
    dtype = np.uint8 if fill.kind == NVFP4 else DTYPES[fill.kind]
    if len(fill.tensors) == 1:
        # A copy, not the mapped pages: the reading happens in this thread, and no device array may alias the file.
        return np.array(fill.tensors[0].array()[piece.start : piece.stop], dtype)
    out = np.empty((piece.stop - piece.start, *fill.source.shape), dtype)
    for row, tensor in zip(out, fill.tensors[piece.start : piece.stop], strict=True):
        row[...] = tensor.array()
    return out


def _target(leaf: Leaf, kind: str, dtype: np.dtype) -> HostLeaf | DeviceLeaf:
    nbytes = sum(math.prod(shape) * plane.itemsize for shape, plane in planes_of(leaf, kind, dtype))
    return (HostLeaf if nbytes <= place.HOST_BYTES else DeviceLeaf)(leaf, kind, dtype)


def _write(target: HostLeaf | DeviceLeaf, piece: Piece, host: np.ndarray) -> int:
    """Put one piece into its leaf; returns the number of block scales whose sign bit was cleared."""
    source = piece.fill.source
    at = [0] * len(target.planes[0].shape)
    if source.index is not None:
        at[0] = source.index
    at[-host.ndim] += piece.start  # the axis that the first axis of the piece runs along
    if source.row:
        at[-2] += source.row
    try:
        return target.write(host, tuple(at), piece.fill.kind == NVFP4)
    except BadScale:
        raise _bad_scale(piece, host) from None


def _bad_scale(piece: Piece, host: np.ndarray) -> CheckpointError:
    """The error for the worst scale byte of a piece, with its place in the tensor."""
    tensor = piece.fill.tensors[0]
    bytes_ = host.reshape(*host.shape[:-1], -1, nvfp4.GGUF_BYTES)[..., :4]
    worst = bytes_ == 0xFF
    where = np.argwhere(worst if worst.any() else bytes_ > 0x7F)[0]
    value, (*lead, block, group) = int(bytes_[tuple(where)]), where.tolist()
    lead[0] += piece.start
    return CheckpointError(f"{tensor.file.path}: {scale_refusal(tensor.name, value, lead, block, group)}")


# -- reporting -------------------------------------------------------------------------------------------------------


def _bar(total: int, progress: bool) -> contextlib.AbstractContextManager:
    return tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="loading weights",
        disable=not progress,
        file=sys.stderr,
        leave=False,
    )


class _MemoryWatch:
    """Peak memory of the process: the kernel's own record, and anonymous memory (not file pages) as sampled."""

    def __init__(self):
        jax.devices()  # the runtime's own memory belongs to the process, not to the load
        self.anonymous = 0
        self.sample()
        self.base = self.anonymous

    def sample(self) -> None:
        self.anonymous = max(self.anonymous, _status_kib("RssAnon") << 10)

    def peaks(self) -> tuple[int, int, int]:
        self.sample()
        peak = _status_kib("VmHWM") << 10
        if not peak:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return peak, self.anonymous, self.base


def _status_kib(field: str) -> int:
    if not os.path.exists("/proc/self/status"):
        return 0
    with open("/proc/self/status") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(field + ":")), 0)
