"""Orbax folders: the weight tree as it is in memory, packed leaves included, restored straight to device shards.

A folder holds config.json, generation_config.json, the tokenizer, the arrays under ``weights/``, and, written last, a
marker that lists the leaves and every file with its size. Without the marker, or with a file short, nothing loads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from flint_jax.config import FlintConfig
from flint_jax.errors import CheckpointError, RequestError
from loaders import export, name_map, partial
from loaders.assemble import LoadReport, Tree, _MemoryWatch
from pallas_kernels import nvfp4

if TYPE_CHECKING:
    from loaders.tokenizer import Tokenizer

MARKER = "flint_orbax.json"
WEIGHTS = "weights"
VERSION = 1
_PLANES = {
    "plain": ("",),
    "packed": (".codes", ".scales", ".global_scale"),
    "scaled": (".values", ".global_scale"),
}
Sharding = jax.sharding.Sharding | Callable[[str, jax.ShapeDtypeStruct], jax.sharding.Sharding]


@dataclasses.dataclass(frozen=True)
class OrbaxPlan:
    """What a folder holds. leaves: stack -> {"kind": plain, packed or scaled, "arrays": {name: [shape, dtype]}}.

    name: the model's, None in a folder that does not say.
    """

    folder: Path
    leaves: Mapping[str, Mapping[str, Any]]
    name: str | None = None

    @property
    def weight_format(self) -> str:
        """ "bf16", "nvfp4" or "mixed", as of other checkpoints."""
        kinds = {leaf["kind"] for name, leaf in self.leaves.items() if name not in name_map.PLAIN_ONLY}
        return "bf16" if kinds == {"plain"} else "nvfp4" if kinds == {"packed"} else "mixed"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [a for leaf in self.leaves.values() for a in leaf["arrays"].values()]
        return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in arrays)


def save(
    path: Path,
    config: FlintConfig,
    weights: Mapping[str, Any],
    *,
    tokenizer: Tokenizer | None = None,
    tokenizer_folder: Path | None = None,
    generation: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Path:
    """Write a weight tree as a new folder. Sharded arrays are written by their shards."""
    import orbax.checkpoint as ocp

    flat, leaves = {}, {}
    expected = name_map.leaves(config)
    for stack, leaf in weights.items():
        kind, arrays = _arrays(stack, leaf)
        want = expected[stack].full_shape
        if want != tuple(leaf.shape):
            raise CheckpointError(f"{stack} is {list(leaf.shape)}, the configuration says {list(want)}")
        leaves[stack] = {"kind": kind, "arrays": {k: [list(a.shape), a.dtype.name] for k, a in arrays.items()}}
        flat |= arrays
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.new_folder(path) as folder:
        export.write_sidecars(folder, config, generation or {}, tokenizer, tokenizer_folder)
        with _quiet(), ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / WEIGHTS, flat)
        written = (f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != partial.MARK)
        files = {str(f.relative_to(folder)): f.stat().st_size for f in written}
        marker = {"version": VERSION, "name": name, "leaves": leaves, "files": files}
        (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
    return path


def open_plan(folder: Path, config: FlintConfig) -> OrbaxPlan:
    """Read the marker; every file must be there with its size, every leaf with its shape. Raises CheckpointError."""
    try:
        marker = json.loads((folder / MARKER).read_text("utf-8"))
        if marker["version"] != VERSION:
            raise CheckpointError(f"{folder / MARKER}: version {marker['version']!r}; this program reads {VERSION}")
        _check_files(folder, marker["files"])
        _check_leaves(folder, marker["leaves"], config)
        name = marker.get("name")
        return OrbaxPlan(folder, marker["leaves"], name if isinstance(name, str) else None)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise CheckpointError(f"{folder / MARKER}: damaged ({error!r:.80}); convert the checkpoint again") from None


def _check_files(folder: Path, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            what = "missing" if found is None else f"{found} bytes"
            raise CheckpointError(f"{folder / name}: {what}, need {size} bytes (incomplete copy?)")


def _check_leaves(folder: Path, leaves: Mapping[str, Any], config: FlintConfig) -> None:
    expected = {name: leaf for name, leaf in name_map.leaves(config).items() if math.prod(leaf.full_shape)}
    if set(expected) != set(leaves):
        odd = ", ".join(sorted(set(expected) ^ set(leaves))[:12])
        raise CheckpointError(f"{folder}: the weights do not fit config.json: {odd}")
    for name, want in expected.items():
        kind, arrays = leaves[name]["kind"], leaves[name]["arrays"]
        planes = [f"{name}{plane}" for plane in _PLANES[kind]]
        shapes = [tuple(arrays[plane][0]) for plane in planes]
        full, scales = want.full_shape, (*want.full_shape[:-2], len(want.segments or ()))
        codes, blocks = ((*full[:-1], full[-1] // n) for n in (2, nvfp4.GROUP))
        right = {"plain": [full], "packed": [codes, blocks, scales], "scaled": [full, scales]}[kind]
        if shapes != right or list(arrays) != planes:
            raise CheckpointError(f"{folder}: {name} is {shapes}, need {right} for {list(full)}")
        for _, dtype in arrays.values():
            jnp.dtype(dtype)


def load(
    plan: OrbaxPlan,
    config: FlintConfig,
    *,
    dtype: str = "bfloat16",
    router_dtype: str | None = None,
    sharding: Sharding | None = None,
) -> tuple[Tree, LoadReport]:
    """Restore the tree; each device reads its own shards.

    sharding: one for all arrays, or a function of (array name, ShapeDtypeStruct); array names are those of stacks,
    with ``.codes``, ``.scales``, ``.values`` and ``.global_scale`` for the planes of NVFP4. None: the default device.
    dtype, router_dtype: as for other checkpoints; "stored" keeps what is there.
    """
    import orbax.checkpoint as ocp

    began, memory = time.perf_counter(), _MemoryWatch()
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {}
    for leaf in plan.leaves.values():
        for name, (shape, kind) in leaf["arrays"].items():
            abstract[name] = _placed(name, jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(kind)), sharding)
    with _quiet(), ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore((plan.folder / WEIGHTS).absolute(), abstract)
    tree: Tree = {}
    segments = {name: leaf.segments for name, leaf in name_map.leaves(config).items()}
    for name, leaf in plan.leaves.items():
        planes = [arrays.pop(array) for array in leaf["arrays"]]
        if leaf["kind"] == "packed":
            tree[name] = nvfp4.Packed(*planes, segments[name])
        elif leaf["kind"] == "scaled":
            values = planes[0] if dtype == "stored" else planes[0].astype(dtype)
            tree[name] = nvfp4.Scaled(values, planes[1], segments[name])
        else:
            wanted = {"sinks": "float32", "router": router_dtype or dtype}.get(name, dtype)
            tree[name] = planes[0] if wanted == "stored" else planes[0].astype(wanted)
    jax.block_until_ready(tree)
    return tree, LoadReport(plan.nbytes, time.perf_counter() - began, *memory.peaks())


def _placed(name: str, bare: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """An array with its place. Raises RequestError when that is none, or one that the array cannot be cut for."""
    given = sharding if isinstance(sharding, jax.sharding.Sharding) else sharding(name, bare)
    if not isinstance(given, jax.sharding.Sharding):
        raise RequestError(
            f"sharding gave {given!r:.60} for {name}; need a jax.sharding.Sharding for every array", param="sharding"
        )
    try:
        placed = jax.ShapeDtypeStruct(bare.shape, bare.dtype, sharding=given)
        given.shard_shape(bare.shape)
        return placed
    except ValueError as error:
        raise RequestError(
            f"{name} is {list(bare.shape)}, which the sharding {given!r:.120} does not fit: {error!s:.200}. A function "
            "of (array name, ShapeDtypeStruct) can give each array its own",
            param="sharding",
        ) from None


def _arrays(name: str, leaf: Any) -> tuple[str, dict[str, jax.Array]]:
    kind, planes = "plain", (leaf,)
    if isinstance(leaf, nvfp4.Packed):
        kind, planes = "packed", (leaf.codes, leaf.scales, leaf.global_scale)
    elif isinstance(leaf, nvfp4.Scaled):
        kind, planes = "scaled", (leaf.values_, leaf.global_scale)
    elif not isinstance(leaf, jax.Array | np.ndarray):
        raise CheckpointError(
            f"{name} is {type(leaf).__name__}: load the model with kernels='xla', and merge adapters first"
        )
    return kind, {name + plane: array for plane, array in zip(_PLANES[kind], planes, strict=True)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Orbax's running commentary (30 lines a save, through absl)."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_orbax(path: str | os.PathLike) -> bool:
    """Whether a path is a folder with our marker."""
    return (Path(path) / MARKER).is_file()
