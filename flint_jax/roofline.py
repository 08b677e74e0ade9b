"""Bytes that one decode step must move, from config, weight format, batch and context: the floor of its time.

Every weight that takes part is read once, every key and value once; experts count once per distinct (token, expert)
pair's expert under uniform routing. Activations and logits are left out (under 0.1 %).
"""

from __future__ import annotations

import dataclasses
import math

from flint_jax.config import FlintConfig
from flint_jax.weights import shapes

BITS = {"bf16": 16.0, "nvfp4": 4.5}  # NVFP4: 4-bit code and an 8-bit scale per 16 weights


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes of one decode step by component."""

    attention: float
    dense: float
    routed: float
    shared: float
    router: float
    norms: float
    head: float
    kv_full: float
    kv_window: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(dataclasses.astuple(self))


def step_bytes(config: FlintConfig, *, batch: int, context: int, weight_format: str = "nvfp4") -> StepBytes:
    """Bytes of one decode step of ``batch`` requests that each hold ``context`` tokens. bf16 cache and router."""
    per_weight = BITS[weight_format] / 8
    spec = shapes(config)

    def size(*names: str) -> float:
        return sum(math.prod(spec[n].shape) for n in names if n in spec) * per_weight

    experts, active = config.num_experts, config.num_experts_per_tok
    distinct = experts * (1 - (1 - active / experts) ** batch)
    kv = 2 * config.kv_size * 2  # keys and values, two bytes
    window = min(context, config.sliding_window)
    return StepBytes(
        attention=size("qkv", "o"),
        dense=size("dense_gate_up", "dense_down"),
        routed=size("expert_gate_up", "expert_down") * distinct / experts,
        shared=size("shared_gate_up", "shared_down"),
        router=2.0 * math.prod(spec["router"].shape) if "router" in spec else 0.0,
        norms=2.0 * sum(math.prod(spec[n].shape) for n in ("attn_norm", "mlp_norm", "q_norm", "k_norm", "final_norm")),
        head=size("head"),
        kv_full=float(batch * len(config.full_layers) * context * kv),
        kv_window=float(batch * len(config.sliding_layers) * window * kv),
    )
