"""One tensor inside one mapped file: what both checkpoint formats come down to."""

from __future__ import annotations

import dataclasses
import mmap
import os
from pathlib import Path

import ml_dtypes
import numpy as np

from flint_jax.errors import CheckpointError
from pallas_kernels.nvfp4 import GGUF_BLOCK, GGUF_BYTES

NVFP4 = "NVFP4"
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
KINDS = (NVFP4, *DTYPES)


class MappedFile:
    """A file mapped read-only; nothing is read before someone looks.

    Raises CheckpointError when the file cannot be opened or is empty.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise CheckpointError(f"{self.path}: the file is empty (incomplete download?)")
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        if self.data[:20].startswith(b"version https://git"):
            raise CheckpointError(f"{self.path}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")

    def __repr__(self) -> str:
        return f"MappedFile({str(self.path)!r})"

    def release(self, offset: int, nbytes: int) -> None:
        """Give the pages of a byte range back: they count towards our resident memory until someone says so."""
        if nbytes <= 0 or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = offset - offset % mmap.PAGESIZE
        self.data.madvise(mmap.MADV_DONTNEED, start, min(offset + nbytes, self.size) - start)


@dataclasses.dataclass(frozen=True)
class RawTensor:
    """A tensor as the file holds it.

    ``kind`` is one of KINDS; ``shape`` counts values, outermost dimension first; ``offset`` and ``nbytes`` locate it in
    ``file`` (already checked to lie inside).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    file: MappedFile = dataclasses.field(repr=False)
    offset: int
    nbytes: int

    def array(self) -> np.ndarray:
        """Zero-copy view: float32/float16/bfloat16 ``shape``, or uint8 [..., C/64*36] records for NVFP4."""
        if self.kind == NVFP4:
            shape = (*self.shape[:-1], self.shape[-1] // GGUF_BLOCK * GGUF_BYTES)
            return np.frombuffer(self.file.data, np.uint8, self.nbytes, self.offset).reshape(shape)
        raw = np.frombuffer(self.file.data, np.uint8, self.nbytes, self.offset)
        return raw.view(DTYPES[self.kind]).reshape(self.shape)

    def release(self) -> None:
        """Drop the tensor's pages from resident memory."""
        self.file.release(self.offset, self.nbytes)


def check_layout(tensors: list[RawTensor], data_start: int) -> None:
    """Every extent lies in the data part of its (one) file and none overlaps another; CheckpointError otherwise."""
    end, before = data_start, None
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        stop = tensor.offset + tensor.nbytes
        if stop > tensor.file.size:
            raise CheckpointError(
                f"{tensor.file.path}: tensor {short(tensor.name)} needs bytes {tensor.offset} to {stop}, the file has "
                f"{tensor.file.size} (truncated or incomplete download?)"
            )
        if tensor.offset < end and tensor.nbytes:
            where = f"overlaps {short(before)}" if before else "starts inside the header"
            raise CheckpointError(f"{tensor.file.path}: tensor {short(tensor.name)} {where}: the header is damaged")
        if stop > end:
            end, before = stop, tensor.name


def short(text: str | None, limit: int = 100) -> str:
    """A name from a file made safe for one line of an error message."""
    text = repr(str(text))[1:-1]
    return text if len(text) <= limit else text[:limit] + "..."
