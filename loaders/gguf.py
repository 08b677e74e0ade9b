"""GGUF files: our own reader of the header, bounds checked, over a memory map.

Every count and length in the file is compared with what is left of the file before it is believed, and capped: a
damaged header costs milliseconds and a few megabytes, and ends in a CheckpointError.
"""

from __future__ import annotations

import dataclasses
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flint_jax.errors import CheckpointError
from loaders.raw import DTYPES, NVFP4, MappedFile, RawTensor, check_layout, short
from pallas_kernels.nvfp4 import GGUF_BLOCK, GGUF_BYTES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

# Caps far above any real file (Flint: 44 keys, 1,400 tensors, about half a million strings of 5 MB together).
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_STRINGS = 1 << 20
MAX_TEXT = 1 << 25
MAX_NAME = 1 << 10
MAX_ALIGNMENT = 1 << 20

_SCALARS = {
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "u1"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# ggml's tensor types; the numbers missing here were withdrawn.
GGML_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
SUPPORTED = (NVFP4, *DTYPES)

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class GGUF:
    """One model: the metadata and tensors of a GGUF file, or of all parts of a split one.

    Metadata values are Python scalars, strings, lists of strings, or numpy arrays (numbers and booleans).
    """

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]


def is_gguf(path: str | os.PathLike) -> bool:
    """True when the file starts with GGUF's magic (of either byte order)."""
    try:
        with open(path, "rb") as file:
            return file.read(4) in (MAGIC, MAGIC[::-1])
    except OSError:
        return False


def read_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """The key-value part of a GGUF file (for a split file: of its first part); tensors are not looked at."""
    header = _read_header(MappedFile(path), with_tensors=False)
    if _split_count(header) > 1 and header.metadata["split.no"] != 0:
        return _parts(header)[0].metadata
    return header.metadata


def open_gguf(path: str | os.PathLike) -> GGUF:
    """Read the header of a GGUF file, or of every part of a split one (any part may be given).

    Raises CheckpointError for damage, missing parts, or tensor types other than NVFP4, BF16, F16 and F32.
    """
    header = _read_header(MappedFile(path))
    headers = _parts(header) if _split_count(header) > 1 else [header]
    tensors: dict[str, RawTensor] = {}
    for part in headers:
        for tensor in part.tensors:
            if tensor.name in tensors:
                first = tensors[tensor.name].file.path.name
                raise CheckpointError(f"{part.path}: tensor {short(tensor.name)} is also in {first}")
            tensors[tensor.name] = tensor
    metadata = headers[0].metadata
    total = metadata.get("split.tensors.count")
    if len(headers) > 1 and total is not None and total != len(tensors):
        raise CheckpointError(f"{path}: the parts hold {len(tensors)} tensors, split.tensors.count says {total}")
    return GGUF(tuple(part.path for part in headers), metadata, tensors)


def split_stem(path: str | os.PathLike) -> tuple[str, int] | None:
    """(path without the part number, number of parts) when the file is named like a part of a split one."""
    match = _SPLIT_NAME.fullmatch(os.fspath(path))
    return (match["stem"], int(match["count"])) if match else None


def is_part(path: str | os.PathLike) -> bool:
    """True when the header of a GGUF file says that the file is one of several."""
    return _split_count(_read_header(MappedFile(path), with_tensors=False)) > 1


# -- split files -----------------------------------------------------------------------------------------------------


def _split_count(header: _Header) -> int:
    count, number = header.metadata.get("split.count", 0), header.metadata.get("split.no", 0)
    if not isinstance(count, int) or not 0 <= count <= 99999:
        raise CheckpointError(f"{header.path}: split.count = {short(count)} is not a number of parts")
    if count > 1 and not (isinstance(number, int) and 0 <= number < count):
        raise CheckpointError(f"{header.path}: split.no = {short(number)}, split.count = {count}")
    return int(count)


def _parts(header: _Header) -> list[_Header]:
    """All parts of a split file, in order. Their order is what they say (split.no), not what they are called."""
    count = _split_count(header)
    named = _SPLIT_NAME.fullmatch(header.path.name)
    found = {header.metadata["split.no"]: header}
    for path in sorted(header.path.parent.glob("*.gguf")):
        match = _SPLIT_NAME.fullmatch(path.name)
        same_set = (match and match["stem"] == named["stem"] and int(match["count"]) == count) if named else not match
        if not same_set or path.name == header.path.name:
            continue
        part = _read_header(MappedFile(path))
        if _split_count(part) != count:
            if named:
                raise CheckpointError(
                    f"{path}: says it has {_split_count(part)} parts, {header.path.name} says {count}"
                )
            continue
        number = part.metadata["split.no"]
        if number in found:
            raise CheckpointError(f"{path}: part {number + 1} of {count}, but {found[number].path.name} is that too")
        found[number] = part
    missing = [i for i in range(count) if i not in found]
    if missing:
        stem = named["stem"] if named else header.path.stem
        names = [f"{stem}-{i + 1:05d}-of-{count:05d}.gguf" for i in missing]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise CheckpointError(f"{header.path}: missing {shown} (incomplete download?)")
    parts = [found[i] for i in range(count)]
    _refuse_contradictions(parts)
    return parts


_OF_ONE_FILE = ("split.no", "general.alignment")  # keys that each part has for itself


def _refuse_contradictions(parts: list[_Header]) -> None:
    """Later parts may say nothing (as llama.cpp writes them) or repeat the first; another word is another model's."""
    first = parts[0]
    for part in parts[1:]:
        for key, value in part.metadata.items():
            if key in _OF_ONE_FILE or (key in first.metadata and _equal(value, first.metadata[key])):
                continue
            said = f"says {short(first.metadata[key])}" if key in first.metadata else "does not have that key"
            raise CheckpointError(
                f"{part.path}: {short(key)} = {short(value)}, but part 1, {first.path.name}, {said}: the parts are of "
                "different files; download or split the model again"
            )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)
    return a == b


# -- one file --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Header:
    path: Path
    metadata: dict[str, Any]
    tensors: list[RawTensor]


class _Cursor:
    """Reads little-endian values and never past the end."""

    def __init__(self, file: MappedFile):
        self.file, self.data, self.size, self.position = file, file.data, file.size, 0
        self.strings_left, self.text_left = MAX_STRINGS, MAX_TEXT

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {message} (at byte {self.position} of {self.size})")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.position:
            left = self.size - self.position
            raise self.fail(f"{what} needs {count} bytes, the file has {left} left: truncated or damaged")

    def scalar(self, code: str, what: str) -> Any:
        width = struct.calcsize(code)
        self.need(width, what)
        (value,) = struct.unpack_from(code, self.data, self.position)
        self.position += width
        return value

    def text(self, what: str, limit: int = MAX_TEXT) -> str:
        return self.texts(1, what, limit)[0]

    def texts(self, count: int, what: str, limit: int = MAX_TEXT) -> list[str]:
        """``count`` strings: one tight loop, since a vocabulary with its merges has half a million."""
        self.need(8 * count, what)
        self.strings_left -= count
        if self.strings_left < 0:
            raise self.fail(f"{what}: more than {MAX_STRINGS} strings in the header")
        data, size, position, length_at = self.data, self.size, self.position, struct.Struct("<Q").unpack_from
        start, out = position, []
        for _ in range(count):
            if size - position < 8:
                raise self.fail(f"{what} ends outside the file: truncated or damaged")
            (length,) = length_at(data, position)
            position += 8
            if length > size - position:
                raise self.fail(f"{what}: a string of {length} bytes ends outside the file: truncated or damaged")
            if length > limit or position - start > self.text_left + 8 * count:
                raise self.fail(f"{what}: strings beyond the limit of {min(limit, MAX_TEXT)} bytes")
            try:
                out.append(str(data[position : position + length], "utf-8"))
            except UnicodeDecodeError:
                raise self.fail(f"{what}: a string is not UTF-8: damaged") from None
            position += length
        self.text_left -= position - start - 8 * count
        self.position = position
        return out

    def numbers(self, code: str, count: int, what: str) -> np.ndarray:
        dtype = np.dtype(code)
        self.need(count * dtype.itemsize, what)
        values = np.frombuffer(self.data, np.uint8, count * dtype.itemsize, self.position).view(dtype)
        self.position += count * dtype.itemsize
        return values


def _read_header(file: MappedFile, *, with_tensors: bool = True) -> _Header:
    cursor = _Cursor(file)
    tensor_count, key_count = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text("a metadata key", MAX_NAME)
        if not key or key in metadata:
            raise cursor.fail(f"metadata key {short(key)!r} is {'there twice' if key else 'empty'}: damaged")
        metadata[key] = _read_value(cursor, key)
    if not with_tensors:
        return _Header(file.path, metadata, [])
    infos = _read_infos(cursor, tensor_count)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(f"{file.path}: general.alignment = {short(alignment)} is not a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors = [_place(file, info, start, alignment) for info in infos]
    check_layout(tensors, start)
    return _Header(file.path, metadata, tensors)


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    cursor.need(4, "GGUF's magic")
    magic = cursor.data[:4]
    if magic == MAGIC[::-1]:
        raise cursor.fail("a big-endian GGUF; convert it to little-endian")
    if magic != MAGIC:
        raise cursor.fail(f"not a GGUF file: starts with {magic!r}")
    cursor.position = 4
    version = cursor.scalar("<I", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (1, *VERSIONS):
            raise cursor.fail("a big-endian GGUF; convert it to little-endian")
        raise cursor.fail(f"GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are supported")
    tensor_count = cursor.scalar("<Q", "the tensor count")
    key_count = cursor.scalar("<Q", "the metadata count")
    # The smallest entries: a key of 8 + 4 + 1 bytes; a tensor of 8 (name) + 4 + 8 (one dimension) + 4 + 8.
    if key_count > MAX_KEYS or tensor_count > MAX_TENSORS:
        raise cursor.fail(f"the header claims {key_count} metadata keys and {tensor_count} tensors: damaged")
    cursor.need(13 * key_count + 32 * tensor_count, f"a header of {key_count} keys and {tensor_count} tensors")
    return tensor_count, key_count


def _read_value(cursor: _Cursor, key: str) -> Any:
    what = f"metadata key {short(key)}"
    kind = cursor.scalar("<I", what)
    if kind == _STRING:
        return cursor.text(what)
    if kind == _ARRAY:
        kind = cursor.scalar("<I", what)
        count = cursor.scalar("<Q", what)
        if kind == _STRING:
            return cursor.texts(count, what)
        if kind not in _SCALARS:
            raise cursor.fail(f"{what}: arrays of type {kind} are not supported")
        values = cursor.numbers(_SCALARS[kind][1], count, what)
        return _booleans(cursor, values, what) if kind == _BOOL else values
    if kind not in _SCALARS:
        raise cursor.fail(f"{what}: unknown value type {kind}: damaged")
    if kind == _BOOL:
        return bool(_booleans(cursor, cursor.numbers("u1", 1, what), what)[0])
    return cursor.scalar(_SCALARS[kind][0], what)


def _booleans(cursor: _Cursor, values: np.ndarray, what: str) -> np.ndarray:
    if values.max(initial=0) > 1:
        raise cursor.fail(f"{what}: a boolean is neither 0 nor 1: damaged")
    return values.view(np.bool_)


def _read_infos(cursor: _Cursor, count: int) -> list[tuple[str, str, tuple[int, ...], int]]:
    infos, refused, seen = [], Counter(), set()
    example = ""
    for index in range(count):
        name = cursor.text(f"the name of tensor {index}", MAX_NAME)
        what = f"tensor {short(name)}"
        if not name or name in seen:
            raise cursor.fail(f"{what} is {'there twice' if name else 'without a name'}: damaged")
        seen.add(name)
        dims = cursor.scalar("<I", what)
        if not 1 <= dims <= MAX_DIMS:
            raise cursor.fail(f"{what} has {dims} dimensions; 1 to {MAX_DIMS} are possible: damaged")
        # GGUF lists the innermost dimension first.
        shape = tuple(cursor.scalar("<Q", what) for _ in range(dims))[::-1]
        number = cursor.scalar("<I", what)
        offset = cursor.scalar("<Q", what)
        if number not in GGML_TYPES:
            raise cursor.fail(f"{what} has the unknown ggml type {number}")
        kind = GGML_TYPES[number]
        if kind not in SUPPORTED:
            example = example or name
            refused[kind] += 1
        infos.append((name, kind, shape, offset))
    if refused:
        counts = ", ".join(f"{n} {kind}" for kind, n in refused.most_common())
        raise CheckpointError(
            f"{cursor.file.path}: tensors in {counts} (the first is {short(example)}); supported types are "
            f"{', '.join(SUPPORTED)}. Take an NVFP4 or BF16 GGUF of this model"
        )
    return infos


def _place(file: MappedFile, info: tuple[str, str, tuple[int, ...], int], start: int, alignment: int) -> RawTensor:
    name, kind, shape, offset = info
    where = f"{file.path}: tensor {short(name)}"
    values = 1
    for dim in shape:
        values *= dim
    if not 0 < values < 1 << 63:
        raise CheckpointError(f"{where} has the shape {list(shape)}: damaged")
    if kind == NVFP4:
        if shape[-1] % GGUF_BLOCK:
            raise CheckpointError(f"{where} is NVFP4 with rows of {shape[-1]}; need a multiple of {GGUF_BLOCK}")
        nbytes = values // GGUF_BLOCK * GGUF_BYTES
    else:
        nbytes = values * DTYPES[kind].itemsize
    if offset % alignment:
        raise CheckpointError(f"{where} starts at {offset}, not a multiple of the alignment {alignment}: damaged")
    return RawTensor(name, kind, shape, file, start + offset, nbytes)
