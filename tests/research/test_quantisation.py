"""Rounding to NVFP4 inside a training step."""

import jax
import jax.numpy as jnp
import numpy as np

from flint_jax.research import quantisation
from flint_jax.weights import shapes
from pallas_kernels import nvfp4


def by_numpy(weights, segments):
    out, at = np.empty_like(weights), 0
    for rows in segments:
        for lead in np.ndindex(weights.shape[:-2]):
            codes, scales, total = nvfp4.quantize_numpy(weights[lead][at : at + rows])
            out[lead][at : at + rows] = nvfp4.decode_numpy(codes, scales) * total
        at += rows
    return out


def test_equal_to_the_stored_format():
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(2, 48, 64)).astype(np.float32) * np.exp(rng.normal(size=(2, 48, 1))).astype(np.float32)
    weights[0, 3] = 0
    weights[1, :16] = 0  # a segment of nothing
    segments = (16, 32)
    got = np.asarray(jax.jit(lambda w: quantisation.rounded(w, segments))(weights))
    want = by_numpy(weights, segments)
    # The last bit of the products may differ; a wrong code would be off by a twelfth at least.
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert len(np.unique(np.abs(got[0, :16, :16]) / np.abs(got[0, :16, :16]).max())) > 4


def test_ties_go_to_the_even_code():
    edges = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2, np.float32) * 448
    weights = np.tile(edges, (16, 1))
    got = np.asarray(quantisation.rounded(jnp.asarray(weights), (16,)))[0, :8] / 448
    np.testing.assert_allclose(got, [0, 1, 1, 2, 2, 4, 4, 6], rtol=1e-6)


def test_the_gradient_passes_and_the_share_counts():
    from tests.research.small import CONFIG

    weights = {
        name: jax.random.normal(jax.random.key(1), spec.shape, jnp.float32) for name, spec in shapes(CONFIG).items()
    }
    for share in (0.0, 0.5, 1.0):
        made = quantisation.straight_through(weights, CONFIG, jnp.float32(share))
        full = quantisation.rounded(weights["o"], shapes(CONFIG)["o"].segments)
        want = weights["o"] + share * (full - weights["o"])
        np.testing.assert_allclose(made["o"], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(made["attn_norm"], weights["attn_norm"])
    gradient = jax.grad(lambda w: quantisation.straight_through(w, CONFIG, jnp.float32(1))["o"].sum())(weights)
    np.testing.assert_array_equal(gradient["o"], np.ones_like(weights["o"]))
