"""Tile order: lossless, and each lane finds the weights its tensor-core operand needs."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import layout, nvfp4

ROWS, COLUMNS = 64, 256


@pytest.fixture(scope="module")
def planes():
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (2, ROWS, COLUMNS // 2), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (2, ROWS, COLUMNS // 16), dtype=np.uint8)
    return codes, scales


@pytest.mark.parametrize("paired", [False, True])
def test_nvfp4_round_trip(planes, paired):
    codes, scales = planes
    words = layout.pack_nvfp4(codes, scales, paired=paired)
    assert words.shape == (2, ROWS // 16, COLUMNS // 128, 288)
    on_device = layout.pack_nvfp4(jnp.asarray(codes), jnp.asarray(scales), paired=paired)
    np.testing.assert_array_equal(words, np.asarray(on_device))
    tiles = layout.Tiles(jnp.asarray(words), jnp.ones((2, 1)), (ROWS,), paired)
    assert tiles.shape == (2, ROWS, COLUMNS)
    for dtype in (jnp.bfloat16, jnp.float32):
        np.testing.assert_array_equal(np.asarray(tiles.values(dtype), np.float32), nvfp4.decode_numpy(codes, scales))


@pytest.mark.parametrize("paired", [False, True])
def test_bf16_round_trip(paired):
    values = np.random.default_rng(2).standard_normal((2, ROWS, COLUMNS)).astype(ml_dtypes.bfloat16)
    words = layout.pack_bf16(values, paired=paired)
    np.testing.assert_array_equal(words, np.asarray(layout.pack_bf16(jnp.asarray(values), paired=paired)))
    tiles = layout.Tiles(jnp.asarray(words), jnp.ones((2, 1)), (ROWS,), paired)
    np.testing.assert_array_equal(np.asarray(tiles.values()), values)


def test_a_lane_finds_its_fragment(planes):
    """Straight from the definition: word i of lane 4 g + q holds rows g, g + 8 and columns 16 i + 4 q .. + 3."""
    codes, scales = (plane[0] for plane in planes)
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(ROWS, COLUMNS)
    words = layout.pack_nvfp4(codes, scales).view(np.uint32)
    for tile, block, i, g, q in [(0, 0, 0, 0, 0), (1, 1, 5, 3, 2), (3, 0, 7, 7, 3)]:
        word = words[tile, block, :256].reshape(2, 32, 4)[i // 4, 4 * g + q, i % 4]
        for h in range(2):
            for c in range(2):
                low, sign = layout.CODE_BITS[h + 2 * c]
                for e in range(2):
                    half = (int(word) >> (16 * e)) & 0xFFFF
                    code = (half >> low) & 7 | ((half >> sign) & 1) << 3
                    assert code == nibbles[tile * 16 + g + 8 * h, block * 128 + 16 * i + 4 * q + 2 * c + e]
        scale = int(words[tile, block, 256 + 4 * g + q]).to_bytes(4, "little")
        for h in range(2):
            for r in range(2):
                assert scale[2 * h + r] == scales[tile * 16 + g + 8 * h, block * 8 + 2 * q + r]


def test_paired_tiles_hold_matching_rows(planes):
    codes, scales = (plane[0] for plane in planes)
    paired = layout.pack_nvfp4(codes, scales, paired=True)
    order = np.arange(ROWS).reshape(2, -1, 8).swapaxes(0, 1).reshape(-1)  # 8 gate rows, their 8 up rows, ...
    np.testing.assert_array_equal(paired, layout.pack_nvfp4(codes[order], scales[order]))


def test_tile_takes_every_kind_of_matrix(planes):
    codes, scales = (jnp.asarray(plane) for plane in planes)
    gs = jnp.asarray([[0.5, 2.0], [1.0, 3.0]])
    packed = nvfp4.Packed(codes, scales, gs, (32, 32))
    scaled = nvfp4.Scaled(packed.values(), gs, (32, 32))
    for matrix in (packed, scaled):
        tiles = jax.jit(layout.tile)(matrix)
        np.testing.assert_array_equal(np.asarray(tiles.values()), np.asarray(packed.values()))
        np.testing.assert_array_equal(np.asarray(tiles.row_scale()), np.asarray(packed.row_scale()))
        np.testing.assert_array_equal(np.asarray(tiles[1].values()), np.asarray(packed[1].values()))
    plain = layout.tile(packed.values(), paired=True)
    assert plain.segments == (32, 32)
    assert not plain.nvfp4


def test_a_matrix_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="40 x 128 matrix does not fit"):
        layout.tile(jnp.zeros((40, 128), jnp.bfloat16))
