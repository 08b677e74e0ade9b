"""Bytes and operations of a step, from config, weight format, batch and context: the floor of its time.

Every weight that takes part is read once, every key and value once. A step of n tokens needs the experts that any of
them chose: under uniform routing e * (1 - (1 - k / e) ** n) of e experts. Activations and logits are left out (under
0.1 % of a decode step). Operations are those of the products, two for each multiply and add.
"""

from __future__ import annotations

import dataclasses
import math

from flint_jax.config import FlintConfig
from flint_jax.errors import ConfigError
from flint_jax.weights import shapes

FORMATS = ("nvfp4", "bf16", "f32")
_ITEM = {"nvfp4": 2, "bf16": 2, "f32": 4}  # bytes of a plain weight, key or value
COMPONENTS = {
    "attention": ("qkv", "o"),
    "dense": ("dense_gate_up", "dense_down"),
    "routed": ("expert_gate_up", "expert_down"),
    "shared": ("shared_gate_up", "shared_down"),
    "router": ("router",),
    "norms": ("attn_norm", "mlp_norm", "q_norm", "k_norm", "sinks", "final_norm"),
    "head": ("head",),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """Memory bandwidth in bytes per second, dense bfloat16 operations per second; the vendor's figures."""

    name: str
    bandwidth: float
    flops: float


DEVICES = {
    "a100": Device("A100 SXM 80 GB", 2.04e12, 312e12),
    "h100": Device("H100 SXM", 3.35e12, 989e12),
    "h200": Device("H200", 4.8e12, 989e12),
    "b200": Device("B200", 8.0e12, 2250e12),
}


@dataclasses.dataclass(frozen=True)
class Parts:
    """A figure by component: bytes, or operations."""

    attention: float
    dense: float
    routed: float
    shared: float
    router: float
    norms: float
    head: float
    embed: float
    kv_full: float
    kv_window: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(dataclasses.astuple(self))


def leaf_bytes(config: FlintConfig, weight_format: str = "nvfp4") -> dict[str, int]:
    """Stack -> its bytes on the device, as ``flint_jax.load`` keeps it (tile order pads global scales on top).

    NVFP4: 4-bit codes, a byte for each 16 weights, a float32 for each segment of a matrix. "f32": dtype="float32".
    Raises ConfigError for an unknown format.
    """
    if weight_format not in FORMATS:
        raise ConfigError(f"weight format {weight_format!r}: need one of {', '.join(FORMATS)}")
    out = {}
    for name, spec in shapes(config).items():
        count = math.prod(spec.shape)
        if spec.is_matrix and weight_format == "nvfp4":
            out[name] = count // 2 + count // 16 + 4 * len(spec.segments) * math.prod(spec.shape[:-2])
        else:
            out[name] = count * (4 if name == "sinks" else _ITEM[weight_format])
    return out


def cache_bytes(config: FlintConfig, context: int, weight_format: str = "nvfp4") -> tuple[int, int]:
    """Bytes of one request's keys and values that a token at position ``context`` sees: full layers, window layers."""
    token = 2 * config.kv_size * _ITEM[weight_format]
    window = min(context, config.sliding_window)
    return len(config.full_layers) * context * token, len(config.sliding_layers) * window * token


def distinct_experts(config: FlintConfig, tokens: int) -> float:
    """Experts of a layer that ``tokens`` tokens need, under uniform routing."""
    experts, active = config.num_experts, config.num_experts_per_tok
    return experts * (1 - (1 - active / experts) ** tokens)


def step_bytes(config: FlintConfig, *, batch: int, context: int, weight_format: str = "nvfp4") -> Parts:
    """Bytes of one decode step of ``batch`` requests that each hold ``context`` tokens."""
    leaves = leaf_bytes(config, weight_format)
    size = {part: float(sum(leaves.get(name, 0) for name in names)) for part, names in COMPONENTS.items()}
    size["routed"] *= distinct_experts(config, batch) / config.num_experts
    full, window = cache_bytes(config, context, weight_format)
    embed = batch * config.hidden_size * _ITEM[weight_format]
    return Parts(**size, embed=float(embed), kv_full=float(batch * full), kv_window=float(batch * window))


def token_flops(config: FlintConfig, *, context: float, head: float = 1.0) -> Parts:
    """Operations for one token that sees ``context`` tokens, itself included.

    head: share of tokens whose logits are wanted. For n tokens from the beginning, ``context`` is (n + 1) / 2; the
    window layers then need a little less than is said here.
    """
    spec = shapes(config)

    def size(*names: str) -> float:
        return 2.0 * sum(math.prod(spec[name].shape) for name in names if name in spec)

    per_key = 4.0 * config.num_attention_heads * config.head_dim  # scores and values
    window = min(context, config.sliding_window)
    return Parts(
        **{part: size(*COMPONENTS[part]) for part in ("attention", "dense", "shared", "router")},
        routed=size(*COMPONENTS["routed"]) * config.num_experts_per_tok / config.num_experts,
        norms=0.0,
        head=head * size("head"),
        embed=0.0,
        kv_full=len(config.full_layers) * per_key * context,
        kv_window=len(config.sliding_layers) * per_key * window,
    )


def decode_floor(config: FlintConfig, device: Device, *, batch: int, context: int, weight_format: str) -> float:
    """Seconds below which a decode step cannot be: bytes over bandwidth, or operations over peak."""
    moved = step_bytes(config, batch=batch, context=context, weight_format=weight_format).total
    return max(moved / device.bandwidth, batch * token_flops(config, context=context).total / device.flops)


def scoring_floor(config: FlintConfig, device: Device, *, tokens: int, context: float) -> float:
    """Seconds below which ``tokens`` tokens of mean context ``context`` cannot be scored: operations over peak."""
    return tokens * token_flops(config, context=context).total / device.flops


def table(config: FlintConfig, device: Device, *, batch: int, context: int, weight_format: str) -> str:
    """The roofline for people: components of a decode step, and the floors."""
    leaves = leaf_bytes(config, weight_format)
    moved = step_bytes(config, batch=batch, context=context, weight_format=weight_format)
    flops = token_flops(config, context=context)
    lines = [
        f"{weight_format} weights {sum(leaves.values()) / 1e9:.3f} GB; a token of cache: "
        f"{cache_bytes(config, 1, weight_format)[0]:,} bytes in full layers; in window layers at most "
        f"{cache_bytes(config, config.sliding_window, weight_format)[1] / 1e6:.1f} MB a request",
        f"{device.name}: {device.bandwidth / 1e12:.2f} TB/s, {device.flops / 1e12:,.0f} TFLOP/s",
        f"one decode step, batch {batch:,}, context {context:,}:",
        f"  {'component':<12}{'MB':>12}{'us':>10}{'GFLOP':>12}{'us':>10}",
    ]
    for field in dataclasses.fields(Parts):
        b, f = getattr(moved, field.name), batch * getattr(flops, field.name)
        lines.append(_row(field.name, b, f, device))
    lines.append(_row("total", moved.total, batch * flops.total, device))
    floor = decode_floor(config, device, batch=batch, context=context, weight_format=weight_format)
    lines.append(f"floor {1e3 * floor:.3f} ms a step, {batch / floor:,.0f} tokens/s")
    read = scoring_floor(config, device, tokens=context, context=(context + 1) / 2)
    lines.append(f"reading and scoring {context:,} tokens: floor {1e3 * read:.2f} ms, {context / read:,.0f} tokens/s")
    return "\n".join(lines)


def _row(name: str, moved: float, flops: float, device: Device) -> str:
    return (
        f"  {name:<12}{moved / 1e6:>12,.2f}{1e6 * moved / device.bandwidth:>10.1f}"
        f"{flops / 1e9:>12,.3f}{1e6 * flops / device.flops:>10.1f}"
    )
