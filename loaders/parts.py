"""Matrices and vectors of a model one by one, wherever they are: in the files of a checkpoint, or in a weight tree.

A ``Part`` is what one tensor of a per-expert file format holds. It is read in ranges, so that a converter never has
more than a few megabytes of a checkpoint in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

import ml_dtypes
import numpy as np

from flint_jax.errors import CheckpointError
from loaders.name_map import Plan
from loaders.raw import NVFP4, short
from pallas_kernels import nvfp4

BLOCK, BYTES = nvfp4.GGUF_BLOCK, nvfp4.GGUF_BYTES
_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Part:
    """kind: F32, F16, BF16 or NVFP4. count: weights. scale: global scale of NVFP4.

    load: gives flat values, or flat uint8 GGUF records; cheap to call often. clear_scale_signs: see open_checkpoint.
    """

    name: str
    kind: str
    count: int
    load: Callable[[], np.ndarray] = dataclasses.field(repr=False)
    scale: float = 1.0
    clear_scale_signs: bool = False

    def values(self, start: int, stop: int, kind: str = "F32") -> np.ndarray:
        """Weights ``start`` to ``stop`` as F32 or BF16, one rounding. Of NVFP4: whole blocks of 64."""
        if self.kind != NVFP4:
            found = self.load()[start:stop]
            if self.kind == kind:
                return found
            return found.astype(np.float32).astype(_DTYPES[kind])
        codes, scales = nvfp4.repack_gguf(self.records(start, stop)[None])
        return (nvfp4.decode_numpy(codes, scales)[0] * np.float32(self.scale)).astype(_DTYPES[kind])

    def records(self, start: int, stop: int) -> np.ndarray:
        """The GGUF records of weights ``start`` to ``stop``: uint8. Only of NVFP4."""
        found = self.load()[start // BLOCK * BYTES : stop // BLOCK * BYTES]
        scales = found.reshape(-1, BYTES)[:, :4]
        bad = scales > 0x7F
        if not bad.any():
            return found
        worst = scales == 0xFF
        if worst.any() or not self.clear_scale_signs:
            block, group = np.argwhere(worst if worst.any() else bad)[0].tolist()
            raise CheckpointError(
                scale_refusal(self.name, int(scales[block, group]), [], start // BLOCK + block, group)
            )
        found = found.copy()
        found.reshape(-1, BYTES)[:, :4] &= 0x7F
        return found

    def exact_in_bf16(self) -> bool:
        """Whether every weight is a BF16 number."""
        if self.kind == "BF16":
            return True
        wide = self.values(0, self.count)
        return bool((wide.astype(_DTYPES["BF16"]).astype(np.float32) == wide).all())

    def largest(self, step: int = 1 << 22) -> float:
        """Largest magnitude. Raises CheckpointError when a weight is not finite."""
        found = 0.0
        for at in range(0, self.count, step):
            top = float(np.abs(self.values(at, min(at + step, self.count))).max())
            if not np.isfinite(top):
                raise CheckpointError(f"{self.name}: not all weights are finite numbers, so it cannot be quantised")
            found = max(found, top)
        return found


def scale_refusal(name: str, value: int, lead: list[int], block: int, group: int) -> str:
    """What is wrong with a block scale byte. lead: expert and row in the tensor; group: of 16 weights in the block."""
    at = "".join(f"{i}, " for i in lead)
    where = f"{short(name)}[{at}{BLOCK * block + 16 * group}]: the scale of this block of 16 weights"
    if value == 0xFF:
        cure = "convert the checkpoint again with scales in 0x00..0x7E"
        return f"{where} is 0xFF, which decoders read as 0 or as 480; {cure}"
    return (
        f"{where} is 0x{value:02X}; need 0x00..0x7E, scales have no sign. If the signs are to be dropped, write the "
        "checkpoint anew: python -m flint_jax convert SOURCE TARGET.gguf --clear-scale-signs"
    )


class Weights(Protocol):
    """Where parts come from."""

    def part(self, leaf: str, index: int | None, expert: int | None, row: int, rows: int) -> Part:
        """Rows ``row`` and following of a leaf's layer (of one expert); of a vector, all of it (0 rows)."""


class FileWeights:
    """Parts of a checkpoint's files, as views of the mapped pages."""

    def __init__(self, plan: Plan, *, clear_scale_signs: bool = False):
        self._clear = clear_scale_signs
        self._fills: dict[tuple[str, int | None], list] = {}
        for fill in plan.fills:
            self._fills.setdefault((fill.source.leaf, fill.source.index), []).append(fill)

    def part(self, leaf: str, index: int | None, expert: int | None, row: int, rows: int) -> Part:
        """See Weights."""
        for fill in self._fills[leaf, index]:
            source = fill.source
            vector = len(source.shape) == 1
            if not vector and not source.row <= row < source.row + source.shape[-2]:
                continue
            tensor = fill.tensors[expert if expert is not None and len(fill.tensors) > 1 else 0]
            array = tensor.array()
            if expert is not None and len(fill.tensors) == 1:
                array = array[expert]
            array = array if vector else array[row - source.row : row - source.row + rows]
            scale = 1.0
            if fill.scale is not None:
                scales = np.asarray(fill.scale.array(), np.float32).reshape(-1)
                scale = float(scales[expert or 0] if len(scales) > 1 else scales[0])
            flat = array.reshape(-1)
            count = flat.size // BYTES * BLOCK if tensor.kind == NVFP4 else flat.size
            return Part(tensor.name, tensor.kind, count, functools.partial(np.asarray, flat), scale, self._clear)
        raise KeyError((leaf, index, row))


class TreeWeights:
    """Parts of a weight tree (arrays, ``nvfp4.Packed``, ``nvfp4.Scaled``), brought to the host layer by layer."""

    KEPT = 8  # layers, and parts ready to be written, on the host at once

    def __init__(self, tree: Mapping[str, object]):
        for name, leaf in tree.items():
            if not isinstance(leaf, nvfp4.Packed | nvfp4.Scaled) and not hasattr(leaf, "dtype"):
                raise CheckpointError(
                    f"{name} is {type(leaf).__name__}: load the model with kernels='xla', and merge adapters first"
                )
        self._tree, self._lock = tree, threading.RLock()
        self._kept: OrderedDict[tuple, object] = OrderedDict()

    def part(self, leaf: str, index: int | None, expert: int | None, row: int, rows: int) -> Part:
        """See Weights."""
        value = self._tree[leaf]
        name = leaf if index is None else f"{leaf}[{index}]"
        width = value.shape[-1]
        kind, scale, count = None, 1.0, width if rows == 0 else rows * width
        if isinstance(value, nvfp4.Packed | nvfp4.Scaled):
            scales = self._layer(leaf, index)[-1]
            segment = int(np.searchsorted(np.cumsum(value.segments), row, side="right"))
            scale = float((scales if expert is None else scales[expert])[segment])
            kind = NVFP4 if isinstance(value, nvfp4.Packed) else "F32" if scale != 1 else None
        kind = kind or _KINDS[(value.values_ if isinstance(value, nvfp4.Scaled) else value).dtype.name]
        where = leaf, index, expert, row, rows
        return Part(name, kind, count, lambda: self._keep(where, lambda: self._flat(*where, kind, scale)), scale)

    def _flat(self, leaf, index, expert, row, rows, kind, scale) -> np.ndarray:
        layer = self._layer(leaf, index)
        scaled = isinstance(self._tree[leaf], nvfp4.Packed | nvfp4.Scaled)
        planes = [plane if expert is None else plane[expert] for plane in (layer[:-1] if scaled else layer)]
        planes = [plane[row : row + rows] if rows else plane for plane in planes]
        if kind == NVFP4:
            return to_records(*planes).reshape(-1)
        values = np.ascontiguousarray(planes[0]).reshape(-1)
        return values if scale == 1 else values.astype(np.float32) * np.float32(scale)

    def _layer(self, leaf: str, index: int | None) -> tuple[np.ndarray, ...]:
        def fetch():
            value = self._tree[leaf]
            value = value if index is None else value[index]
            if isinstance(value, nvfp4.Packed):
                return tuple(map(np.asarray, (value.codes, value.scales, value.global_scale)))
            if isinstance(value, nvfp4.Scaled):
                return tuple(map(np.asarray, (value.values_, value.global_scale)))
            return (np.asarray(value),)

        return self._keep((leaf, index), fetch)

    def _keep(self, key: tuple, make: Callable[[], object]):
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make()
                while len(self._kept) > self.KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]


def to_records(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Planes (``nvfp4.quantize_numpy``) -> GGUF records: uint8 [..., C/2], [..., C/16] -> [..., C/64*36]; lossless."""
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1, 4, 2, 8)
    halves = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).reshape(*nibbles.shape[:-3], 32)
    records = np.concatenate([scales.reshape(*halves.shape[:-1], 4), halves], -1)
    return records.reshape(*codes.shape[:-1], -1)
