"""Streaming writers for both checkpoint formats: the header first, then every tensor in parts, by several threads.

Memory is bounded by the threads times a few parts, whatever the size of the model.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from loaders import partial
from pallas_kernels.nvfp4 import GGUF_BLOCK, GGUF_BYTES

PART = GGUF_BYTES << 17  # 4.7 MB: whole NVFP4 records, whole float32, and small enough to stay in a core's cache
ALIGNMENT = 32
_GGUF_TYPE = {"F32": 0, "BF16": 30, "NVFP4": 40}
_WIDTH = {"F32": 4, "BF16": 2}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to write. shape: outermost dimension first. kind: F32, BF16 or NVFP4.

    fill(part, nbytes) gives bytes ``part * PART`` and following; it may be called in any order, from any thread.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    fill: Callable[[int, int], Any] = dataclasses.field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        count = int(np.prod(self.shape, dtype=np.int64))
        if self.kind != "NVFP4":
            return count * _WIDTH[self.kind]
        if self.shape[-1] % GGUF_BLOCK:
            raise ValueError(f"{self.name} has rows of {self.shape[-1]}; NVFP4 needs a multiple of {GGUF_BLOCK}")
        return count // GGUF_BLOCK * GGUF_BYTES


def from_bytes(name: str, kind: str, shape: tuple[int, ...], values: np.ndarray) -> Tensor:
    """A tensor whose bytes are those of ``values``, in memory."""
    raw = memoryview(np.ascontiguousarray(values)).cast("B")
    return Tensor(name, kind, shape, lambda part, nbytes: raw[part * PART : part * PART + nbytes])


def from_array(name: str, values: np.ndarray) -> Tensor:
    """An F32 tensor from float32 values in memory."""
    return from_bytes(name, "F32", values.shape, values)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[Tensor],
    *,
    threads: int,
    progress: bool = False,
    replace: bool = True,
) -> int:
    """Write one GGUF file (version 3). The file appears under its name when it is whole. Returns its size in bytes.

    replace: whether a file of that name may be replaced.

    Metadata: bool, int (uint32), float (float32), str, list of str, numpy arrays of bool, int32 or float32.
    """
    infos, at = [], 0
    for t in tensors:
        dims = t.shape[::-1]
        infos.append(_text(t.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, _GGUF_TYPE[t.kind], at))
        at += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
    pairs = [_text(key) + _value(value) for key, value in metadata.items()]
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(infos)
    header += bytes(-len(header) % ALIGNMENT)
    with partial.new_file(path, replace=replace) as file:
        file.truncate(len(header) + at)
        jobs, position = [], len(header)
        for t in tensors:
            jobs.append((file.fileno(), position, t))
            position += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
        _stream(jobs, threads, progress)
        file.seek(0)
        file.write(header)  # last: a file that was cut short is not GGUF
    return len(header) + at


def write_safetensors(
    folder: Path,
    tensors: Sequence[Tensor],
    *,
    shard_bytes: int,
    threads: int,
    metadata: Mapping[str, str] | None = None,
    progress: bool = False,
) -> int:
    """Write ``model-0000i-of-0000n.safetensors`` and the index, which comes last. Returns the bytes of weights.

    metadata: for the header of every file, besides "format".
    """
    shards: list[list[Tensor]] = [[]]
    size = 0
    for t in tensors:
        if shards[-1] and size + t.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(t)
        size += t.nbytes
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = [open(folder / f"{name}.partial", "wb") for name in names]  # noqa: SIM115 (closed together below)
    try:
        jobs = []
        for file, shard in zip(files, shards, strict=True):
            text, at, places = _safetensors_header(shard, {"format": "pt", **(metadata or {})})
            file.write(text)
            file.truncate(len(text) + at)
            file.flush()
            jobs += [(file.fileno(), len(text) + place, t) for t, place in zip(shard, places, strict=True)]
        _stream(jobs, threads, progress)
    finally:
        for file in files:
            file.close()
    for name in names:
        (folder / f"{name}.partial").replace(folder / name)
    total = sum(t.nbytes for t in tensors)
    index = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")
    return total


def write_safetensors_file(path: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> int:
    """Write one .safetensors file; it appears under its name when it is whole. Returns its size in bytes."""
    text, nbytes, places = _safetensors_header(tensors, metadata)
    with partial.new_file(path, replace=True) as file:
        file.truncate(len(text) + nbytes)
        jobs = [(file.fileno(), len(text) + place, t) for t, place in zip(tensors, places, strict=True)]
        _stream(jobs, 1, False)
        file.seek(0)
        file.write(text)
    return len(text) + nbytes


def _safetensors_header(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> tuple[bytes, int, list[int]]:
    """(length and header, bytes of data, where each tensor begins in the data)."""
    table, places, at = {}, [], 0
    for t in tensors:
        table[t.name] = {"dtype": t.kind, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        places.append(at)
        at += t.nbytes
    text = json.dumps({"__metadata__": dict(metadata), **table}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, at, places


def _stream(jobs: list[tuple[int, int, Tensor]], threads: int, progress: bool) -> None:
    parts = [(fd, position, tensor, part) for fd, position, tensor in jobs for part in range(-(-tensor.nbytes // PART))]

    def run(job) -> int:
        fd, position, tensor, part = job
        nbytes = min(PART, tensor.nbytes - part * PART)
        view = memoryview(tensor.fill(part, nbytes)).cast("B")
        if len(view) != nbytes:
            raise AssertionError(f"{tensor.name}: part {part} has {len(view)} bytes, need {nbytes}")
        at = position + part * PART
        while view:
            done = os.pwrite(fd, view, at)
            view, at = view[done:], at + done
        return nbytes

    total = sum(tensor.nbytes for _, _, tensor in jobs)
    with (
        ThreadPoolExecutor(threads) as pool,
        tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=not progress) as bar,
    ):
        try:
            for done in pool.map(run, parts):
                bar.update(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """GGUF type number and value."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, np.ndarray):
        code = {"bool": 7, "int32": 5, "float32": 6}[value.dtype.name]
        return struct.pack("<IIQ", 9, code, value.size) + value.astype(value.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
