"""Tensor names of the checkpoint formats -> places in the canonical weight tree.

The canonical tree (N heads, K kv heads, H head width, D model width, V vocabulary, E experts; matrices are [rows out,
columns in]; L layers, Lm of them with experts, Ld dense)::

    embed [V,D]  final_norm [D]  head [V,D]
    attn_norm, mlp_norm [L,D]  qkv [L,(N+2K)*H,D]  q_norm, k_norm [L,H]  sinks [L,N]  o [L,D,N*H]
    dense_gate_up [Ld,2F,D]  dense_down [Ld,D,F]
    router [Lm,E,D]  expert_gate_up [Lm,E,2Fe,D]  expert_down [Lm,E,D,Fe]
    shared_gate_up [Lm,2Fs,D]  shared_down [Lm,D,Fs]

A ``Source`` says which tensor(s) of the file fill which rows of which layer of which leaf. Every tensor that the model
consumes is declared here and nowhere else, so a tensor left over is an error and so is one that is missing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from flint_jax.config import FlintConfig
from flint_jax.errors import CheckpointError
from loaders.raw import NVFP4, RawTensor, short

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the tree: ``stack`` layers (None: no layer axis) of ``shape``; matrices have row ``segments``."""

    name: str
    stack: int | None
    shape: tuple[int, ...]
    segments: tuple[int, ...] | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape with the layer axis."""
        return self.shape if self.stack is None else (self.stack, *self.shape)


@dataclasses.dataclass(frozen=True)
class Source:
    """Tensors that fill rows ``row`` and following of layer ``index`` of a leaf.

    ``names`` is one tensor of ``shape``, or one for each expert. ``segment`` is the row segment whose global scale a
    companion of the tensor sets; None when the tensor spans all segments.
    """

    leaf: str
    index: int | None
    names: tuple[str, ...]
    shape: tuple[int, ...]
    row: int = 0
    segment: int | None = 0


@dataclasses.dataclass(frozen=True)
class Fill:
    """A Source with its tensors found: same kind each; ``scale`` is the companion of an NVFP4 tensor (None: 1)."""

    source: Source
    tensors: tuple[RawTensor, ...]
    kind: str
    scale: RawTensor | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything load_weights needs: the leaves, how to fill them, and biases that must prove to be zero."""

    leaves: Mapping[str, Leaf]
    fills: tuple[Fill, ...]
    zero: tuple[RawTensor, ...]

    @property
    def weight_format(self) -> str:
        """ "bf16" (no packed matrix), "nvfp4" (all projections packed) or "mixed"."""
        packable = {leaf.name for leaf in self.leaves.values() if leaf.segments and leaf.name not in PLAIN_ONLY}
        packed = {fill.kind == NVFP4 for fill in self.fills if fill.source.leaf in packable}
        return "mixed" if len(packed) == 2 else "nvfp4" if True in packed else "bf16"

    @property
    def nbytes(self) -> int:
        """Bytes of the file that the model consumes."""
        return sum(t.nbytes for fill in self.fills for t in fill.tensors)


# No published file packs these, and we would have to round: their global scale has no accumulator to go to.
PLAIN_ONLY = ("embed", "final_norm", "attn_norm", "mlp_norm", "q_norm", "k_norm", "sinks", "router")


def leaves(config: FlintConfig) -> dict[str, Leaf]:
    """The canonical tree of a config."""
    d, h = config.hidden_size, config.head_dim
    n, m, dense = config.num_hidden_layers, len(config.moe_layers), len(config.mlp_only_layers)
    q, kv, e = config.q_size, config.kv_size, config.num_experts
    f, fe, fs = config.intermediate_size, config.moe_intermediate_size, config.shared_expert_intermediate_size
    found = [
        Leaf("embed", None, (config.vocab_size, d)),
        Leaf("final_norm", None, (d,)),
        Leaf("head", None, (config.vocab_size, d), (config.vocab_size,)),
        Leaf("attn_norm", n, (d,)),
        Leaf("mlp_norm", n, (d,)),
        Leaf("qkv", n, (q + 2 * kv, d), (q, kv, kv)),
        Leaf("q_norm", n, (h,)),
        Leaf("k_norm", n, (h,)),
        Leaf("sinks", n, (config.num_attention_heads,)),
        Leaf("o", n, (d, q), (d,)),
        Leaf("dense_gate_up", dense, (2 * f, d), (f, f)),
        Leaf("dense_down", dense, (d, f), (d,)),
        Leaf("router", m, (e, d), (e,)),
        Leaf("expert_gate_up", m, (e, 2 * fe, d), (fe, fe)),
        Leaf("expert_down", m, (e, d, fe), (d,)),
        Leaf("shared_gate_up", m, (2 * fs, d), (fs, fs)),
        Leaf("shared_down", m, (d, fs), (d,)),
    ]
    return {leaf.name: leaf for leaf in found}


@dataclasses.dataclass(frozen=True)
class _Names:
    """How one format spells things: the head of a layer's names, then the parts."""

    embed: str
    final_norm: str
    head: str
    layer: str
    attn_norm: str
    mlp_norm: str
    q: str
    k: str
    v: str
    o: str
    q_norm: str
    k_norm: str
    sinks: tuple[str, ...]
    router: str
    dense: tuple[str, str, str]
    shared: tuple[str, str, str]
    expert: tuple[str, str, str]  # with {e}: one tensor an expert
    fused_experts: tuple[str, str] | None  # gate and up in one tensor, all experts
    zero: tuple[str, ...]  # selection biases: the released model has none


_HF_MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_FORMATS = {
    "safetensors": _Names(
        embed="model.embed_tokens.weight",
        final_norm="model.norm.weight",
        head="lm_head.weight",
        layer="model.layers.{i}.",
        attn_norm="input_layernorm.weight",
        mlp_norm="post_attention_layernorm.weight",
        q="self_attn.q_proj.weight",
        k="self_attn.k_proj.weight",
        v="self_attn.v_proj.weight",
        o="self_attn.o_proj.weight",
        q_norm="self_attn.q_norm.weight",
        k_norm="self_attn.k_norm.weight",
        sinks=("self_attn.softmax_offset", "self_attn.sinks"),
        router="mlp.gate.weight",
        dense=tuple(f"mlp.{name}" for name in _HF_MLP),
        shared=tuple(f"mlp.shared_expert.{name}" for name in _HF_MLP),
        expert=tuple(f"mlp.experts.{{e}}.{name}" for name in _HF_MLP),
        fused_experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        zero=("mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias"),
    ),
    "gguf": _Names(
        embed="token_embd.weight",
        final_norm="output_norm.weight",
        head="output.weight",
        layer="blk.{i}.",
        attn_norm="attn_norm.weight",
        mlp_norm="ffn_norm.weight",
        q="attn_q.weight",
        k="attn_k.weight",
        v="attn_v.weight",
        o="attn_output.weight",
        q_norm="attn_q_norm.weight",
        k_norm="attn_k_norm.weight",
        sinks=("attn_sinks.weight",),
        router="ffn_gate_inp.weight",
        dense=("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
        shared=("ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight"),
        expert=("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"),
        fused_experts=None,
        zero=("exp_probs_b.bias",),
    ),
}


def sources(config: FlintConfig, fmt: str, present: Mapping[str, RawTensor]) -> Iterator[Source]:
    """All tensors that a checkpoint in format ``fmt`` must hold; ``present`` decides between two spellings of one."""
    names = _FORMATS[fmt]
    d, h = config.hidden_size, config.head_dim
    vocab = (config.vocab_size, d)
    yield Source("embed", None, (names.embed,), vocab)
    for i in range(config.num_hidden_layers):
        layer = names.layer.format(i=i)
        yield Source("attn_norm", i, (layer + names.attn_norm,), (d,))
        for segment, (name, row, rows) in enumerate(
            (
                (names.q, 0, config.q_size),
                (names.k, config.q_size, config.kv_size),
                (names.v, config.q_size + config.kv_size, config.kv_size),
            )
        ):
            yield Source("qkv", i, (layer + name,), (rows, d), row, segment)
        yield Source("q_norm", i, (layer + names.q_norm,), (h,))
        yield Source("k_norm", i, (layer + names.k_norm,), (h,))
        spelling = next((s for s in names.sinks if layer + s in present), names.sinks[0])
        yield Source("sinks", i, (layer + spelling,), (config.num_attention_heads,))
        yield Source("o", i, (layer + names.o,), (d, config.q_size))
        yield Source("mlp_norm", i, (layer + names.mlp_norm,), (d,))
        if i in config.mlp_only_layers:
            at = sorted(config.mlp_only_layers).index(i)
            yield from _mlp("dense", at, layer, names.dense, config.intermediate_size, d)
        else:
            at = config.moe_layers.index(i)
            yield Source("router", at, (layer + names.router,), (config.num_experts, d))
            yield from _mlp("shared", at, layer, names.shared, config.shared_expert_intermediate_size, d)
            yield from _experts(config, names, at, layer, present)
    yield Source("final_norm", None, (names.final_norm,), (d,))
    yield Source("head", None, (names.head,), vocab)


def _mlp(kind: str, at: int, layer: str, names: tuple[str, str, str], width: int, d: int) -> Iterator[Source]:
    gate, up, down = (layer + name for name in names)
    yield Source(f"{kind}_gate_up", at, (gate,), (width, d))
    yield Source(f"{kind}_gate_up", at, (up,), (width, d), width, 1)
    yield Source(f"{kind}_down", at, (down,), (d, width))


def _experts(
    config: FlintConfig, names: _Names, at: int, layer: str, present: Mapping[str, RawTensor]
) -> Iterator[Source]:
    e, d, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
    if names.fused_experts and layer + names.fused_experts[0] in present:
        gate_up, down = (layer + name for name in names.fused_experts)
        yield Source("expert_gate_up", at, (gate_up,), (e, 2 * width, d), 0, None)
        yield Source("expert_down", at, (down,), (e, d, width))
        return
    stacked = "{e}" not in names.expert[0]
    lead = (e,) if stacked else ()
    gate, up, down = (
        (layer + name,) if stacked else tuple(layer + name.format(e=j) for j in range(e)) for name in names.expert
    )
    yield Source("expert_gate_up", at, gate, (*lead, width, d))
    yield Source("expert_gate_up", at, up, (*lead, width, d), width, 1)
    yield Source("expert_down", at, down, (*lead, d, width))


# -- matching --------------------------------------------------------------------------------------------------------


def match(config: FlintConfig, fmt: str, tensors: Mapping[str, RawTensor], optional: Collection[str] = ()) -> Plan:
    """Find every tensor. Looks at names, shapes and kinds only. optional: names that need not have a use.

    Global scales of NVFP4 are optional in GGUF. A file without any has them all as 1; a file that has some and lacks
    others has lost those.

    Raises CheckpointError that lists missing, unexpected, misshapen and unusable tensors together.
    """
    tree = leaves(config)
    missing: list[str] = []
    wrong: list[str] = []
    used: set[str] = set()
    fills: list[Fill] = []
    packed = [t.name for t in tensors.values() if t.kind == NVFP4]
    scaled = any(companion(name) in tensors for name in packed)
    if packed and not scaled:
        log.warning("%d NVFP4 tensors and no global scale (%s): all are taken as 1", len(packed), companion("NAME"))
    for source in sources(config, fmt, tensors):
        found = [tensors[name] for name in source.names if name in tensors]
        missing += [name for name in source.names if name not in tensors]
        used.update(source.names)
        wrong += [f"{t.name} is {list(t.shape)}, need {list(source.shape)}" for t in found if t.shape != source.shape]
        if len(found) == len(source.names):
            fills.append(_fill(source, tuple(found), tensors, scaled, used, missing, wrong))
    zero = _zero(config, fmt, tensors, used)
    unexpected = [
        name for name in tensors if name not in used and name not in optional and not _tolerated(name, tensors)
    ]
    if missing or unexpected or wrong:
        raise _mismatch(missing, unexpected, wrong)
    return Plan(tree, tuple(fills), zero)


def _fill(
    source: Source,
    found: tuple[RawTensor, ...],
    tensors: Mapping[str, RawTensor],
    scaled: bool,
    used: set[str],
    missing: list[str],
    wrong: list[str],
) -> Fill:
    kinds = {t.kind for t in found}
    kind = found[0].kind if len(kinds) == 1 else "F32"  # experts of one layer in several dtypes: the widest
    if kind != NVFP4:
        return Fill(source, found, kind)
    tensor = found[0]
    if source.leaf in PLAIN_ONLY:
        wrong.append(f"{tensor.name} is NVFP4, need BF16, F16 or F32")
    name = companion(tensor.name)
    used.add(name)
    if name not in tensors:
        if not scaled:
            return Fill(source, found, kind)
        missing.append(f"{name} (the global scale of the NVFP4 tensor {tensor.name})")
        return Fill(source, found, kind)
    scale = tensors[name]
    count = int(np.prod(scale.shape, dtype=np.int64))
    experts = source.shape[0] if len(source.shape) == 3 else 1
    if scale.kind != "F32" or count not in (1, experts):
        wrong.append(f"{name} is {scale.kind} {list(scale.shape)}, need F32 with {experts} value(s)")
    return Fill(source, found, kind, scale)


def companion(name: str, suffix: str = "scale") -> str:
    """blk.0.attn_q.weight -> blk.0.attn_q.scale."""
    return f"{name.removesuffix('.weight')}.{suffix}"


def _zero(config: FlintConfig, fmt: str, tensors: Mapping[str, RawTensor], used: set[str]) -> tuple[RawTensor, ...]:
    names = _FORMATS[fmt]
    found = []
    for i in config.moe_layers:
        for name in names.zero:
            name = names.layer.format(i=i) + name
            if name in tensors:
                used.add(name)
                found.append(tensors[name])
    return tuple(found)


def _tolerated(name: str, tensors: Mapping[str, RawTensor]) -> bool:
    """Activation scales of NVFP4 tensors: we keep activations in 16 bits, so they have no use here."""
    if not name.endswith(".input_scale"):
        return False
    weight = tensors.get(name.removesuffix(".input_scale") + ".weight")
    if weight is None or weight.kind != NVFP4:
        return False
    log.info("%s is not used: activations stay in 16 bits", short(name))
    return True


def _mismatch(missing: list[str], unexpected: list[str], wrong: list[str], limit: int = 12) -> CheckpointError:
    lines = ["the tensors do not match the configuration:"]
    for title, items in (("missing", missing), ("unexpected", unexpected), ("wrong shape or type", wrong)):
        if items:
            shown = ", ".join(short(item, 160) for item in items[:limit])
            more = f", and {len(items) - limit} more" if len(items) > limit else ""
            lines.append(f"  {len(items)} {title}: {shown}{more}")
    return CheckpointError("\n".join(lines))
