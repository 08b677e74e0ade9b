"""Shared by tests, benchmarks and the ahead-of-time compiler: what a kernel case is, random weights, row errors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.layout import BF16_WORDS, BLOCK, NVFP4_WORDS, ROWS, Tiles, pad_scale

L2_BYTES = 50 * 2**20  # of the largest part whose timings we keep; rotated weights exceed twice this


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape.

    make(key) -> arguments (jittable; the first one small, it carries the dependency between timed calls).
    run(layer, *arguments) and reference(layer, *arguments) -> the same pytree; layer is a Python int below ``layers``.
    nbytes: what one call has to move. operations: its multiplications and additions, where they are what costs.
    tolerance: largest relative L2 error of a row.

    in_place: positions of arguments that the op writes; ``run`` then returns (result, those arguments afterwards ...),
    and written(layer, arguments, all of that) picks the part of them that a check compares.
    """

    name: str
    make: Callable
    run: Callable
    reference: Callable
    layers: int
    nbytes: int
    tolerance: float = 4e-3
    in_place: tuple[int, ...] = ()
    written: Callable | None = None
    operations: int = 0

    def step(self, layer: int, args: tuple, run: Callable | None = None) -> tuple:
        """(result, arguments for the next call)."""
        result = (run or self.run)(layer, *args)
        if not self.in_place:
            return result, args
        args = list(args)
        for place, value in zip(self.in_place, result[1:], strict=True):
            args[place] = value
        return result[0], tuple(args)

    def observe(self, run: Callable) -> Callable:
        """``run``, or for an op that writes in place what of it a check compares; to be jitted with a static layer."""
        if not self.in_place:
            return run

        def observed(layer, *args):
            result = run(layer, *args)
            return result[0], self.written(layer, args, result)

        return observed

    @property
    def op(self) -> str:
        return self.name.partition("/")[0]


def rotation(nbytes: int, most: int = 48) -> int:
    """How many copies of the weights make a chain of calls miss the L2 cache."""
    return int(np.clip(-(-5 * L2_BYTES // (2 * max(nbytes, 1))), 2, most))


def row_error(actual, expected) -> float:
    """Largest relative L2 error over the last axis. NaN or infinity anywhere gives infinity."""
    actual, expected = (np.asarray(x, np.float64).reshape(-1, np.shape(x)[-1]) for x in (actual, expected))
    if not np.isfinite(actual).all():
        return float("inf")
    norm = np.linalg.norm(expected, axis=-1)
    return float((np.linalg.norm(actual - expected, axis=-1) / np.maximum(norm, 1e-30)).max())


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_nvfp4_words(key, lead: tuple[int, ...], shape: tuple[int, int]):
    """Random codes with block scales between 0.5 and 3.75: int32 [*lead, T, B, 288]."""
    rows, columns = shape
    words = jax.random.bits(key, (*lead, rows // ROWS, columns // BLOCK, NVFP4_WORDS), jnp.uint32)
    # A scale byte is 0x30 + five random bits capped below 0x48: sign and NaN stay out.
    scales = (words & jnp.uint32(0x0F0F0F0F)) + jnp.uint32(0x30303030)
    is_scale = jnp.arange(NVFP4_WORDS) >= 256
    return lax.bitcast_convert_type(jnp.where(is_scale, scales, words), jnp.int32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_bf16_words(key, lead: tuple[int, ...], shape: tuple[int, int]):
    """Normal bfloat16 weights: int32 [*lead, T, B, 1024]."""
    rows, columns = shape
    values = jax.random.normal(key, (*lead, rows // ROWS, columns // BLOCK, BF16_WORDS, 2), jnp.bfloat16)
    return lax.bitcast_convert_type(values, jnp.int32)


def random_tiles(key, lead, rows, columns, *, nvfp4=True, segments=None, paired=False) -> Tiles:
    """Random weights that give outputs of order one, with a different global scale per segment."""
    words = (random_nvfp4_words if nvfp4 else random_bf16_words)(key, tuple(lead), (rows, columns))
    segments = segments or ((rows // 2, rows // 2) if paired else (rows,))
    spread = jax.random.uniform(jax.random.fold_in(key, 1), (*lead, len(segments)), jnp.float32, 0.5, 1.5)
    scale = spread * jnp.float32(columns**-0.5 * (0.2 if nvfp4 else 1.0))
    return Tiles(words, pad_scale(scale) if lead else scale, segments, paired)
