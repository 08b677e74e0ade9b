"""NVFP4: 4-bit weights (E2M1), one E4M3 scale per 16 of them, one float32 scale per output segment.

A weight is ``e2m1(code) * e4m3(scale) * global_scale``. The product of the first two is exact in bfloat16 (at most six
significant bits), so dequantising without the global scale loses nothing; the global scale belongs on the float32
accumulator of the product. Sources: the GGUF block format (type 40), checked against gguf-py's decoder in the tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, UInt8

GROUP = 16  # weights that share one block scale
GGUF_BLOCK = 64  # weights in one GGUF record
GGUF_BYTES = 36  # 4 scale bytes, then 4 x 8 code bytes

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3_table() -> np.ndarray:
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[0x7F] = 0.0  # the format's NaN: every decoder of this file type reads it as zero
    return value.astype(np.float32)


E4M3 = _e4m3_table()  # 128 entries: the sign bit is never set in a repacked scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """An NVFP4 matrix (or stack of them) kept packed.

    codes: uint8 [..., R, C/2]; byte j of a row holds weight 2j in its low nibble and 2j+1 in its high nibble.
    scales: uint8 [..., R, C/16], E4M3 bytes without sign, 0x7F never present.
    global_scale: float32 [..., S], one per segment of rows.
    segments: row counts of the S segments; they sum to R.
    """

    codes: UInt8[Array, "... R C2"]
    scales: UInt8[Array, "... R C16"]
    global_scale: Float[Array, "... S"]
    segments: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., R, C]."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)

    def __getitem__(self, index) -> Packed:
        """Take leading (stack) dimensions; the last two stay whole."""
        return Packed(self.codes[index], self.scales[index], self.global_scale[index], self.segments)

    def values(self, dtype=jnp.bfloat16) -> Float[Array, "... R C"]:
        """e2m1 * e4m3, exact in bfloat16 and wider, without the global scale."""
        return decode(self.codes, self.scales, dtype)

    def row_scale(self) -> Float[Array, "... R"]:
        """The global scale of each row, float32."""
        return expand_segments(self.global_scale, self.segments)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    """A plain matrix with one float32 scale per segment of rows: stacks in which NVFP4 and BF16 tensors meet.

    values: [..., R, C] bfloat16 (exact e2m1 * e4m3, or the stored weight) or float32. global_scale: float32 [..., S].
    """

    values_: Float[Array, "... R C"]
    global_scale: Float[Array, "... S"]
    segments: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., R, C]."""
        return self.values_.shape

    def __getitem__(self, index) -> Scaled:
        """Take leading (stack) dimensions; the last two stay whole."""
        return Scaled(self.values_[index], self.global_scale[index], self.segments)

    def values(self, dtype=jnp.bfloat16) -> Float[Array, "... R C"]:
        """The matrix without its global scale."""
        return self.values_.astype(dtype)

    def row_scale(self) -> Float[Array, "... R"]:
        """The global scale of each row, float32."""
        return expand_segments(self.global_scale, self.segments)


def expand_segments(global_scale: Float[Array, "... S"], segments: tuple[int, ...]) -> Float[Array, "... R"]:
    """One scale per segment -> one scale per row."""
    if len(segments) == 1:
        return jnp.broadcast_to(global_scale, (*global_scale.shape[:-1], segments[0]))
    # No jnp.repeat: XLA would work out its indices while it compiles, for seconds a program.
    lead = global_scale.shape[:-1]
    parts = [jnp.broadcast_to(global_scale[..., i : i + 1], (*lead, n)) for i, n in enumerate(segments)]
    return jnp.concatenate(parts, axis=-1)


def decode(codes: UInt8[Array, "... C2"], scales: UInt8[Array, "... C16"], dtype=jnp.bfloat16) -> Float[Array, "... C"]:
    """Planes -> e2m1 * e4m3 in ``dtype`` (bfloat16 or wider: exact)."""
    pair = jnp.stack([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=-1)
    nibble = pair.reshape(*codes.shape[:-1], codes.shape[-1] * 2)
    value = _e2m1(nibble, dtype)
    scale = _e4m3(scales, dtype)
    grouped = value.reshape(*scales.shape, GROUP) * scale[..., None]
    return grouped.reshape(value.shape)


def _e2m1(nibble: UInt8[Array, "..."], dtype) -> Float[Array, "..."]:
    # Arithmetic instead of a table look-up: a gather per weight is what makes XLA materialise the weights.
    magnitude = (nibble & jnp.uint8(7)).astype(jnp.int32)
    exponent, mantissa = magnitude >> 1, magnitude & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)  # float32 bits of (1 + m/2) * 2^(e-1)
    bits = jnp.where(exponent == 0, jnp.where(mantissa == 1, 0x3F000000, 0), normal)
    sign = (nibble.astype(jnp.int32) & 8) << 28
    return jax.lax.bitcast_convert_type(bits | sign, jnp.float32).astype(dtype)


def _e4m3(byte: UInt8[Array, "..."], dtype) -> Float[Array, "..."]:
    return jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(dtype)


# -- host side: files -> planes ------------------------------------------------------------------------------------


def clean_scales(scales: np.ndarray, warn: Callable[[int], None] | None = None) -> np.ndarray:
    """Apply the scale-byte rules: 0x7F -> 0, sign bit cleared (``warn(count)``), 0xFF refused with ValueError."""
    worst = int(scales.max(initial=0))
    if worst < 0x7F:
        return scales
    if worst == 0xFF:
        raise ValueError(
            f"{int((scales == 0xFF).sum())} NVFP4 block scales are 0xFF, which decoders read as 0 or as 480; "
            "convert the checkpoint again with scales in 0x00..0x7E"
        )
    signed = int((scales > 0x7F).sum())
    if signed and warn is not None:
        warn(signed)
    scales = scales & np.uint8(0x7F)
    return np.where(scales == 0x7F, np.uint8(0), scales)


def repack_gguf(records: np.ndarray, warn: Callable[[int], None] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """GGUF records uint8 [..., R, B*36] -> (codes uint8 [..., R, B*32], scales uint8 [..., R, B*4]); lossless.

    In a record's 16-weight group, byte b holds weight b (low nibble) and b+8 (high nibble); here neighbours share a
    byte. Raises ValueError for a scale byte 0xFF; ``warn(n)`` hears of n scales with a set sign bit (cleared).
    """
    *lead, width = records.shape
    if width % GGUF_BYTES:
        raise ValueError(f"NVFP4 rows of {width} bytes: need a multiple of {GGUF_BYTES}")
    blocks = records.reshape(*lead, width // GGUF_BYTES, GGUF_BYTES)
    scales = clean_scales(np.ascontiguousarray(blocks[..., :4]), warn)
    # One 8-byte word per group: bytes b0..b7 -> (b0 lo, b1 lo), (b2 lo, b3 lo), ..., (b0 hi, b1 hi), ...
    word = np.ascontiguousarray(blocks[..., 4:]).reshape(*blocks.shape[:-1], 4, 8).view("<u8")
    low = _pack_even_nibbles(word)
    high = _pack_even_nibbles(word >> np.uint64(4))
    codes = (low | (high << np.uint64(32))).astype("<u8", copy=False).view(np.uint8)
    return codes.reshape(*lead, -1), scales.reshape(*lead, -1)


def _pack_even_nibbles(word: np.ndarray) -> np.ndarray:
    """Low nibbles of the 8 bytes of each word -> the low 32 bits, in order."""
    word = word & np.uint64(0x0F0F0F0F0F0F0F0F)
    word = (word | (word >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
    word = (word | (word >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
    return (word | (word >> np.uint64(16))) & np.uint64(0x00000000FFFFFFFF)


def decode_numpy(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Planes -> float32 values on the host (reference for tests and for mixed stacks)."""
    nibble = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    value = E2M1[nibble].reshape(*scales.shape, GROUP) * E4M3[scales & 0x7F][..., None]
    return value.reshape(nibble.shape)


def quantize_numpy(weights: np.ndarray, amax: float | None = None) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """float32 [..., R, C] -> (codes, scales, global scale), nearest even, scales chosen from each group's maximum.

    The global scale is amax / (448 * 6), so that the largest group uses the largest block scale.
    """
    weights = np.asarray(weights, np.float32)
    amax = float(np.abs(weights).max()) if amax is None else amax
    global_scale = np.float32(amax / (448 * 6)) if amax > 0 else np.float32(1.0)
    groups = weights.reshape(*weights.shape[:-1], -1, GROUP) / global_scale
    scales = (np.abs(groups).max(-1) / 6).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    divisor = E4M3[scales & 0x7F]
    scaled = np.divide(groups, divisor[..., None], out=np.zeros_like(groups), where=divisor[..., None] > 0)
    magnitude = np.abs(scaled)
    # Halfway points between neighbours 0, .5, 1, 1.5, 2, 3, 4, 6; ties go to the even code.
    edges = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    code = np.searchsorted(edges, magnitude.ravel(), side="left").reshape(magnitude.shape)
    tie_up = np.isin(magnitude, edges[1::2]).astype(code.dtype)  # between odd and even: take the even one above
    code = (code + tie_up).astype(np.uint8)
    code |= (np.signbit(scaled) & (code > 0)).astype(np.uint8) << 3
    code = code.reshape(weights.shape)
    return code[..., 0::2] | (code[..., 1::2] << 4), scales, global_scale
