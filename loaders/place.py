"""Where pieces of a checkpoint are put: leaves of the weight tree, on the device or (small ones) first on the host.

A large leaf is allocated on the device and written by donated updates, so the host never holds it. A small one is put
together in numpy and sent whole: that costs a few megabytes and spares the compiler a program for each shape. NVFP4
records of large leaves travel as they are and are taken apart on the device: one fused pass there, some twenty numpy
passes here (0.3 GB/s).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8

from loaders.name_map import Leaf
from pallas_kernels import nvfp4

HOST_BYTES = 32 << 20  # leaves of the full-size model under this: norms, sinks, the final norm

PLAIN, PACKED, SCALED = "plain", "packed", "scaled"  # how a leaf ends up: array, nvfp4.Packed, nvfp4.Scaled


class BadScale(ValueError):
    """A block scale is 0xFF."""


def planes_of(leaf: Leaf, kind: str, dtype: np.dtype) -> list[tuple[tuple[int, ...], np.dtype]]:
    """(shape, dtype) of the arrays a leaf consists of: its values, or codes and block scales."""
    if kind != PACKED:
        return [(leaf.full_shape, dtype)]
    *lead, columns = leaf.full_shape
    byte = np.dtype(np.uint8)
    return [((*lead, columns // 2), byte), ((*lead, columns // nvfp4.GROUP), byte)]


class HostLeaf:
    """A leaf put together in numpy."""

    def __init__(self, leaf: Leaf, kind: str, dtype: np.dtype):
        self.kind = kind
        self.planes = [np.zeros(*plane) for plane in planes_of(leaf, kind, dtype)]

    def write(self, piece: np.ndarray, at: tuple[int, ...], packed: bool) -> int:
        """Put a piece (values, or records if ``packed``) at an index; returns how many scales had a sign bit."""
        signed: list[int] = []
        pieces = [piece]
        if packed:
            try:
                pieces = nvfp4.repack_gguf(piece, signed.append)
            except ValueError as error:
                raise BadScale from error
            if self.kind == SCALED:
                pieces = [nvfp4.decode_numpy(*pieces)]
        for plane, part in zip(self.planes, pieces, strict=True):
            own, inner = at[: -part.ndim], at[-part.ndim :]
            window = tuple(slice(start, start + size) for start, size in zip(inner, part.shape, strict=True))
            # float16 goes through float32; float32 to bfloat16 rounds to nearest even, as on the device.
            plane[own + window] = part.astype(np.float32) if part.dtype == np.float16 else part
        return sum(signed)

    def arrays(self) -> list[Array]:
        """The planes on the default device."""
        return [jnp.asarray(plane) for plane in self.planes]


class DeviceLeaf:
    """A leaf filled in place on the default device."""

    def __init__(self, leaf: Leaf, kind: str, dtype: np.dtype):
        self.kind = kind
        self.planes = [_zeros(*plane) for plane in planes_of(leaf, kind, dtype)]

    def write(self, piece: np.ndarray, at: tuple[int, ...], packed: bool) -> int:
        """As HostLeaf.write. Waits for the transfer: one still running would keep the piece's host memory alive."""
        index = np.array(at, np.int32)
        if not packed:
            self.planes = [jax.block_until_ready(_update(self.planes[0], piece, index))]
            return 0
        update = _update_packed if self.kind == PACKED else _update_decoded
        *self.planes, found = jax.block_until_ready(update(*self.planes, piece, index))
        largest, signed = np.asarray(found).tolist()
        if largest == 0xFF:
            raise BadScale
        return signed

    def arrays(self) -> list[Array]:
        """The planes."""
        return self.planes


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    return jnp.zeros(shape, dtype)


def _place(stack: Array, piece: Array, at: Array) -> Array:
    piece = piece.astype(stack.dtype).reshape((1,) * (stack.ndim - piece.ndim) + piece.shape)
    return jax.lax.dynamic_update_slice(stack, piece, tuple(at))


@functools.partial(jax.jit, donate_argnums=0)
def _update(stack: Array, piece: Array, at: Array) -> Array:
    """Write a piece at index ``at`` (one entry per axis of the stack), converted to the stack's dtype."""
    return _place(stack, piece, at)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _update_packed(codes: Array, scales: Array, records: Array, at: Array) -> tuple[Array, Array, Array]:
    """Write NVFP4 records into the two planes; also returns the scale bytes' (largest, number with the sign bit)."""
    piece_codes, piece_scales, found = repack(records)
    return _place(codes, piece_codes, at), _place(scales, piece_scales, at), found


@functools.partial(jax.jit, donate_argnums=0)
def _update_decoded(stack: Array, records: Array, at: Array) -> tuple[Array, Array]:
    """The same for a stack of mixed kinds: e2m1 * e4m3, exact, without the global scale."""
    codes, scales, found = repack(records)
    return _place(stack, nvfp4.decode(codes, scales, stack.dtype), at), found


def repack(records: UInt8[Array, "... B36"]) -> tuple[UInt8[Array, "... B32"], UInt8[Array, "... B4"], Array]:
    """GGUF records -> codes (neighbours share a byte), clean scales, and int32 (largest byte, bytes with sign bit).

    The same as nvfp4.repack_gguf, traceable. In a record's 16-weight group byte b holds weight b (low nibble) and
    weight b+8 (high nibble). Scale bytes: sign bit cleared, then 0x7F becomes 0; the caller refuses 0xFF.
    """
    *lead, width = records.shape
    blocks = records.reshape(*lead, width // nvfp4.GGUF_BYTES, nvfp4.GGUF_BYTES)
    raw = blocks[..., :4]
    clean = raw & jnp.uint8(0x7F)
    clean = jnp.where(clean == jnp.uint8(0x7F), jnp.uint8(0), clean)
    pairs = blocks[..., 4:].reshape(*blocks.shape[:-1], 4, 4, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    low = (even & jnp.uint8(0x0F)) | (odd << jnp.uint8(4))
    high = (even >> jnp.uint8(4)) | (odd & jnp.uint8(0xF0))
    codes = jnp.concatenate([low, high], axis=-1)
    found = jnp.stack([raw.max().astype(jnp.int32), (raw > jnp.uint8(0x7F)).sum(dtype=jnp.int32)])
    return codes.reshape(*lead, -1), clean.reshape(*lead, -1), found
