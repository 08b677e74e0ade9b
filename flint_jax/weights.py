"""The canonical weight stacks: their names, shapes and segments, from a config.

Everything that fills a model (loaders, converters, random weights for benches) goes by this table.
"""

from __future__ import annotations

import dataclasses

from flint_jax.config import FlintConfig


@dataclasses.dataclass(frozen=True)
class StackSpec:
    """shape: whole stack. segments: row groups with a global scale each; empty for leaves that are never quantised."""

    shape: tuple[int, ...]
    segments: tuple[int, ...] = ()

    @property
    def is_matrix(self) -> bool:
        """Whether the leaf may be NVFP4."""
        return bool(self.segments)


def shapes(c: FlintConfig) -> dict[str, StackSpec]:
    """Name -> spec of every stack. Matrices are [..., out, in]; MoE and dense stacks count only their own layers."""
    d, layers, moe, dense = c.hidden_size, c.num_hidden_layers, len(c.moe_layers), len(c.mlp_only_layers)
    f, fe, fs = c.intermediate_size, c.moe_intermediate_size, c.shared_expert_intermediate_size

    def matrix(*shape: int, segments: tuple[int, ...] | None = None) -> StackSpec:
        return StackSpec(shape, segments or (shape[-2],))

    specs = {
        "embed": StackSpec((c.vocab_size, d)),
        "final_norm": StackSpec((d,)),
        "head": matrix(c.vocab_size, d),
        "attn_norm": StackSpec((layers, d)),
        "mlp_norm": StackSpec((layers, d)),
        "qkv": matrix(layers, c.q_size + 2 * c.kv_size, d, segments=(c.q_size, c.kv_size, c.kv_size)),
        "q_norm": StackSpec((layers, c.head_dim)),
        "k_norm": StackSpec((layers, c.head_dim)),
        "sinks": StackSpec((layers, c.num_attention_heads)),
        "o": matrix(layers, d, c.q_size),
    }
    if dense:
        specs["dense_gate_up"] = matrix(dense, 2 * f, d, segments=(f, f))
        specs["dense_down"] = matrix(dense, d, f)
    if moe:
        e = c.num_experts
        specs["router"] = StackSpec((moe, e, d))
        specs["expert_gate_up"] = matrix(moe, e, 2 * fe, d, segments=(fe, fe))
        specs["expert_down"] = matrix(moe, e, d, fe)
        specs["shared_gate_up"] = matrix(moe, 2 * fs, d, segments=(fs, fs))
        specs["shared_down"] = matrix(moe, d, fs)
    return specs
