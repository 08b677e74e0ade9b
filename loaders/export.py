"""Write a model in any of the three formats, from a checkpoint's files or from a weight tree.

Everything is written under ``NAME.partial`` and takes its name when it is whole (see partial.py): what an interrupted
save leaves behind does not load. Weights pass through in pieces of a few megabytes.

What happens to a weight: a kind that the target can hold is kept, bit for bit. NVFP4 to BF16 decodes, multiplies the
global scale in and rounds once. BF16 or F32 to NVFP4 rounds to the nearest code, with block scales from each group's
maximum and one global scale for q, k, v, for gate and up, and for every other matrix (of each expert).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flint_jax.config import FlintConfig
from flint_jax.errors import CheckpointError
from loaders import describe, name_map, partial, writers
from loaders.name_map import PLAIN_ONLY, Source
from loaders.parts import BLOCK, Part, TreeWeights, Weights, to_records
from loaders.raw import NVFP4
from loaders.safetensors import NAME
from loaders.writers import PART, Tensor
from pallas_kernels import nvfp4

if TYPE_CHECKING:
    from loaders.tokenizer import Tokenizer

FORMATS = ("safetensors", "gguf", "orbax")
WEIGHT_FORMATS = ("keep", "bf16", "nvfp4")
_SUFFIXES = {".gguf": "gguf", ".orbax": "orbax"}
SHARD_BYTES = 5_000_000_000
_SAME_SCALE = ("qkv", "dense_gate_up", "expert_gate_up", "shared_gate_up")  # their parts share a global scale


def save_checkpoint(
    path: str | os.PathLike,
    config: FlintConfig,
    weights: Mapping[str, Any],
    *,
    to: str | None = None,
    weight_format: str = "keep",
    tokenizer: Tokenizer | None = None,
    generation: Mapping[str, Any] | None = None,
    name: str | None = None,
    progress: bool = False,
) -> Path:
    """Write a weight tree (of a loaded model, trained, or with adapters merged) as a new checkpoint.

    to: "safetensors" (a folder in the published names, which transformers reads), "gguf" or "orbax"; by default told
    from the path. weight_format: "keep", "bf16" or "nvfp4" (see above). name: of the model, kept in the files; by
    default that of the path. Raises CheckpointError when ``path`` exists or the format cannot hold the weights.
    """
    path = Path(path)
    to = format_of(path, to)
    check(path, to, weight_format)
    name = name or (path.stem if path.suffix in _SUFFIXES else path.name)
    if to == "orbax":
        from loaders import orbax

        _refuse_conversion(weight_format)
        return orbax.save(path, config, weights, tokenizer=tokenizer, generation=generation, name=name)
    return write(
        path,
        config,
        TreeWeights(weights),
        to=to,
        weight_format=weight_format,
        tokenizer=tokenizer,
        generation=generation or {},
        name=name,
        progress=progress,
    )


def format_of(path: Path, to: str | None) -> str:
    """The format that a path or a name asks for: .gguf, .orbax; a name without an ending is a safetensors folder.

    Raises CheckpointError for a format that is none, and for the ending of another kind of file: "x.onnx" as the name
    of a folder would be taken for what it is not. ("flint-1.5" has no ending: it begins with a digit; ".st" is
    short for safetensors.)
    """
    if to is not None and to not in FORMATS:
        raise CheckpointError(f"format {to!r}: need one of {', '.join(FORMATS)}")
    suffix = path.suffix.lower()
    if to is None and suffix not in (*_SUFFIXES, ".st") and suffix[1:2].isalpha():
        raise CheckpointError(
            f"{path}: no format here has the ending {path.suffix}. Give a name in .gguf or .orbax, a name without an "
            "ending for a safetensors folder, or say the format (--to)"
        )
    return to or _SUFFIXES.get(suffix, "safetensors")


def check(path: Path, to: str, weight_format: str) -> None:
    """Refuse early what cannot be written."""
    if weight_format not in WEIGHT_FORMATS:
        raise CheckpointError(f"weight format {weight_format!r}: need one of {', '.join(WEIGHT_FORMATS)}")
    if to == "safetensors" and weight_format == "nvfp4":
        raise CheckpointError("published safetensors hold BF16; NVFP4 goes into .gguf (or stays in an Orbax folder)")
    folder = next(p for p in path.absolute().parents if p.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "there is no permission to write there" if folder.is_dir() else "it is no folder"
        raise CheckpointError(f"{path} cannot be written below {folder}: {what}; give another path")
    partial.refuse_existing(path)
    partial.refuse_foreign(path, folder=to != "gguf")


def _refuse_conversion(weight_format: str) -> None:
    if weight_format != "keep":
        raise CheckpointError(
            f"an Orbax folder takes weights as they are; convert to .gguf with --format {weight_format} first, and "
            "then that file to Orbax"
        )


def write(
    path: Path,
    config: FlintConfig,
    weights: Weights,
    *,
    to: str,
    weight_format: str,
    generation: Mapping[str, Any],
    name: str,
    tokenizer: Tokenizer | None = None,
    tokenizer_folder: Path | None = None,
    gguf_tokenizer: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Path:
    """Write safetensors or GGUF. gguf_tokenizer: metadata keys to take over as they are; tokenizer_folder: files."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 4
    made = list(tensors(config, weights, to, weight_format))
    path.parent.mkdir(parents=True, exist_ok=True)
    if to == "gguf":
        packed = [t.name for t in made if t.kind == NVFP4]
        metadata = describe.general_gguf(name, packed) | describe.config_gguf(config)
        metadata |= describe.sampling_gguf(generation)
        if gguf_tokenizer:
            metadata |= gguf_tokenizer
        else:
            metadata |= describe.tokenizer_gguf(tokenizer, config) if tokenizer else describe.stop_ids_gguf(config)
        writers.write_gguf(path, metadata, made, threads=min(threads, 32), progress=progress, replace=False)
        return path
    with partial.new_folder(path) as folder:
        writers.write_safetensors(
            folder,
            made,
            shard_bytes=SHARD_BYTES,
            threads=min(threads, 32),
            metadata={NAME: name},
            progress=progress,
        )
        write_sidecars(folder, config, generation, tokenizer, tokenizer_folder)
    return path


def write_sidecars(
    folder: Path,
    config: FlintConfig,
    generation: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    tokenizer_folder: Path | None = None,
) -> None:
    """config.json, generation_config.json and the tokenizer's files."""
    stops = {"eos_token_id": list(config.eos_token_ids)} if config.eos_token_ids else {}
    ids = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    ids = stops | {key: value for key, value in ids.items() if value is not None}
    describe.write_json(folder / "generation_config.json", stops | dict(generation))
    describe.write_json(folder / "config.json", describe.config_json(config) | ids)
    describe.write_tokenizer(folder, tokenizer, config, tokenizer_folder)


# -- tensors -----------------------------------------------------------------------------------------------------------


def tensors(config: FlintConfig, weights: Weights, to: str, weight_format: str) -> Iterator[Tensor]:
    """Every tensor of a format, ready to be streamed."""
    largest: dict[tuple, float] = {}
    for source in name_map.sources(config, to, {}):
        found = list(_parts(source, weights))
        for name, parts in zip(source.names, _by_name(source, found), strict=True):
            kind = _kind(source, parts, to, weight_format)
            if kind != NVFP4:
                yield Tensor(name, kind, source.shape, _values_of(parts, kind))
                continue
            if source.shape[-1] % BLOCK:
                raise CheckpointError(
                    f"{name} has rows of {source.shape[-1]}; NVFP4 in GGUF needs a multiple of {BLOCK}. Use bf16"
                )
            tops = [_top(config, source, weights, expert, part, largest) for expert, part in enumerate(parts)]
            yield Tensor(name, kind, source.shape, _records_of(parts, tops))
            scales = [
                np.float32(part.scale) if part.kind == NVFP4 else _global_scale(top)
                for part, top in zip(parts, tops, strict=True)
            ]
            yield writers.from_array(name_map.companion(name), np.asarray(scales, np.float32))


def _parts(source: Source, weights: Weights) -> Iterator[Part]:
    """One part, or one for each expert."""
    rows = source.shape[-2] if len(source.shape) > 1 else 0
    experts = source.shape[0] if len(source.shape) == 3 else len(source.names)
    per_expert = source.leaf.startswith("expert_")
    for expert in range(experts):
        yield weights.part(source.leaf, source.index, expert if per_expert else None, source.row, rows)


def _by_name(source: Source, parts: list[Part]) -> Iterator[list[Part]]:
    """Parts of each tensor: experts are stacked in one, or have one each."""
    if len(source.names) == 1:
        yield parts
    else:
        yield from ([part] for part in parts)


def _kind(source: Source, parts: list[Part], to: str, weight_format: str) -> str:
    kinds = {part.kind for part in parts}
    matrix = source.leaf not in PLAIN_ONLY
    if not matrix and source.leaf != "embed":
        if to == "gguf":
            return "F32"
        return "BF16" if all(part.exact_in_bf16() for part in parts) else "F32"
    if weight_format == "bf16" or (source.leaf == "embed" and weight_format == "nvfp4"):
        return "BF16"
    if weight_format == "nvfp4":
        return NVFP4
    if kinds == {NVFP4}:
        return NVFP4 if to == "gguf" else "BF16"
    return "BF16" if kinds <= {"BF16", NVFP4} else "F32"


def _top(
    config: FlintConfig, source: Source, weights: Weights, expert: int, part: Part, known: dict[tuple, float]
) -> float:
    """Largest magnitude of everything that shares a part's global scale; 0 for a part that is NVFP4 already."""
    if part.kind == NVFP4:
        return 0.0
    if source.leaf not in _SAME_SCALE:
        return part.largest()
    of_expert = expert if source.leaf.startswith("expert_") else None
    key = source.leaf, source.index, of_expert
    if key not in known:
        segments = name_map.leaves(config)[source.leaf].segments
        starts = np.cumsum((0, *segments[:-1])).tolist()
        together = [
            weights.part(source.leaf, source.index, of_expert, row, rows)
            for row, rows in zip(starts, segments, strict=True)
        ]
        known[key] = max(part.largest() for part in together if part.kind != NVFP4)
    return known[key]


def _global_scale(top: float) -> np.float32:
    """As nvfp4.quantize_numpy chooses it."""
    return np.float32(top / (448 * 6)) if top > 0 else np.float32(1.0)


def _spans(parts: list[Part], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(which part, from, to) for weights ``start`` to ``stop`` of equal parts laid end to end."""
    size = parts[0].count
    while start < stop:
        which, at = divmod(start, size)
        end = min(size, at + stop - start)
        yield which, at, end
        start += end - at


def _values_of(parts: list[Part], kind: str):
    width = {"F32": 4, "BF16": 2}[kind]

    def fill(part: int, nbytes: int):
        start = part * PART // width
        pieces = [parts[i].values(a, b, kind) for i, a, b in _spans(parts, start, start + nbytes // width)]
        return np.ascontiguousarray(np.concatenate(pieces)).view(np.uint8)

    return fill


def _records_of(parts: list[Part], tops: list[float]):
    def fill(part: int, nbytes: int):
        per_record = PART // nvfp4.GGUF_BYTES * BLOCK
        start = part * per_record
        pieces = []
        for i, a, b in _spans(parts, start, start + nbytes // nvfp4.GGUF_BYTES * BLOCK):
            if parts[i].kind == NVFP4:
                pieces.append(parts[i].records(a, b))
            else:
                codes, scales, _ = nvfp4.quantize_numpy(parts[i].values(a, b).reshape(-1, BLOCK), tops[i])
                pieces.append(to_records(codes, scales).reshape(-1))
        return np.ascontiguousarray(np.concatenate(pieces))

    return fill
