"""The add + RMSNorm kernel's program, executed on the CPU, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import emulate, testing
from pallas_kernels.add_rms_norm import add_rms_norm, mosaic, reference


@pytest.mark.parametrize("with_residual", [True, False])
def test_kernel_equals_reference(with_residual):
    x, residual, weight = (
        jax.random.normal(k, (3, 2048), jnp.bfloat16) for k in jax.random.split(jax.random.key(0), 3)
    )
    residual = residual if with_residual else None
    with emulate.active():
        actual = mosaic.add_rms_norm(x, weight, 1, residual=residual, eps=1e-6)
    expected = reference.add_rms_norm(x, weight, 1, residual=residual, eps=1e-6)
    for a, e in zip(actual, expected, strict=True):
        assert testing.row_error(a, e) < 4e-3
    np.testing.assert_array_equal(np.asarray(actual[1]), np.asarray(expected[1]))


def test_norm_starts_from_the_unrounded_sum():
    """1 + 2^-9 rounds to 1 in bfloat16; the norm must still see the difference from exactly 1."""
    x = jnp.full((1, 1024), 1.0, jnp.bfloat16).at[0, 0].set(257.0 - 256.0)
    residual = jnp.zeros((1, 1024), jnp.bfloat16).at[0, 0].set(2.0**-9)
    weight = jnp.full((1, 1024), 256.0, jnp.bfloat16)
    normed, total = add_rms_norm(x, weight, 0, residual=residual, eps=0.0)
    assert float(total[0, 0]) == 1.0
    exact = (1 + 2.0**-9) / np.sqrt((1023 + (1 + 2.0**-9) ** 2) / 1024) * 256
    assert float(normed[0, 0]) == float(jnp.bfloat16(exact))
