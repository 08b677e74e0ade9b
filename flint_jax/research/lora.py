"""LoRA: low-rank additions to chosen matrices, experts included, over frozen packed or plain weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from flint_jax.config import FlintConfig
from flint_jax.errors import CheckpointError, RequestError
from flint_jax.lm import LanguageModel
from flint_jax.model import Flint
from flint_jax.numerics import SCALED, Adapted, Matrix, Numerics
from flint_jax.research.tracing import as_model
from flint_jax.weights import shapes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapters:
    """Per stack: down [..., r, C] and up [..., R, r], float32. The addition is ``alpha / rank * up @ down``."""

    down: dict[str, Array]
    up: dict[str, Array]
    alpha: float = dataclasses.field(metadata={"static": True})

    @property
    def rank(self) -> int:
        """r, the same for all."""
        return next(iter(self.down.values())).shape[-2]

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / self.rank


def targets(config: FlintConfig) -> tuple[str, ...]:
    """Stacks that can be adapted."""
    return tuple(name for name, spec in shapes(config).items() if spec.is_matrix)


def create(
    config: FlintConfig, stacks: Sequence[str] = ("qkv", "o"), *, rank: int = 8, alpha: float = 16.0, seed: int = 0
) -> Adapters:
    """New adapters: down is normal with spread 1/sqrt(C), up is zero, so nothing changes yet.

    stacks: names of ``targets`` (a fused stack such as qkv or gate_up shares one down). Raises RequestError.
    """
    known = targets(config)
    if isinstance(stacks, str) or not isinstance(stacks, Sequence) or not stacks or any(s not in known for s in stacks):
        raise RequestError(f"stacks = {stacks!r:.100}: need a list of names among {', '.join(known)}", param="stacks")
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 1:
        raise RequestError(f"rank = {rank!r:.60}: need a whole number, at least 1", param="rank")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | np.number) or not math.isfinite(alpha):
        raise RequestError(f"alpha = {alpha!r:.60}: need a finite number", param="alpha")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise RequestError(f"seed = {seed!r:.60}: need a whole number", param="seed")
    down, up = {}, {}
    for n, name in enumerate(stacks):
        *lead, rows, columns = shapes(config)[name].shape
        key = jax.random.fold_in(jax.random.key(seed), n)
        down[name] = jax.random.normal(key, (*lead, rank, columns), jnp.float32) / math.sqrt(columns)
        up[name] = jnp.zeros((*lead, rows, rank), jnp.float32)
    return Adapters(down, up, float(alpha))


def attach(weights: Mapping[str, Matrix], adapters: Adapters) -> dict[str, Matrix]:
    """The weight tree with the adapted stacks wrapped; nothing is copied. Raises RequestError for another model's."""
    out = dict(weights)
    for name, down in adapters.down.items():
        if name not in weights:
            raise RequestError(f"the adapters are for {name}, and this model has no {name}: they are another model's")
        have, need = (*down.shape[:-2], adapters.up[name].shape[-2], down.shape[-1]), tuple(weights[name].shape)
        if have != need:
            raise RequestError(f"the adapters of {name} are for {list(have)}, this model has {list(need)}")
        out[name] = Adapted(weights[name], down, adapters.up[name], adapters.scale)
    return out


def weights_of(lm) -> dict[str, Matrix]:
    """The weight stacks of a LanguageModel or Flint."""
    return {name: param.get_value() for name, param in as_model(lm).stacks.items()}


def apply(lm, adapters: Adapters):
    """The same LanguageModel or Flint with adapters in place, over the same frozen arrays."""
    model = as_model(lm)
    positions = model.rope.get_value().shape[0]
    made = Flint(model.config, attach(weights_of(model), adapters), model.numerics, max_positions=positions)
    if isinstance(lm, Flint):
        return made
    return LanguageModel(
        made,
        lm.tokenizer,
        generation=lm.generation,
        chat_template=lm.chat_template,
        name=lm.name,
        max_context=lm.max_context,
        progress=lm.progress,
    )


def adapters_over(config: FlintConfig, numerics: Numerics):
    """A ``train.Build``: params are Adapters, frozen is the weight tree (``weights_of``)."""

    def build(params: Adapters, frozen: Mapping[str, Matrix], length: int) -> Flint:
        return Flint(config, attach(frozen, params), numerics, max_positions=length)

    return build


def merge(weights: Mapping[str, Matrix], adapters: Adapters, dtype=jnp.bfloat16) -> dict[str, Matrix]:
    """The weight tree with the additions folded in: adapted stacks become plain ``dtype``, the others stay.

    Each merged weight is rounded once. Packed stacks are decoded one layer at a time.
    """
    out = dict(weights)
    fold = jax.jit(plain, static_argnums=1)
    for name, leaf in attach(weights, adapters).items():
        if isinstance(leaf, Adapted):
            whole = leaf.down.ndim == 2
            layers = [leaf] if whole else [leaf[i] for i in range(leaf.shape[0])]
            merged = [fold(layer, dtype) for layer in layers]
            out[name] = merged[0] if whole else jnp.stack(merged)
    return out


def plain(w: Matrix, dtype=jnp.float32) -> Array:
    """A matrix of any kind as numbers, global scales folded in."""
    if isinstance(w, Adapted):
        product = jnp.matmul(w.up, w.down, precision="highest")
        return (plain(w.base) + jnp.float32(w.scale) * product).astype(dtype)
    if isinstance(w, SCALED):
        return (w.values(jnp.float32) * w.row_scale()[..., None]).astype(dtype)
    return w.astype(dtype)


# -- files -------------------------------------------------------------------------------------------------------------


def save(path: str | Path, adapters: Adapters) -> None:
    """Write one .safetensors file (float32; ``STACK.down`` and ``STACK.up``; alpha in its metadata)."""
    from loaders import writers

    tensors = [
        writers.from_array(f"{name}.{part}", np.asarray(leaf))
        for part, leaves in (("down", adapters.down), ("up", adapters.up))
        for name, leaf in leaves.items()
    ]
    writers.write_safetensors_file(Path(path), tensors, {"format": "flint-lora", "alpha": repr(adapters.alpha)})


def load(path: str | Path, config: FlintConfig) -> Adapters:
    """Read what ``save`` wrote. Raises CheckpointError when it does not fit the model."""
    from loaders import safetensors

    opened = safetensors.open_safetensors(path)
    metadata = safetensors.read_metadata(path)
    if metadata.get("format") != "flint-lora":
        raise CheckpointError(f"{path}: not adapters (format {metadata.get('format')!r}); need a file of lora.save")
    arrays = {name: np.array(tensor.array(), np.float32) for name, tensor in opened.tensors.items()}
    down, up = ({n[: -len(p)]: a for n, a in arrays.items() if n.endswith(p)} for p in (".down", ".up"))
    known = shapes(config)
    for name in {*down, *up}:
        fits = name in targets(config) and name in down and name in up and down[name].ndim > 1
        if fits:
            *lead, rows, columns = known[name].shape
            rank = down[name].shape[-2]
            fits = down[name].shape == (*lead, rank, columns) and up[name].shape == (*lead, rows, rank)
        if not fits:
            raise CheckpointError(f"{path}: the adapters of {name} do not fit this model; they were made for another")
    if not down:
        raise CheckpointError(f"{path}: no adapters inside")
    order = [name for name in known if name in down]
    try:
        alpha = float(metadata["alpha"])
    except (KeyError, ValueError):
        raise CheckpointError(f"{path}: alpha = {metadata.get('alpha')!r:.60} in its metadata; need a number") from None
    leaves = ({name: jnp.asarray(part[name]) for name in order} for part in (down, up))
    return Adapters(*leaves, alpha)
