"""Random checkpoints in both published formats: ``python -m loaders.synthetic PATH --preset tiny|full``.

They have Flint's structure, names, number formats, a tokenizer and a chat template; what they say means nothing. The
scales are chosen so that everything a kernel sees is of ordinary size (rms of one entry):

    embedding 1; each branch adds up to 0.5 to the residual, which ends near 4 after 49 layers;
    q, k, v, gate, up 1 after a norm; router logits 1, so that the top experts differ from token to token;
    norm weights 1 +- 0.1; sinks N(0, 1); logits 2.5.

Every tensor has a random stream of its own, made from the seed, its place and the part: any order and any number of
threads give the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flint_jax.command_line import Parser
from flint_jax.config import FULL, SLIDING, FlintConfig
from flint_jax.number_flags import whole
from loaders import describe, name_map, parts, vocabulary, writers
from loaders.name_map import Source
from loaders.parts import to_records
from loaders.writers import PART, Tensor
from pallas_kernels import nvfp4

GENERATION = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
FORMATS = ("gguf", "safetensors")

_SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 768, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4, "sliding_window": 65,
        "max_position_embeddings": 4096,
    },
    "full": {
        "vocab_size": 150144, "hidden_size": 2048, "num_hidden_layers": 49, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024, "num_experts": 256, "num_experts_per_tok": 6, "sliding_window": 513,
        "max_position_embeddings": 262144,
    },
}  # fmt: skip
PRESETS = tuple(_SIZES)


def preset(name: str, layers: int | None = None, **sizes: int) -> FlintConfig:
    """The architecture of a preset, with fewer ``layers`` or other sizes if given. Raises ConfigError."""
    values = _SIZES[name] | sizes | ({} if layers is None else {"num_hidden_layers": layers})
    count = values["num_hidden_layers"]
    kinds = tuple(FULL if i < 2 or i % 4 == 1 or i == count - 1 else SLIDING for i in range(count))
    return FlintConfig(
        **values,
        layer_types=kinds,
        rope_layers=tuple(k == SLIDING for k in kinds),
        mlp_only_layers=tuple(range(min(2, count))),
    )


# -- numbers ---------------------------------------------------------------------------------------------------------

_ACT = 0.6  # rms of silu(g) * u for g, u ~ N(0, 1)
_CODE_RMS = math.sqrt(float(np.mean(nvfp4.E2M1**2)))  # of a uniformly random 4-bit code
_SCALE_LOW = 0x30  # random block scales are the 16 bytes from here: 0.5 to 1.875
_SCALE_RMS = math.sqrt(float(np.mean(nvfp4.E4M3[_SCALE_LOW : _SCALE_LOW + 16] ** 2)))
_NORMS = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "final_norm")


def spread(config: FlintConfig, leaf: str) -> float:
    """Standard deviation of a leaf's entries (for norms: around 1)."""
    d = config.hidden_size
    inputs = 1 / math.sqrt(d)
    return {
        "embed": 1.0,
        "head": 2.5 * inputs,
        "o": 0.5 / math.sqrt(config.q_size),
        "dense_down": 0.5 / (_ACT * math.sqrt(config.intermediate_size)),
        # routed and shared experts each add 0.35; the average of k experts is sqrt(k) times smaller than one
        "expert_down": 0.35 * math.sqrt(config.num_experts_per_tok) / (_ACT * math.sqrt(config.moe_intermediate_size)),
        "shared_down": 0.35 / (_ACT * math.sqrt(config.shared_expert_intermediate_size)),
        "sinks": 1.0,
        **dict.fromkeys(_NORMS, 0.1),
    }.get(leaf, inputs)


@dataclasses.dataclass(frozen=True)
class Stream:
    """The random numbers of one tensor (of one expert, where experts are stacked)."""

    seed: int
    leaf: str
    layer: int | None
    row: int
    expert: int
    std: float

    def generator(self, part: int) -> np.random.SFC64:
        """Bit generator of a part."""
        key = zlib.crc32(f"{self.leaf}/{self.layer}/{self.row}/{self.expert}".encode())
        return np.random.SFC64([self.seed, key, part])

    def raw(self, part: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], uniform."""
        return self.generator(part).random_raw(-(-nbytes // 8)).view(np.uint8)[:nbytes]

    def bf16(self, part: int, nbytes: int) -> np.ndarray:
        """A part of a BF16 tensor, uint16: uniform numbers of this spread (cheaper than normal ones, same sums)."""
        step = np.float32(self.std * math.sqrt(3) / 32768)
        values = self.raw(part, nbytes).view(np.int16).astype(np.float32)
        values *= step
        bits = values.view(np.uint32)
        bits += np.uint32(0x8000)  # round to nearest; nothing here is near the largest float
        bits >>= np.uint32(16)
        return bits.astype(np.uint16)

    def whole_bf16(self, count: int) -> np.ndarray:
        """All ``count`` entries of a BF16 tensor as float32."""
        sizes = [min(PART, 2 * count - at) for at in range(0, 2 * count, PART)]
        parts = [self.bf16(i, size) for i, size in enumerate(sizes)]
        return np.concatenate(parts).view(ml_dtypes.bfloat16).astype(np.float32)

    def records(self, part: int, nbytes: int) -> np.ndarray:
        """A part of an NVFP4 tensor: records of random codes with random, well-formed block scales."""
        raw = self.raw(part, nbytes)
        scales = raw.view(np.uint32)[:: nvfp4.GGUF_BYTES // 4]
        scales &= np.uint32(0x0F0F0F0F)
        scales |= np.uint32(_SCALE_LOW * 0x01010101)
        return raw

    def normal(self, count: int) -> np.ndarray:
        """float32 [count], normal with this spread and exact in BF16 (norms: around 1)."""
        values = np.random.Generator(self.generator(0)).standard_normal(count) * self.std
        values += 1.0 if self.leaf in _NORMS else 0.0
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)


# -- tensors ---------------------------------------------------------------------------------------------------------


def safetensors_tensors(config: FlintConfig, seed: int) -> Iterator[Tensor]:
    """Every tensor under its published name, all BF16."""
    for source in name_map.sources(config, "safetensors", {}):
        for expert, name in enumerate(source.names):
            stream = _stream(config, source, seed, expert)
            if _is_big(source.leaf):
                yield Tensor(name, "BF16", source.shape, stream.bf16)
            else:
                count = math.prod(source.shape)
                values = stream.normal(count).astype(ml_dtypes.bfloat16).view(np.uint16)
                yield writers.from_bytes(name, "BF16", source.shape, values)


def gguf_tensors(config: FlintConfig, seed: int, *, same: bool) -> Iterator[Tensor]:
    """Every tensor of the NVFP4 file: projections, experts and head packed, embedding BF16, the rest F32.

    same: quantise the values of the safetensors checkpoint of this seed, a whole tensor in memory at a time. Otherwise
    draw the 4-bit codes themselves, which is as fast as the generator.
    """
    for source in name_map.sources(config, "gguf", {}):
        (name,) = source.names
        stream = _stream(config, source, seed)
        if source.leaf == "embed":
            yield Tensor(name, "BF16", source.shape, stream.bf16)
        elif not _is_big(source.leaf):
            yield writers.from_array(name, stream.normal(math.prod(source.shape)).reshape(source.shape))
        else:
            stacked = len(source.shape) == 3
            experts = source.shape[0] if stacked else 1
            if same:
                streams = [_stream(config, source, seed, e) for e in range(experts)]
                records, scales = _quantised(streams, source.shape[-2:])
                yield writers.from_bytes(name, "NVFP4", source.shape, records)
            else:
                around = np.random.Generator(stream.generator(1 << 30)).uniform(0.9, 1.1, experts)
                scales = np.float32(stream.std / (_CODE_RMS * _SCALE_RMS)) * around.astype(np.float32)
                yield Tensor(name, "NVFP4", source.shape, stream.records)
            yield writers.from_array(name_map.companion(name), scales)


def _quantised(streams: Sequence[Stream], shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(records uint8 [E, rows, bytes], global scales float32 [E]) of the BF16 values of some streams."""
    records, scales = [], []
    for stream in streams:
        codes, block, scale = nvfp4.quantize_numpy(stream.whole_bf16(math.prod(shape)).reshape(shape))
        records.append(to_records(codes, block))
        scales.append(scale)
    return np.ascontiguousarray(np.stack(records)), np.asarray(scales, np.float32)


def _stream(config: FlintConfig, source: Source, seed: int, expert: int = 0) -> Stream:
    return Stream(seed, source.leaf, source.index, source.row, expert, spread(config, source.leaf))


def _is_big(leaf: str) -> bool:
    return leaf not in (*_NORMS, "sinks", "router")


# -- files -----------------------------------------------------------------------------------------------------------


def write_gguf(
    path: str | os.PathLike,
    config: FlintConfig,
    *,
    seed: int = 0,
    same: bool | None = None,
    threads: int | None = None,
    progress: bool = False,
    replace: bool = True,
) -> int:
    """Write an NVFP4 GGUF with tokenizer and chat template; returns its bytes.

    same: see gguf_tensors; by default true for models below 50 million weights. replace: whether a file of that name
    may be replaced.
    """
    path = Path(path)
    same = config.num_parameters < 50e6 if same is None else same
    vocab = vocabulary.build(config.vocab_size)
    tensors = list(gguf_tensors(config, seed, same=same))
    metadata = _gguf_metadata(config, path.stem, [t.name for t in tensors if t.kind == "NVFP4"])
    metadata |= vocab.gguf_metadata()
    path.parent.mkdir(parents=True, exist_ok=True)
    return writers.write_gguf(
        path, metadata, tensors, threads=threads or _threads(), progress=progress, replace=replace
    )


def write_safetensors(
    folder: str | os.PathLike,
    config: FlintConfig,
    *,
    seed: int = 0,
    shard_bytes: int | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> int:
    """Write a BF16 folder as published: shards and index, configs, tokenizer, template. Returns the bytes of weights.

    shard_bytes: 5 GB by default, and a third of the model below that, so that there are always several shards.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = list(safetensors_tensors(config, seed))
    shard_bytes = shard_bytes or min(5_000_000_000, 2 * config.num_parameters // 3 + 1)
    size = writers.write_safetensors(
        folder, tensors, shard_bytes=shard_bytes, threads=threads or _threads(), progress=progress
    )
    write_description(folder, config)
    return size


def write_description(folder: str | os.PathLike, config: FlintConfig) -> None:
    """All of a published folder but its weights: configs, tokenizer and chat template."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocab = vocabulary.build(config.vocab_size)
    vocab.write_folder(folder, config.max_position_embeddings)
    ids = {"eos_token_id": vocab.eos_ids, "pad_token_id": vocab.eos_ids[0]}
    describe.write_json(folder / "generation_config.json", GENERATION | ids)
    describe.write_json(folder / "config.json", describe.config_json(config) | ids)


def _gguf_metadata(config: FlintConfig, name: str, packed: list[str]) -> dict[str, Any]:
    return describe.general_gguf(name, packed) | describe.config_gguf(config) | describe.sampling_gguf(GENERATION)


def _threads() -> int:
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 4, 32)


# -- one that is made when it is first asked for ----------------------------------------------------------------------

_RANDOM_NAMES = {"gguf": "flint-random-NVFP4.gguf", "safetensors": "flint-random"}


def random_checkpoint(form: str = "gguf") -> Path:
    """The tiny preset with random weights, seed 0, written into the user's cache on first use.

    form: "gguf" (one NVFP4 file, about 2 MB) or "safetensors" (a BF16 folder of the same weights, about 6 MB).
    Several processes may ask at once: each writes a folder of its own, and the first to finish is the one that stays.
    The cache is $FLINT_JAX_CACHE, else $XDG_CACHE_HOME/flint_jax, else ~/.cache/flint_jax.
    """
    home = _cache_folder() / f"tiny-{_fingerprint()}"
    if not home.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=".tiny-", dir=home.parent))
        try:
            config = preset("tiny")
            write_gguf(making / _RANDOM_NAMES["gguf"], config)
            write_safetensors(making / _RANDOM_NAMES["safetensors"], config)
            making.chmod(0o755)
            try:
                making.rename(home)
            except OSError:
                if not home.is_dir():
                    raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return home / _RANDOM_NAMES[form]


def _cache_folder() -> Path:
    given = os.environ.get("FLINT_JAX_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "flint_jax"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass  # no home, or one that cannot be written: a service account, a read-only image
    return Path(tempfile.gettempdir()) / f"flint_jax-{os.getuid()}"


def _fingerprint() -> str:
    """Names the content: everything that the files are made from."""
    made_from = [
        Path(m.__file__) for m in (sys.modules[__name__], describe, name_map, parts, vocabulary, writers, nvfp4)
    ]
    made_from += [vocabulary.EMBEDDED / "chat_template.jinja", vocabulary.EMBEDDED / "corpus.txt"]
    digest = hashlib.sha256()
    for path in made_from:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


# -- command ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = Parser(prog="flint synthetic", description="Write a Flint with random weights.")
    parser.add_argument("path", type=Path, help="file to write (gguf) or folder to write into (safetensors)")
    parser.add_argument(
        "--preset", choices=PRESETS, default="tiny", help="tiny: 3 million weights; full: Flint's shapes"
    )
    parser.add_argument("--format", choices=FORMATS, help="default: gguf when PATH ends in .gguf, else safetensors")
    parser.add_argument("--layers", type=whole(1), metavar="N", help="write only N layers")
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--threads", type=whole(1), help="default: one per core")
    args = parser.parse_args(argv)
    form = args.format or ("gguf" if args.path.suffix == ".gguf" else "safetensors")
    config = preset(args.preset, args.layers)
    if form == "gguf" and args.path.is_dir():
        parser.error(f"{args.path} is a folder; give the name of the .gguf file to write")
    if form == "safetensors" and args.path.is_file():
        parser.error(f"{args.path} is a file; give the folder to write into")
    where = args.path.absolute().parent
    if not where.is_dir():
        parser.error(f"there is no folder {where}; make it, or give another path")
    if form == "gguf" and os.path.lexists(args.path):
        parser.error(f"{args.path} exists already; remove it, or give another path")
    if form == "safetensors" and args.path.is_dir() and any(args.path.iterdir()):
        parser.error(f"{args.path} exists already and is not empty; remove it, or give another path")
    need = config.num_parameters * (2.0 if form == "safetensors" else 0.6)
    free = shutil.disk_usage(where).free
    if free < need:
        parser.error(
            f"{where} has {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB are needed; free some or give another path"
        )
    start = time.monotonic()
    options = {"seed": args.seed, "threads": args.threads, "progress": sys.stderr.isatty()}
    if form == "gguf":
        size = write_gguf(args.path, config, **options, replace=False)
    else:
        size = write_safetensors(args.path, config, **options)
    took = time.monotonic() - start
    print(f"{args.path}: {size / 1e9:.2f} GB in {took:.1f} s, {size / 1e9 / took:.2f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
