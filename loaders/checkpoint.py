"""A checkpoint opened: configuration, defaults, tokenizer and tensors known, no weight read yet."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flint_jax.config import FlintConfig
from flint_jax.errors import CheckpointError, ConfigError
from loaders import config as configs
from loaders import gguf, hub, name_map, orbax, safetensors
from loaders.assemble import LoadReport, Tree, assemble
from loaders.assemble import shapes as assemble_shapes
from loaders.raw import RawTensor

if TYPE_CHECKING:
    from loaders.tokenizer import Tokenizer


@dataclasses.dataclass
class Checkpoint:
    """What open_checkpoint found.

    generation: settings of generation_config.json (its names; ``eos_token_id`` is a list) or of the GGUF, may be empty.
    format: "safetensors", "gguf", "orbax" or "none" (see describe_checkpoint). weight_format: "bf16", "nvfp4" or
    "mixed". nbytes: bytes of weights in the files.
    report: cost of the last load_weights, None before. clear_scale_signs: see open_checkpoint.
    name: what the files say (general.name in GGUF; every format written here keeps it), else that of the path.
    """

    name: str
    path: Path
    format: str
    config: FlintConfig
    generation: dict[str, Any]
    plan: name_map.Plan | orbax.OrbaxPlan | NoWeights = dataclasses.field(repr=False)
    tokenizer_path: Path | None = None
    report: LoadReport | None = None
    clear_scale_signs: bool = False

    @property
    def weight_format(self) -> str:
        """ "bf16", "nvfp4" or "mixed" (some projections packed, some not)."""
        return self.plan.weight_format

    @property
    def nbytes(self) -> int:
        """Bytes of the files that the model consumes."""
        return self.plan.nbytes

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """loaders.tokenizer.Tokenizer, or None when the checkpoint has none. Read on first use (TokenizerError)."""
        if self.tokenizer_path is None:
            return None
        from loaders import load_tokenizer

        return load_tokenizer(self.tokenizer_path)

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template, or None."""
        return self.tokenizer.chat_template if self.tokenizer else None


def open_checkpoint(
    path: str | os.PathLike,
    *,
    config: str | os.PathLike | FlintConfig | None = None,
    tokenizer: str | os.PathLike | None = None,
    clear_scale_signs: bool = False,
) -> Checkpoint:
    """Open a folder, a .gguf, a .safetensors, an index, or a hub id (``owner/name`` or ``owner/name:file.gguf``).

    A folder holds safetensors, one model in GGUF, or Orbax. A .gguf file stands for itself; a folder may hold a
    config.json, tokenizer.json or generation_config.json next to
    its .gguf, which then win. ``config`` (a config.json, its folder, or a FlintConfig) and ``tokenizer`` (a folder or
    .gguf) win over both. Only headers are read: no weight is touched.

    clear_scale_signs: read NVFP4 block scales of 0x80 to 0xFE without their sign bit, which the format does not have,
    instead of refusing them when the weights are loaded.

    Raises CheckpointError for files that are damaged, incomplete, ambiguous or of other types, and ConfigError for a
    configuration that this model cannot run or that contradicts the tensors.
    """
    for name, given in (("path", path), ("config", config), ("tokenizer", tokenizer)):
        if not isinstance(given, str | os.PathLike | None) and not (
            name == "config" and isinstance(given, FlintConfig)
        ):
            raise CheckpointError(f"{name} = {given!r:.60}: need a path, as text or pathlib.Path")
    path = hub.resolve(path)
    kind, target = _find(path)
    if kind == "orbax":
        return _open_orbax(path, config, tokenizer)
    folder = path if path.is_dir() else path.parent if kind == "safetensors" else None
    opened = gguf.open_gguf(target) if kind == "gguf" else safetensors.open_safetensors(target)
    metadata = opened.metadata if kind == "gguf" else {}
    found, eos_known = _config(config, folder, metadata, opened.tensors, path)
    generation = _generation(folder, metadata)
    eos = dict.fromkeys([*found.eos_token_ids, *generation.get("eos_token_id", [])])
    if not eos_known and tuple(eos) != found.eos_token_ids:
        found = dataclasses.replace(found, eos_token_ids=tuple(eos))
    try:
        plan = name_map.match(found, kind, opened.tensors, getattr(opened, "unlisted", ()))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return Checkpoint(
        name=_name(opened.metadata.get(safetensors.NAME), path),
        path=path,
        format=kind,
        config=found,
        generation=generation,
        plan=plan,
        tokenizer_path=_tokenizer_path(tokenizer, folder, metadata, opened.paths[0]),
        clear_scale_signs=clear_scale_signs,
    )


@dataclasses.dataclass(frozen=True)
class NoWeights:
    """The plan of a checkpoint whose weights are not looked at. weight_format: "bf16" or "nvfp4"."""

    weight_format: str
    nbytes: int = 0


def describe_checkpoint(
    path: str | os.PathLike,
    *,
    config: str | os.PathLike | None = None,
    tokenizer: str | os.PathLike | None = None,
    weight_format: str | None = None,
) -> Checkpoint:
    """``open_checkpoint`` without weights: a folder with config.json (and a tokenizer) is enough; a .gguf is read up to
    its tensors.

    weight_format: "bf16" or "nvfp4"; default: that of a GGUF, else "bf16". Raises CheckpointError and ConfigError; a
    hub id is not downloaded.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file or folder; without weights it takes a local folder with config.json and a "
            "tokenizer, or a .gguf file"
        )
    alone = path.is_dir() and not any(path.glob("*.gguf")) and not orbax.is_orbax(path)
    if not alone:
        found = open_checkpoint(path, config=config, tokenizer=tokenizer)
        own = "nvfp4" if found.weight_format == "nvfp4" else "bf16"
        return dataclasses.replace(found, plan=NoWeights(weight_format or own), report=None)
    if config is None and not (path / "config.json").is_file():
        raise ConfigError(f"{path}: no config.json in this folder, which says what shapes the weights have")
    found, _ = _config(config, path, {}, {}, path)
    generation = _generation(path, {})
    eos = dict.fromkeys([*found.eos_token_ids, *generation.get("eos_token_id", [])])
    return Checkpoint(
        name=_name(None, path),
        path=path,
        format="none",
        config=dataclasses.replace(found, eos_token_ids=tuple(eos)),
        generation=generation,
        plan=NoWeights(weight_format or "bf16"),
        tokenizer_path=_tokenizer_path(tokenizer, path, {}, path),
    )


def load_weights(
    ckpt: Checkpoint,
    *,
    dtype: str = "bfloat16",
    router_dtype: str | None = None,
    progress: bool = True,
    sharding: orbax.Sharding | None = None,
) -> Tree:
    """Stream the weights onto the default device: dict of arrays, ``nvfp4.Packed`` and ``nvfp4.Scaled`` (see name_map).

    dtype: compute dtype of plain leaves, or "stored" (each leaf in the widest dtype of its tensors); ``sinks`` stays
    float32; ``router`` gets ``router_dtype`` (default: dtype). sharding: where the arrays of an Orbax folder go (see
    orbax.load). Sets ``ckpt.report``. Raises CheckpointError for values that are not allowed.
    """
    if isinstance(ckpt.plan, orbax.OrbaxPlan):
        tree, ckpt.report = orbax.load(
            ckpt.plan, ckpt.config, dtype=dtype, router_dtype=router_dtype, sharding=sharding
        )
        return tree
    if sharding is not None:
        raise CheckpointError(
            f"{ckpt.path}: only an Orbax folder is restored to shards; make one with "
            f"`python -m flint_jax convert {ckpt.path} NAME.orbax`"
        )
    tree, ckpt.report = assemble(
        ckpt.plan,
        dtype=dtype,
        router_dtype=router_dtype,
        clear_scale_signs=ckpt.clear_scale_signs,
        progress=progress,
    )
    return tree


def weight_shapes(ckpt: Checkpoint, *, dtype: str = "bfloat16", router_dtype: str | None = None) -> Tree | None:
    """The tree that ``load_weights`` will give, with shapes for arrays; None for Orbax, which says it only on reading.

    With it, programs are compiled and memory is planned before a byte of weights is read.
    """
    if isinstance(ckpt.plan, orbax.OrbaxPlan):
        return None
    return assemble_shapes(ckpt.plan, dtype=dtype, router_dtype=router_dtype)


def _open_orbax(
    path: Path, config: str | os.PathLike | FlintConfig | None, tokenizer: str | os.PathLike | None
) -> Checkpoint:
    found, eos_known = _config(config, path, {}, {}, path)
    generation = _generation(path, {})
    if not eos_known:
        eos = dict.fromkeys([*found.eos_token_ids, *generation.get("eos_token_id", [])])
        found = dataclasses.replace(found, eos_token_ids=tuple(eos))
    plan = orbax.open_plan(path, found)
    return Checkpoint(
        name=_name(plan.name, path),
        path=path,
        format="orbax",
        config=found,
        generation=generation,
        plan=plan,
        tokenizer_path=_tokenizer_path(tokenizer, path, {}, path),
    )


def _name(own: Any, path: Path) -> str:
    """The name that the files give, else that of the path."""
    if isinstance(own, str) and own:
        return own
    snapshots = path.parent
    if path.is_dir() and snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
        return snapshots.parent.name.rpartition("--")[2]  # of the hub's cache, where the folder's name is a commit
    name = path.resolve().name if path.is_dir() else path.stem
    return name.encode("utf-8", "replace").decode()


def _find(path: Path) -> tuple[str, Path]:
    """(format, what to open) for an existing file or folder."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder, and not a hub id of the form owner/name")
    if path.is_file():
        if path.name.endswith((".safetensors", safetensors.INDEX_SUFFIX)):
            return "safetensors", path
        if path.suffix == ".gguf" or gguf.is_gguf(path):
            return "gguf", path
        raise CheckpointError(f"{path}: neither a .gguf nor a .safetensors file")
    if orbax.is_orbax(path):
        return "orbax", path
    if (path / orbax.WEIGHTS).is_dir():
        raise CheckpointError(f"{path}: an Orbax folder without {orbax.MARKER}, so its save or copy was interrupted")
    tensors = any(path.glob("*.safetensors")) or any(path.glob("*" + safetensors.INDEX_SUFFIX))
    packed = sorted(path.glob("*.gguf"))
    if tensors and packed:
        raise CheckpointError(f"{path}: both .safetensors and .gguf files; give the path of the one to load")
    if tensors:
        return "safetensors", path
    if packed:
        return "gguf", _one_gguf(path, packed)
    others = sorted(p.name for p in path.iterdir())[:5]
    raise CheckpointError(
        f"{path}: no .safetensors and no .gguf file in this folder (there: {', '.join(others) or 'nothing'})"
    )


def _one_gguf(folder: Path, files: list[Path]) -> Path:
    """The only model of a folder: one file, or the parts of one (their headers say whether they belong together)."""
    if len(files) == 1:
        return files[0]
    stems = {gguf.split_stem(file) for file in files}
    if len(stems) == 1 and None not in stems:
        return files[0]
    if stems == {None} and all(gguf.is_part(file) for file in files):
        return files[0]
    names = ", ".join(p.name for p in files[:8])
    raise CheckpointError(f"{folder}: {len(files)} .gguf files ({names}); give the path of the one to load")


def _config(
    given: str | os.PathLike | FlintConfig | None,
    folder: Path | None,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, RawTensor],
    path: Path,
) -> tuple[FlintConfig, bool]:
    """The configuration, and whether its stop ids are final (the caller made it)."""
    if isinstance(given, FlintConfig):
        return given, True
    if given is not None:
        given = Path(given)
        file = given / "config.json" if given.is_dir() else given
    else:
        file = folder / "config.json" if folder else None
        if file is not None and not file.is_file():
            if not metadata:
                raise ConfigError(f"{folder}: no config.json next to the weights")
            file = None
    try:
        if file is None:
            embed = tensors.get("token_embd.weight")
            return configs.config_from_gguf(
                metadata, embed.shape[0] if embed and len(embed.shape) == 2 else None
            ), False
        return configs.config_from_json(configs.read_json(file)), False
    except ConfigError as error:
        where = str(file or path)
        raise error if where in str(error) else ConfigError(f"{where}: {error}") from None


def _generation(folder: Path | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    file = folder / "generation_config.json" if folder else None
    if file is not None and file.is_file():
        return configs.generation_from_json(configs.read_json(file))
    return configs.generation_from_gguf(metadata)


def _tokenizer_path(
    given: str | os.PathLike | None, folder: Path | None, metadata: Mapping[str, Any], first: Path
) -> Path | None:
    if given is not None:
        return Path(given)
    if folder is not None and (folder / "tokenizer.json").is_file():
        return folder
    return first if "tokenizer.ggml.tokens" in metadata else None
