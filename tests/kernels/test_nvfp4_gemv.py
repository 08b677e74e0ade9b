"""The GEMV kernels' programs, executed on the CPU, against the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device, dispatch, emulate, layout, nvfp4, testing
from pallas_kernels.nvfp4_gemv import Norm, gemv, mosaic, reference

TWO_CORES = device.Device("emulated", (9, 0), 2, 0.0)


def arguments(rows, columns, tokens, *, nvfp4=True, segments=None, paired=False, norm=None, scale=1.0):
    keys = jax.random.split(jax.random.key(rows + tokens), 4)
    x = (jax.random.normal(keys[0], (tokens, columns)) * scale).astype(jnp.bfloat16)
    weight = testing.random_tiles(keys[1], (3,), rows, columns, nvfp4=nvfp4, segments=segments, paired=paired)
    if norm is None:
        return x, weight, None
    residual = jax.random.normal(keys[2], (tokens, columns), jnp.bfloat16) if norm == "add" else None
    return x, weight, Norm(jax.random.normal(keys[3], (5, columns), jnp.bfloat16), 4, residual)


def compare(x, weight, norm, **options):
    with emulate.active(), device.assume(TWO_CORES):
        actual = mosaic.gemv(x, weight, 2, norm=norm, **options)
    expected = reference.gemv(x, weight, 2, norm=norm, **options)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert testing.row_error(a, e) < 4e-3


@pytest.mark.parametrize("tokens", [1, 2, 9, 16])
@pytest.mark.parametrize("nvfp4", [True, False])
def test_plain(tokens, nvfp4):
    compare(*arguments(32, 1024, tokens, nvfp4=nvfp4))


@pytest.mark.parametrize("tokens", [1, 3])
def test_fused_norm_segments_and_second_output(tokens):
    compare(*arguments(96, 1024, tokens, segments=(64, 16, 16), norm="add"), normed_out=True)


@pytest.mark.parametrize("epilogue", ["none", "logits"])
def test_a_layer_known_only_on_the_device(epilogue):
    """The same bits as for a layer known at trace time, whose weights are given to the kernel as slices."""
    x, weight, norm = arguments(48, 1024, 1, norm="add")
    traced = dataclasses.replace(norm, layer=jnp.int32(norm.layer))
    with emulate.active(), device.assume(TWO_CORES):
        sliced = mosaic.gemv(x, weight, 2, norm=norm, epilogue=epilogue)
        indexed = mosaic.gemv(x, weight, jnp.int32(2), norm=traced, epilogue=epilogue)
    jax.tree.map(np.testing.assert_array_equal, sliced, indexed)


def test_norm_without_addition():
    compare(*arguments(32, 1024, 1, norm="norm"))


@pytest.mark.parametrize(("tokens", "nvfp4"), [(1, True), (5, True), (2, False)])
def test_swiglu(tokens, nvfp4):
    compare(*arguments(64, 1024, tokens, nvfp4=nvfp4, paired=True, norm="add"), epilogue="swiglu")


@pytest.mark.parametrize(("tokens", "nvfp4"), [(1, True), (3, True), (11, True), (2, False)])
def test_logits_with_tile_maxima(tokens, nvfp4):
    """1040 rows over 2 x 8 warps: five tiles each, one more for some."""
    compare(*arguments(1040, 1024, tokens, nvfp4=nvfp4, norm="add"), epilogue="logits")


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e30])
def test_activations_beyond_float16(scale):
    """bfloat16 reaches much further than the float16 in which NVFP4 products are made."""
    compare(*arguments(32, 1024, 2, scale=scale))
    compare(*arguments(32, 1024, 1, scale=scale))


def test_one_token_equals_that_token_in_a_batch():
    x, weight, _ = arguments(32, 1024, 4)
    with emulate.active():
        alone = mosaic.gemv(x[2:3], weight, 1).out
        together = mosaic.gemv(x, weight, 1).out
    assert testing.row_error(alone[0], together[2]) < 4e-3


@pytest.mark.parametrize("scale_byte", [0x01, 0x08, 0x38, 0x7E])
def test_every_code_at_extreme_block_scales_is_exact(scale_byte):
    """One weight per row times one: 16 codes under subnormal, small, unit and largest block scale."""
    codes = np.zeros((16, 512), np.uint8)
    codes[:, 0] = np.arange(16)
    scales = np.full((16, 64), scale_byte, np.uint8)
    weight = layout.tile(nvfp4.Packed(jnp.asarray(codes), jnp.asarray(scales), jnp.ones((1,)), (16,)))
    weight = jax.tree.map(lambda a: a[None], weight)
    for tokens in (1, 2):
        x = np.zeros((tokens, 1024), np.float32)
        x[:, 0] = 1.0
        with emulate.active():
            out = mosaic.gemv(jnp.asarray(x, jnp.bfloat16), weight, 0).out
        np.testing.assert_array_equal(np.asarray(out[-1], np.float32), nvfp4.decode_numpy(codes, scales)[:, 0])


def test_unsupported_shapes_fall_to_the_reference():
    x, weight, _ = arguments(32, 1024, 17)
    with pytest.raises(dispatch.KernelUnsupported, match="17 tokens"):
        mosaic.gemv(x, weight, 0)
    assert gemv(x, weight, 0).out.shape == (17, 32)
    narrow, narrow_weight, _ = arguments(32, 384, 1)
    with pytest.raises(dispatch.KernelUnsupported, match="384 columns"):
        mosaic.gemv(narrow, narrow_weight, 0)


def test_mistakes_are_named():
    x, weight, _ = arguments(32, 1024, 1)
    with pytest.raises(ValueError, match="epilogue 'gelu'"):
        gemv(x, weight, 0, epilogue="gelu")
    with pytest.raises(ValueError, match="activations of 512 columns"):
        mosaic.gemv(x[:, :512], weight, 0)
