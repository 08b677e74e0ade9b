"""The numerics contract: which values are rounded where.

``serving`` follows the vendor's runtime as vLLM states it: residual sums normalised before they are rounded, float32
RoPE, bfloat16 router, routed gate/up kept in float32. ``transformers`` follows transformers' eager bfloat16 model. The
two differ only in roundings: with float32 compute they are the same function (but for the order of ties in routing).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flint_jax.errors import ConfigError
from pallas_kernels import layout, nvfp4

MODES = ("serving", "transformers")
# Matrices that keep their values and global scales apart, and offer values(), row_scale(), shape and [index].
SCALED = (nvfp4.Packed, nvfp4.Scaled, layout.Tiles)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A frozen matrix [..., R, C] of any kind and a low-rank addition to it: ``base + scale * up @ down``.

    down: [..., r, C] and up: [..., R, r], float32; scale: static.
    """

    base: jax.Array | nvfp4.Packed | nvfp4.Scaled | layout.Tiles
    down: Float[Array, "... r C"]
    up: Float[Array, "... R r"]
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., R, C]."""
        return self.base.shape

    def __getitem__(self, index) -> Adapted:
        """Take leading (stack) dimensions; the last two stay whole."""
        return Adapted(self.base[index], self.down[index], self.up[index], self.scale)


Matrix = jax.Array | nvfp4.Packed | nvfp4.Scaled | layout.Tiles | Adapted
_DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Compute dtype ("bfloat16" or "float32") and rounding mode ("serving" or "transformers")."""

    mode: str = "serving"
    dtype_name: str = "bfloat16"

    def __post_init__(self):
        if self.mode not in MODES:
            raise ConfigError(f"numerics = {self.mode!r}: need one of {', '.join(MODES)}")
        if self.dtype_name not in _DTYPES:
            raise ConfigError(f"dtype = {self.dtype_name!r}: need one of {', '.join(_DTYPES)}")

    @property
    def serving(self) -> bool:
        """Whether the roundings are those of serving."""
        return self.mode == "serving"

    @property
    def dtype(self):
        """Dtype of activations, plain weights and the KV cache."""
        return _DTYPES[self.dtype_name]

    @property
    def router_dtype(self):
        """Dtype of the router's weight: serving narrows it to the compute dtype, transformers keeps float32."""
        return self.dtype if self.serving else jnp.float32

    def round(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """float32 -> compute dtype, one rounding to nearest even.

        XLA may drop a float32 -> bfloat16 -> float32 pair (xla_allow_excess_precision is on by default), and with it
        the contract's rounding; reduce_precision is the form it has to keep.
        """
        if self.dtype == jnp.bfloat16:
            x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return x.astype(self.dtype)


def dot(x: Float[Array, "... C"], w: Float[Array, "R C"]) -> Float[Array, "... R"]:
    """x @ w.T with float32 accumulation; true float32 products for float32 operands (GPUs would take TF32)."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...c,rc->...r", x, w, precision=precision, preferred_element_type=jnp.float32)


def project(x: Float[Array, "... C"], w: Matrix) -> Float[Array, "... R"]:
    """x @ w.T as float32 accumulators, the global scales of an NVFP4 matrix applied to the accumulators."""
    if isinstance(w, Adapted):
        return project(x, w.base) + dot(dot(x, w.down.astype(x.dtype)), w.up) * jnp.float32(w.scale)
    if isinstance(w, SCALED):
        return dot(x, w.values(x.dtype)) * w.row_scale()
    return dot(x, w)


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x * sigmoid(x) as x / (1 + exp(-x))."""
    return x / (1 + jnp.exp(-x))
