"""Shapes at which ``gemv`` is compiled, checked and timed: the model's dense matrices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.nvfp4_gemv import mosaic, reference
from pallas_kernels.nvfp4_gemv.api import Norm, gemv
from pallas_kernels.testing import Case, random_tiles, rotation

# name: rows, columns, segments, paired, norm, epilogue
SHAPES = {
    "qkv": (5120, 2048, (4096, 512, 512), False, "add", "none"),
    "o": (2048, 4096, None, False, None, "none"),
    "dense_gate_up": (12288, 2048, None, True, "add", "swiglu"),
    "dense_down": (2048, 6144, None, False, None, "none"),
    "shared_gate_up": (2048, 2048, None, True, None, "swiglu"),
    "shared_down": (2048, 1024, None, False, None, "none"),
    "head": (150144, 2048, None, False, "add", "logits"),
}


def case(shape: str, tokens: int, *, nvfp4: bool = True, warps: int | None = None) -> Case:
    """One matrix at one batch size; ``warps`` per block instead of the rule's choice."""
    rows, columns, segments, paired, normed, epilogue = SHAPES[shape]
    nbytes = rows * columns * 9 // 16 if nvfp4 else rows * columns * 2
    layers = rotation(nbytes)

    def make(key):
        keys = jax.random.split(key, 4)
        x = jax.random.normal(keys[0], (tokens, columns), jnp.bfloat16)
        weight = random_tiles(keys[1], (layers,), rows, columns, nvfp4=nvfp4, segments=segments, paired=paired)
        if normed is None:
            return x, weight, None
        residual = jax.random.normal(keys[2], (tokens, columns), jnp.bfloat16)
        return x, weight, Norm(jax.random.normal(keys[3], (layers, columns), jnp.bfloat16), 0, residual)

    def arguments(layer, norm):
        if norm is not None:
            norm = Norm(norm.weight, layer, norm.residual, norm.eps)
        return {"norm": norm, "epilogue": epilogue}

    def run(layer, x, weight, norm):
        options = arguments(layer, norm)
        return mosaic.gemv(x, weight, layer, warps=warps, **options) if warps else gemv(x, weight, layer, **options)

    return Case(
        name=f"nvfp4_gemv/{shape} m{tokens} {'nvfp4' if nvfp4 else 'bf16'}{f' w{warps}' if warps else ''}",
        make=make,
        run=run,
        reference=lambda layer, x, weight, norm: reference.gemv(x, weight, layer, **arguments(layer, norm)),
        layers=layers,
        nbytes=nbytes,
    )


def cases() -> list[Case]:
    """All matrices for one token, some for more, the bfloat16 twins, and other splits of the same work."""
    small = [case(shape, 1) for shape in SHAPES]
    many = [case(shape, tokens) for tokens in (2, 8, 16) for shape in ("qkv", "o", "head")]
    many += [case("qkv", 4), case("dense_gate_up", 8), case("dense_down", 8)]
    twins = [case(shape, tokens, nvfp4=False) for tokens in (1, 8) for shape in ("qkv", "o", "head")]
    splits = [("qkv", 1, 4), ("dense_gate_up", 1, 4), ("o", 1, 4), ("o", 1, 16), ("qkv", 8, 8), ("o", 8, 16)]
    return small + many + twins + [case(shape, tokens, warps=warps) for shape, tokens, warps in splits]
