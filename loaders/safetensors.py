"""safetensors files: our own reader of the header over a memory map, for one file or a sharded set with an index."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flint_jax.errors import CheckpointError
from loaders.raw import DTYPES, MappedFile, RawTensor, check_layout, short

log = logging.getLogger(__name__)

INDEX_SUFFIX = ".safetensors.index.json"
# Flint unsharded: 36,734 tensors, a header of 5 MB. Parsed JSON takes some ten times its size.
MAX_HEADER = 1 << 25
NAME = "general.name"  # the model's name in __metadata__, called as in GGUF
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Safetensors:
    """One model: the tensors of a file, or of all files that an index names.

    unlisted: names of tensors that lie in those files although the index leaves them out: a model may lack a use for
    them.
    """

    paths: tuple[Path, ...]
    tensors: Mapping[str, RawTensor]
    metadata: Mapping[str, str]  # the text pairs of the first file
    unlisted: frozenset[str] = frozenset()


def open_safetensors(path: str | os.PathLike) -> Safetensors:
    """Read the headers of a .safetensors file, an index, or a folder (whose index, if there is one, decides).

    A file that an index beside it names stands for the whole set. Files that the index does not name are never opened.
    Raises CheckpointError for damage, missing shards, ambiguous sets, duplicates, or dtypes other than BF16, F16, F32.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if path.name.endswith(INDEX_SUFFIX):
        return _open_index(path)
    indexes = sorted(folder.glob("*" + INDEX_SUFFIX))
    if path.is_dir():
        if len(indexes) > 1:
            raise CheckpointError(f"{folder}: several indexes ({_names(indexes)}); give the path of one")
        if indexes:
            return _open_index(indexes[0])
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            what = f"{len(files)} .safetensors files ({_names(files)})" if files else "no .safetensors file"
            raise CheckpointError(
                f"{folder}: {what} and no {INDEX_SUFFIX[1:]}; need an index, or exactly one file (incomplete download?)"
            )
        return _open_files(files)
    for index in indexes:
        if path.name in _read_index(index).values():
            return _open_index(index)
    return _open_files([path])


def _names(paths: list[Path]) -> str:
    shown = ", ".join(p.name for p in paths[:5])
    return shown + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")


def _read_index(path: Path) -> dict[str, str]:
    try:
        size = path.stat().st_size
        if size > MAX_HEADER:
            raise CheckpointError(f"{path}: {size} bytes; an index of more than {MAX_HEADER} is not believable")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    index = _parse(text, str(path))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no weight_map, so not an index of safetensors files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or file != os.path.basename(file) or file in (".", ".."):
            raise CheckpointError(f"{path}: {short(name)} is in {short(file)}; need the name of a file in this folder")
    return weight_map


def _open_index(path: Path) -> Safetensors:
    weight_map = _read_index(path)
    files = [path.parent / name for name in sorted(set(weight_map.values()))]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{path}: names files that are not there: {_names(missing)} (incomplete download?)")
    opened = _open_files(files, weight_map, path)
    for name, file in weight_map.items():
        if name not in opened.tensors or opened.tensors[name].file.path.name != file:
            raise CheckpointError(f"{path.parent / file}: tensor {short(name)} is not there, but {path.name} says so")
    return opened


def _open_files(files: list[Path], places: Mapping[str, str] | None = None, index: Path | None = None) -> Safetensors:
    """All tensors of the files. places: the file that the index gives each tensor, which settles where it is read."""
    tensors: dict[str, RawTensor] = {}
    metadata: dict[str, str] | None = None
    copies: list[str] = []  # where the index has it elsewhere
    unlisted: dict[str, list[RawTensor]] = {}
    for file in files:
        mapped = MappedFile(file)
        header = _header(mapped)
        if metadata is None:
            metadata = {k: v for k, v in _pairs(header).items() if isinstance(v, str)}
        listed = None if places is None else {name for name, place in places.items() if place == file.name}
        for tensor in _read_tensors(mapped, header, listed):
            if listed is None or tensor.name in listed:
                tensors[tensor.name] = tensor
            elif tensor.name in places:
                copies.append(f"{short(tensor.name)} in {file.name}")
            else:
                unlisted.setdefault(tensor.name, []).append(tensor)
    if copies:
        log.warning("%s: copies of tensors that the index has in other files are not read: %s", index, _some(copies))
    if unlisted:
        log.warning(
            "%s does not list tensors that the files hold: %s", index, _some([short(name) for name in unlisted])
        )
    # One that lies in several files has no place that could be believed; of another type it could not be read.
    usable = {name: found[0] for name, found in unlisted.items() if len(found) == 1 and found[0].kind in DTYPES}
    return Safetensors(tuple(files), usable | tensors, metadata or {}, frozenset(usable))


def _some(items: list[str]) -> str:
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def _parse(text: bytes, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            name = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{where}: {short(name)} is there twice: damaged")
        return out

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: not valid JSON ({short(error)}): damaged or incomplete download?") from None


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """The text pairs in the header of one .safetensors file. Raises CheckpointError for damage."""
    found = _header(MappedFile(path)).get("__metadata__", {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CheckpointError(f"{path}: __metadata__ is no object of strings: damaged")
    return found


def _pairs(header: Mapping[str, Any]) -> dict[str, Any]:
    found = header.get("__metadata__")
    return found if isinstance(found, dict) else {}


def _read_tensors(file: MappedFile, header: Mapping[str, Any], needed: set[str] | None = None) -> list[RawTensor]:
    """needed: the tensors whose type must be one of ours; None for all."""
    start = 8 + int.from_bytes(file.data[:8], "little")
    tensors = [_entry(file, name, entry, start) for name, entry in header.items() if name != "__metadata__"]
    unusable = [t for t in tensors if t.kind not in DTYPES and (needed is None or t.name in needed)]
    refused = Counter(t.kind for t in unusable)
    if refused:
        counts = ", ".join(f"{n} {kind}" for kind, n in refused.most_common())
        example = unusable[0].name
        raise CheckpointError(
            f"{file.path}: tensors in {counts} (the first is {short(example)}); supported dtypes are BF16, F16, F32"
        )
    check_layout(tensors, start)
    end = start + sum(t.nbytes for t in tensors)
    if end != file.size:
        raise CheckpointError(f"{file.path}: the header describes {end} bytes, the file has {file.size}: damaged")
    return tensors


def _header(file: MappedFile) -> dict[str, Any]:
    if file.size < 8:
        raise CheckpointError(f"{file.path}: {file.size} bytes are no safetensors file (incomplete download?)")
    length = int.from_bytes(file.data[:8], "little")
    if length > file.size - 8 or length > MAX_HEADER:
        limit = min(file.size - 8, MAX_HEADER)
        raise CheckpointError(
            f"{file.path}: a header of {length} bytes, at most {limit} are possible: another format, or truncated"
        )
    if file.data[8:9] != b"{":
        raise CheckpointError(f"{file.path}: no JSON header: not a safetensors file")
    header = _parse(file.data[8 : 8 + length], str(file.path))
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.path}: no JSON header: not a safetensors file")
    return header


def _entry(file: MappedFile, name: str, entry: Any, start: int) -> RawTensor:
    where = f"{file.path}: tensor {short(name)}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: no description: damaged")
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise CheckpointError(f"{where}: dtype, shape or data_offsets missing: damaged")
    if not all(_is_count(n) for n in [*shape, *offsets]) or len(offsets) != 2 or len(shape) > 8:
        raise CheckpointError(f"{where}: shape {short(shape)} and data_offsets {short(offsets)} are impossible")
    nbytes = offsets[1] - offsets[0]
    if kind in SIZES:
        need = SIZES[kind]
        for dim in shape:
            need *= dim
        if need != nbytes:
            raise CheckpointError(f"{where}: {kind} {shape} takes {need} bytes, data_offsets span {nbytes}: damaged")
    return RawTensor(name, kind, tuple(shape), file, start + offsets[0], nbytes)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
