"""Weights in the order in which a warp's tensor-core instruction wants them.

A matrix [R, C] is cut into tiles of 16 rows x C, each tile into blocks of 128 columns. One block of a tile is one
contiguous piece of memory, so a warp streams it with 16-byte loads (or one bulk copy) and needs no shuffles:

    NVFP4   288 words of 4 bytes: 256 words of codes [2][32 lanes][4], then one word of scales per lane   1152 bytes
    BF16   1024 words:            [8][32 lanes][4]                                                        4096 bytes

With lane = 4 g + q, a lane's word number i (0..7) of a block feeds one m16n8k16 product: rows g and g + 8, columns
16 i + 4 q .. + 3 (the order of columns inside a product is free as long as the activations use the same one).

A code word holds eight 4-bit codes. Each 16-bit half holds the four codes of one column parity, with the bits placed
so that shifts and two masks give the four float16 pairs of the product's A operand (see CODE_BITS). The scale word of a
lane holds four E4M3 bytes: rows (g, g + 8) x scale groups (2 q, 2 q + 1).

``paired`` tiles hold 8 rows of a gate matrix above the 8 matching rows of an up matrix: the lane that has a gate row
also has its up row. The repacking loses nothing; ``Tiles.values`` undoes it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.nvfp4 import Packed, Scaled, expand_segments

ROWS = 16  # of a tile
BLOCK = 128  # columns of a block
NVFP4_WORDS = 288
BF16_WORDS = 1024

# Lowest magnitude bit and sign bit, inside a 16-bit half, of the code for A-operand register h + 2 c
# (h: lower or upper 8 rows; c: first or second pair of columns).
CODE_BITS = ((9, 15), (6, 12), (3, 14), (0, 13))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """A matrix, or a stack of matrices, in tile order.

    words: int32 [..., R/16, C/128, 288 (NVFP4) or 1024 (BF16)]. global_scale: float32 [..., S], or more of which the
    first S count (see ``pad_scale``). segments: row counts of the S segments, in the matrix' own order of rows. paired:
    two equal segments, gate and up, share each tile.
    """

    words: Int32[Array, "... T B W"]
    global_scale: Float[Array, "... S"]
    segments: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    paired: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., R, C]."""
        *lead, tiles, blocks, _ = self.words.shape
        return (*lead, tiles * ROWS, blocks * BLOCK)

    @property
    def nvfp4(self) -> bool:
        """Whether the weights are 4-bit codes (otherwise bfloat16)."""
        return self.words.shape[-1] == NVFP4_WORDS

    def __getitem__(self, index) -> Tiles:
        """Take leading (stack) dimensions; the last two stay whole."""
        return Tiles(self.words[index], self.global_scale[index], self.segments, self.paired)

    def values(self, dtype=jnp.bfloat16) -> Float[Array, "... R C"]:
        """The matrix in its own order, without the global scale; exact in bfloat16 and wider."""
        unpack = _unpack_nvfp4 if self.nvfp4 else _unpack_bf16
        return unpack(self.words, self.paired).astype(dtype)

    def row_scale(self) -> Float[Array, "... R"]:
        """The global scale of each row, float32."""
        return expand_segments(self.global_scale[..., : len(self.segments)], self.segments)


def pad_scale(stack: Float[Array, "L ... S"]) -> Float[Array, "L ... P"]:
    """Global scales of a stack, filled up so that each layer's begin at a multiple of 256 bytes: there a kernel can be
    given a layer's address (``emit.slice_layer``)."""
    if stack.size // stack.shape[0] % 64 == 0:
        return stack
    return jnp.pad(stack, [(0, 0)] * (stack.ndim - 1) + [(0, -stack.shape[-1] % 64)])


def fits(rows: int, columns: int, *, paired: bool = False) -> bool:
    """Whether a matrix can be cut into whole tiles."""
    return rows % ROWS == 0 and columns % BLOCK == 0 and (not paired or rows % (2 * ROWS) == 0)


def tile(matrix: Packed | Scaled | jax.Array, *, paired: bool = False) -> Tiles:
    """Any stored matrix -> tiles. Jittable; under jit it is one pass over the bytes.

    Raises ValueError when the shape does not fit whole tiles. Plain arrays get a global scale of one per segment.
    """
    rows, columns = matrix.shape[-2:]
    if not fits(rows, columns, paired=paired):
        raise ValueError(f"a {rows} x {columns} matrix does not fit tiles of {ROWS} x {BLOCK} (paired: {paired})")
    if isinstance(matrix, Packed):
        words = pack_nvfp4(matrix.codes, matrix.scales, paired=paired)
        return Tiles(words, matrix.global_scale, matrix.segments, paired)
    if isinstance(matrix, Scaled):
        words = pack_bf16(matrix.values(jnp.bfloat16), paired=paired)
        return Tiles(words, matrix.global_scale, matrix.segments, paired)
    segments = (rows // 2, rows // 2) if paired else (rows,)
    scale = jnp.ones((*matrix.shape[:-2], len(segments)), jnp.float32)
    return Tiles(pack_bf16(matrix.astype(jnp.bfloat16), paired=paired), scale, segments, paired)


# -- rows ----------------------------------------------------------------------------------------------------------


def _split_rows(x, paired: bool, xp):
    """[..., R, rest] -> [..., T, 2 (h), 8 (g), rest]."""
    *lead, rows, rest = x.shape
    if paired:
        return xp.swapaxes(x.reshape(*lead, 2, rows // ROWS, 8, rest), -4, -3)
    return x.reshape(*lead, rows // ROWS, 2, 8, rest)


def _join_rows(x, paired: bool):
    """[..., T, 2, 8, C] -> [..., R, C]: the inverse."""
    *lead, tiles, _, _, columns = x.shape
    if paired:
        x = jnp.swapaxes(x, -4, -3)
    return x.reshape(*lead, tiles * ROWS, columns)


# -- NVFP4 ---------------------------------------------------------------------------------------------------------


def _place(quad, h: int, xp):
    """Four codes of a row (uint32, first column lowest) -> their bits in the code word."""
    word = xp.zeros_like(quad)
    for c in range(2):
        magnitude_bit, sign_bit = CODE_BITS[h + 2 * c]
        for e in range(2):
            code = quad >> xp.uint32(4 * (2 * c + e))
            word = word | ((code & xp.uint32(7)) << xp.uint32(magnitude_bit + 16 * e))
            word = word | (((code >> xp.uint32(3)) & xp.uint32(1)) << xp.uint32(sign_bit + 16 * e))
    return word


@functools.cache
def _place_table() -> np.ndarray:
    """``_place`` of every 16-bit value, uint32 [2, 65536]: what the host repacker looks up."""
    quads = np.arange(1 << 16, dtype=np.uint32)
    return np.stack([_place(quads, h, np) for h in range(2)])


def pack_nvfp4(codes: Array, scales: Array, *, paired: bool = False) -> Array:
    """Planes uint8 [..., R, C/2] and [..., R, C/16] -> int32 [..., T, B, 288]; numpy in, numpy out, else jax."""
    host = isinstance(codes, np.ndarray)
    xp = np if host else jnp
    if host:
        quads = np.ascontiguousarray(codes).view("<u2")
    else:
        pair = codes.reshape(*codes.shape[:-1], -1, 2).astype(jnp.uint32)
        quads = pair[..., 0] | (pair[..., 1] << jnp.uint32(8))
    quads = _split_rows(quads, paired, xp)  # [..., T, h, g, C/4]
    *lead, tiles, _, _, width = quads.shape
    blocks = width // 32
    shape = (*lead, tiles, 8, blocks, 2, 4, 4)  # T, g, B, i high, i low, q
    halves = []
    for h in range(2):
        quad = quads[..., h, :, :]
        halves.append((_place_table()[h][quad] if host else _place(quad, h, jnp)).reshape(shape))
    n = len(lead)
    order = (*range(n), n, n + 2, n + 3, n + 1, n + 5, n + 4)  # T, B, i high, g, q, i low
    word = xp.transpose(halves[0] | halves[1], order).reshape(*lead, tiles, blocks, 256)

    grouped = _split_rows(scales, paired, xp).reshape(*lead, tiles, 2, 8, blocks, 4, 2).astype(xp.uint32)
    scale = xp.zeros((*lead, tiles, 8, blocks, 4), xp.uint32)
    for h in range(2):
        for r in range(2):
            scale = scale | (grouped[..., h, :, :, :, r] << xp.uint32(8 * (2 * h + r)))
    scale = xp.swapaxes(scale, -3, -2).reshape(*lead, tiles, blocks, 32)
    return _as_int32(xp.concatenate([word, scale], -1))


def _as_int32(words):
    return words.view(np.int32) if isinstance(words, np.ndarray) else lax.bitcast_convert_type(words, jnp.int32)


def _unpack_nvfp4(words: Int32[Array, "... T B 288"], paired: bool) -> Float[Array, "... R C"]:
    """float32 values. One expression of every element's own place and no concatenation: with a gather in front, XLA
    would write the parts of one to memory, in float32 (8 bytes a weight on a GPU; here it is 1 byte)."""
    word = lax.bitcast_convert_type(words, jnp.uint32)
    *lead, tiles, blocks, _ = word.shape
    n = len(lead)
    codes = word[..., :256].reshape(*lead, tiles, blocks, 2, 8, 4, 4)  # T, B, i high, g, q, i low
    codes = codes.transpose(*range(n), n, n + 3, n + 1, n + 2, n + 5, n + 4)
    shape = (*lead, tiles, 2, 8, blocks, 2, 4, 4, 2, 2)  # T, h, g, B, i high, i low, q, c, e
    codes = lax.broadcast_in_dim(codes, shape, (*range(n), n, *range(n + 2, n + 7)))
    h, c, e = (lax.broadcasted_iota(jnp.uint32, shape, n + axis) for axis in (1, 7, 8))
    # Both halves of a word at once: the magnitude of code h + 2 c moves to bits 9 to 11 of its half, the sign to bit 15
    # (the inverse of CODE_BITS), which makes a float16 of 2^-14 times the weight.
    code = h + jnp.uint32(2) * c
    to_sign = (jnp.uint32(0x2130) >> (jnp.uint32(4) * code)) & jnp.uint32(15)
    both = (codes << (jnp.uint32(3) * code)) & jnp.uint32(0x0E000E00)
    both = both | ((codes << to_sign) & jnp.uint32(0x80008000))
    half = (both >> (jnp.uint32(16) * e)).astype(jnp.uint16)
    value = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)

    packed = word[..., 256:].reshape(*lead, tiles, blocks, 8, 4)  # T, B, g, q
    packed = packed.transpose(*range(n), n, n + 2, n + 1, n + 3)
    shape = (*lead, tiles, 2, 8, blocks, 4, 2)  # T, h, g, B, q, r
    packed = lax.broadcast_in_dim(packed, shape, (*range(n), n, *range(n + 2, n + 5)))
    h, r = (lax.broadcasted_iota(jnp.uint32, shape, n + axis) for axis in (1, 5))
    scale = (packed >> (jnp.uint32(16) * h + jnp.uint32(8) * r)).astype(jnp.uint8)
    scale = lax.bitcast_convert_type(scale, jnp.float8_e4m3fn).astype(jnp.float32) * jnp.float32(2.0**14)

    groups = (*lead, tiles, 2, 8, blocks * 8)
    value = value.reshape(*groups, 16) * scale.reshape(groups)[..., None]
    return _join_rows(value.reshape(*lead, tiles, 2, 8, blocks * BLOCK), paired)


# -- BF16 ----------------------------------------------------------------------------------------------------------


def pack_bf16(values: Array, *, paired: bool = False) -> Array:
    """bfloat16 [..., R, C] -> int32 [..., T, B, 1024]; numpy in, numpy out, else jax."""
    host = isinstance(values, np.ndarray)
    xp = np if host else jnp
    if host:
        pairs = np.ascontiguousarray(values).view("<u4")
    else:
        pairs = lax.bitcast_convert_type(values.reshape(*values.shape[:-1], -1, 2), jnp.uint32)
    pairs = _split_rows(pairs, paired, xp)  # [..., T, h, g, C/2]
    *lead, tiles, _, _, width = pairs.shape
    blocks = width // 64
    pairs = pairs.reshape(*lead, tiles, 2, 8, blocks, 8, 4, 2)  # T h g B i q c
    n = len(lead)
    order = (*range(n), n, n + 3, n + 4, n + 2, n + 5, n + 6, n + 1)  # T B i g q c h
    return _as_int32(xp.transpose(pairs, order).reshape(*lead, tiles, blocks, BF16_WORDS))


def _unpack_bf16(words: Int32[Array, "... T B 1024"], paired: bool) -> Float[Array, "... R C"]:
    *lead, tiles, blocks, _ = words.shape
    value = lax.bitcast_convert_type(words, jnp.bfloat16).reshape(*lead, tiles, blocks, 8, 8, 4, 2, 2, 2)
    n = len(lead)
    value = value.transpose(*range(n), n, n + 6, n + 3, n + 1, n + 2, n + 4, n + 5, n + 7)  # T h g B i q c e
    return _join_rows(value.reshape(*lead, tiles, 2, 8, blocks * BLOCK), paired)
