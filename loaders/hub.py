"""A hub id -> a local path, downloading only what is needed."""

from __future__ import annotations

import glob
import json
import os
import re
from pathlib import Path
from typing import Any

from flint_jax.errors import CheckpointError
from loaders.gguf import split_stem
from loaders.safetensors import INDEX_SUFFIX

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^:]+\.gguf))?")


def resolve(path: str | os.PathLike) -> Path:
    """A path that exists as it is; a hub id (``owner/name`` or ``owner/name:file.gguf``) downloaded.

    Raises CheckpointError when huggingface_hub is missing, the download fails, or the repository holds several models.
    """
    local = Path(path).expanduser()
    if local.exists():
        return local
    match = _HUB_ID.fullmatch(str(path)) if isinstance(path, str) else None
    if match is None or (match["file"] is None and path.endswith((".safetensors", ".gguf", ".json"))):
        return local  # the caller says that it is not there
    return _download(match["repo"], match["file"])


def _download(repo: str, file: str | None) -> Path:
    hub = _library(repo)
    try:
        names = hub.HfApi().list_repo_files(repo)
        wanted, target = _choose(hub, repo, names, file)
        folder = hub.snapshot_download(repo, allow_patterns=[glob.escape(name) for name in wanted])
    except CheckpointError:
        raise
    except Exception as error:  # the library raises many kinds: network, authentication, no such repository
        raise CheckpointError(
            f"{repo}: no such file or folder, and as a hub id the download failed: {type(error).__name__}: {error}"
        ) from error
    return Path(folder) / target if target else Path(folder)


def _library(repo: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            f"{repo}: no such file or folder; to download it as a hub id, pip install 'flint-jax[hub]'"
        ) from None
    return huggingface_hub


def _choose(hub: Any, repo: str, names: list[str], file: str | None) -> tuple[list[str], str | None]:
    """(files to fetch, the one to open or None for the folder)."""
    packed = sorted(name for name in names if name.endswith(".gguf"))
    side = [name for name in SIDE_FILES if name in names]
    if file is not None:
        if file not in packed:
            raise CheckpointError(f"{repo}: no {file}; there: {_list(packed)}")
        return _parts(packed, file), file
    top = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    indexes = sorted(name for name in names if name.endswith(INDEX_SUFFIX) and "/" not in name)
    if len(indexes) > 1:
        raise CheckpointError(f"{repo}: several indexes: {_list(indexes)}")
    if indexes:
        index = json.loads(Path(hub.hf_hub_download(repo, indexes[0])).read_text("utf-8"))
        shards = sorted(set(index.get("weight_map", {}).values()))
        missing = [name for name in shards if name not in names]
        if missing or not shards:
            raise CheckpointError(f"{repo}: {indexes[0]} names files that are not there: {_list(missing)}")
        return [*side, indexes[0], *shards], None
    if len(top) == 1:
        return [*side, *top], None
    if top:
        raise CheckpointError(f"{repo}: several .safetensors files and no index: {_list(top)}")
    if not packed:
        raise CheckpointError(f"{repo}: neither .safetensors nor .gguf files")
    models = {split_stem(name) or name for name in packed}
    if len(models) > 1:
        raise CheckpointError(f"{repo}: several .gguf files; ask for one as {repo}:FILE.gguf, FILE of {_list(packed)}")
    return packed, packed[0]


def _parts(packed: list[str], file: str) -> list[str]:
    stem = split_stem(file)
    return [file] if stem is None else [name for name in packed if split_stem(name) == stem]


def _list(names: list[str], limit: int = 12) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "") or "none"
