"""Random weights made on the device: full-size benches without a checkpoint file.

Standard deviations are those of the synthetic checkpoints, so activations stay sane and routing is spread.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flint_jax.config import FlintConfig
from flint_jax.numerics import Matrix, Numerics
from flint_jax.weights import StackSpec, shapes
from pallas_kernels import nvfp4

_NORMS = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "final_norm")
_CODE_RMS = math.sqrt(float(np.mean(nvfp4.E2M1**2)))
_SCALES = (0x30, 0x40)  # block scale bytes, 0.5 to 1.875
_SCALE_RMS = math.sqrt(float(np.mean(nvfp4.E4M3[slice(*_SCALES)] ** 2)))


def random_weights(
    config: FlintConfig,
    numerics: Numerics,
    *,
    weight_format: str,
    spread: Callable[[FlintConfig, str], float],
    seed: int = 0,
) -> dict[str, Matrix]:
    """The weight tree of ``flint_jax.weights.shapes`` on the default device.

    weight_format: "bf16" or "nvfp4" (matrices packed). spread: standard deviation of a leaf. Stacks are filled one
    layer at a time, so the peak is the model and one layer.
    """
    options = {"weight_format": weight_format, "spread": spread, "seed": seed}
    return {name: random_stack(name, config, numerics, **options) for name in shapes(config)}


def random_stack(
    name: str,
    config: FlintConfig,
    numerics: Numerics,
    *,
    weight_format: str,
    spread: Callable[[FlintConfig, str], float],
    seed: int = 0,
) -> Matrix:
    """One leaf of ``random_weights``, with the same numbers: for those who cannot hold the tree at once."""
    spec, std = shapes(config)[name], spread(config, name)
    key = jax.random.key(seed ^ zlib.crc32(name.encode()))
    if name in _NORMS:
        return jnp.ones(spec.shape, numerics.dtype)
    if spec.is_matrix and weight_format == "nvfp4":
        return _packed(key, spec, std)
    dtype = jnp.float32 if name == "sinks" else numerics.router_dtype if name == "router" else numerics.dtype
    return _fill(key, spec.shape, functools.partial(_normal, std=std, dtype=dtype), dtype)


def _normal(key, shape, std, dtype):
    # Sixteen random bits a weight: uniform numbers of this spread, without a float32 copy of the whole stack.
    bits = jax.random.bits(key, shape, jnp.uint16)
    return ((bits.astype(jnp.float32) - 32767.5) * (std * math.sqrt(3) / 32767.5)).astype(dtype)


def _packed(key, spec: StackSpec, std: float) -> nvfp4.Packed:
    *lead, rows, cols = spec.shape
    scale_key, code_key = jax.random.split(key)
    codes = _fill(code_key, (*lead, rows, cols // 2), lambda k, s: jax.random.bits(k, s, jnp.uint8), jnp.uint8)
    low, high = _SCALES

    def scale_bytes(k, s):
        return jnp.uint8(low) + jax.random.bits(k, s, jnp.uint8) % jnp.uint8(high - low)

    scales = _fill(scale_key, (*lead, rows, cols // nvfp4.GROUP), scale_bytes, jnp.uint8)
    global_scale = jnp.full((*lead, len(spec.segments)), std / (_CODE_RMS * _SCALE_RMS), jnp.float32)
    return nvfp4.Packed(codes, scales, global_scale, spec.segments)


def _fill(key, shape, make, dtype):
    """An array filled part by part along its leading axis (for a single matrix, all at once)."""
    if len(shape) < 3:
        return jax.jit(lambda k: make(k, shape))(key)

    @functools.partial(jax.jit, donate_argnums=0)
    def put(stack, key, i):
        return stack.at[i].set(make(jax.random.fold_in(key, i), shape[1:]))

    stack = jax.jit(lambda: jnp.zeros(shape, dtype))()
    for i in range(shape[0]):
        stack = put(stack, key, jnp.int32(i))
    return stack
