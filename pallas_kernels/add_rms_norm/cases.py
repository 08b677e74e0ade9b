"""Shapes at which ``add_rms_norm`` is compiled, checked and timed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.add_rms_norm.api import add_rms_norm
from pallas_kernels.add_rms_norm.reference import add_rms_norm as reference
from pallas_kernels.testing import Case

EPS = 1e-6


def _make(tokens: int, columns: int):
    def make(key):
        x, residual, weight = (
            jax.random.normal(k, shape, jnp.bfloat16)
            for k, shape in zip(
                jax.random.split(key, 3), ((tokens, columns), (tokens, columns), (49, columns)), strict=True
            )
        )
        return x, residual, weight

    return make


def cases() -> list[Case]:
    """The model's hidden width at decode batch sizes."""
    return [
        Case(
            name=f"add_rms_norm/m{tokens}",
            make=_make(tokens, 2048),
            run=lambda layer, x, r, w: add_rms_norm(x, w, layer, residual=r, eps=EPS),
            reference=lambda layer, x, r, w: reference(x, w, layer, residual=r, eps=EPS),
            layers=48,
            nbytes=tokens * 2048 * 8 + 4096,
        )
        for tokens in (1, 8, 16)
    ]
