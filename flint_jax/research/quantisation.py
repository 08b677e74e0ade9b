"""Quantisation-aware training: compute with NVFP4-rounded weights, let the gradient pass to the float32 ones."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flint_jax.config import FlintConfig
from flint_jax.model import Flint
from flint_jax.weights import StackSpec, shapes
from pallas_kernels.nvfp4 import GROUP

LARGEST_CODE, LARGEST_SCALE = 6.0, 448.0


def rounded(weights: Float[Array, "... R C"]) -> Float[Array, "... R C"]:
    """float32 weights as ``save_checkpoint(..., weight_format="nvfp4")`` writes them, decoded.

    Blocks of 16 along C, a global scale for each R x C matrix: an export gives q, k and v one, gate and up one, and
    experts one each. C must be a multiple of 16.
    """
    amax = jnp.max(jnp.abs(weights), axis=(-2, -1), keepdims=True)
    largest = jnp.float32(LARGEST_SCALE * LARGEST_CODE)
    scale = jnp.where(amax > 0, amax / largest, jnp.float32(1))[..., None]
    groups = weights.reshape(*weights.shape[:-1], -1, GROUP) / scale
    peak = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / jnp.float32(LARGEST_CODE)
    block = peak.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    x = jnp.where(block > 0, groups / jnp.where(block > 0, block, jnp.float32(1)), jnp.float32(0))
    size = jnp.abs(x)
    # Codes are 0, .5, 1, 1.5, 2, 3, 4, 6: steps of 1/2, 1 and 2; jnp.round takes the even code at a tie, as the format.
    half, one, two = jnp.round(size * 2) / 2, jnp.round(size), jnp.round(size / 2) * 2
    code = jnp.minimum(jnp.where(size < 2, half, jnp.where(size < 4, one, two)), jnp.float32(LARGEST_CODE))
    return (jnp.sign(x) * code * block * scale).reshape(weights.shape)


def straight_through(weights: dict[str, Array], config: FlintConfig, share: Float[Array, ""]) -> dict[str, Array]:
    """The stacks with every matrix moved ``share`` of the way to its NVFP4 rounding; gradients see the identity."""

    def one(name: str, leaf: Array, spec: StackSpec) -> Array:
        if not spec.is_matrix:
            return leaf
        return leaf + jax.lax.stop_gradient(share * (rounded(leaf) - leaf))

    return {name: one(name, weights[name], spec) for name, spec in shapes(config).items()}


def aware(build: Callable[..., Flint], config: FlintConfig) -> Callable[..., Flint]:
    """Wrap ``train.full``'s build: its ``frozen`` argument becomes the share of quantisation, float32 [] in [0, 1]."""

    def quantised(params, share, length: int) -> Flint:
        return build(straight_through(params, config, share), None, length)

    return quantised
