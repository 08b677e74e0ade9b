"""Weights from their stored order into the kernels' tile order, on the device, stack by stack."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp

from flint_jax.config import FlintConfig
from flint_jax.numerics import Matrix, Numerics
from flint_jax.weights import shapes
from pallas_kernels import device, layout

log = logging.getLogger("flint_jax")

WIDTH = 1024  # columns that the eight warps of a norm, and of the experts' first product, take at a time
PAIRED = ("dense_gate_up", "expert_gate_up", "shared_gate_up")


def wanted(config: FlintConfig, numerics: Numerics, kernels: str) -> bool:
    """Whether to lay weights out for the kernels: bfloat16 serving numerics, shapes that fit, a GPU that has them.

    kernels: "auto", "pallas" (also where they do not run: op by op the references do) or "xla".
    """
    if kernels == "xla" or (kernels == "auto" and not device.current().kernels):
        return False
    reason = _obstacle(config, numerics) or (_too_small(config) if kernels == "auto" else None)
    if reason is not None:
        log.info("decode kernels are off: %s", reason)
    return reason is None


def _obstacle(config: FlintConfig, numerics: Numerics) -> str | None:
    if not numerics.serving or numerics.dtype != jnp.bfloat16:
        return f"they follow bfloat16 serving numerics, and {numerics.dtype_name} {numerics.mode} was asked for"
    if not config.norm_topk_prob or config.routed_scaling_factor != 1.0:
        return "they renormalise routing weights and scale them by 1"
    for name, spec in shapes(config).items():
        if spec.is_matrix and not layout.fits(*spec.shape[-2:], paired=name in PAIRED):
            return f"{name} is {spec.shape[-2]} x {spec.shape[-1]}, which is no multiple of 16 x 128"
    if not config.moe_layers:
        return "the model has no experts"
    return None


def _too_small(config: FlintConfig) -> str | None:
    """Why most kernels would leave this model to their references, which are slower on tiles than on plain weights."""
    if config.hidden_size % WIDTH:
        return f"the hidden size {config.hidden_size} is no multiple of {WIDTH}"
    experts = config.num_experts
    if experts < 64 or experts & (experts - 1):
        return f"{experts} experts are no power of two from 64 on"
    return None


def tile_weights(tree: dict[str, Matrix]) -> dict[str, Matrix]:
    """Lay every matrix out in tiles. Consumes ``tree``: each stack is freed once its tiles exist.

    The peak is the model and one stack (14 GB for Flint in NVFP4, 51 GB in bfloat16).
    """
    out = {}
    for name in list(tree):
        leaf = tree.pop(name)
        out[name] = _tile(leaf, name in PAIRED) if _is_matrix(name) else leaf
        jax.block_until_ready(out[name])
        del leaf
    return out


def _is_matrix(name: str) -> bool:
    return name in ("head", "qkv", "o", "dense_down", "expert_down", "shared_down", *PAIRED)


def _tile(stack: Matrix, paired: bool) -> layout.Tiles:
    make = functools.partial(layout.tile, paired=paired)
    if len(stack.shape) == 2:
        return jax.jit(make)(stack)
    # One layer at a time, so that temporaries are a layer's and not the stack's.
    first = jax.eval_shape(lambda s: make(s[0]), stack)
    words = jax.jit(lambda: jnp.zeros((stack.shape[0], *first.words.shape), first.words.dtype))()

    @functools.partial(jax.jit, donate_argnums=0)
    def put(words, stack, i):
        layer = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), stack)
        return jax.lax.dynamic_update_index_in_dim(words, make(layer).words, i, 0)

    for i in range(stack.shape[0]):
        words = put(words, stack, jnp.int32(i))
    scale = jax.jit(lambda s: layout.pad_scale(_global_scale(s, first)))(stack)
    return layout.Tiles(words, scale, first.segments, paired)


def _global_scale(stack: Matrix, one: layout.Tiles):
    if hasattr(stack, "global_scale"):
        return stack.global_scale
    return jnp.ones((stack.shape[0], *one.global_scale.shape), jnp.float32)
