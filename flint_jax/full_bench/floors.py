"""What a request cannot be faster than: operations at the device's peak, bytes at its bandwidth."""

from __future__ import annotations

from flint_jax import roofline
from flint_jax.config import FlintConfig
from flint_jax.prefill_bench import operations


def first_ms(config: FlintConfig, device: roofline.Device, weight_format: str, tokens: int, cached: int = 0) -> float:
    """Milliseconds for ``tokens`` new ones behind ``cached``: the larger of operations and of weights read once."""
    flops = operations(config, tokens, cached) / device.flops
    step = roofline.step_bytes(config, batch=1, context=1, weight_format=weight_format)
    routed = sum(roofline.leaf_bytes(config, weight_format).get(n, 0) for n in roofline.COMPONENTS["routed"])
    share = roofline.distinct_experts(config, tokens) / config.num_experts
    full, window = roofline.cache_bytes(config, cached + 1, weight_format)
    read = step.total - step.routed + routed * share + full + window
    return 1e3 * max(flops, read / device.bandwidth)


def token_ms(config: FlintConfig, device: roofline.Device, weight_format: str, context: int, batch: int = 1) -> float:
    """Milliseconds of a decode step: its bytes."""
    read = roofline.step_bytes(config, batch=batch, context=context, weight_format=weight_format).total
    return 1e3 * read / device.bandwidth
