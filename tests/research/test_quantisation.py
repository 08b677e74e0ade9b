"""Rounding to NVFP4 inside a training step."""

import jax
import jax.numpy as jnp
import numpy as np

import flint_jax
from flint_jax.research import lora, quantisation
from flint_jax.weights import shapes
from loaders import save_checkpoint
from loaders.synthetic import preset


def test_equal_to_what_an_export_holds(tmp_path):
    """Every matrix of a small model, exported to NVFP4 and read back; q, k, v and gate, up differ in size."""
    config = preset("tiny", 3, hidden_size=64, num_experts=4, num_experts_per_tok=2)
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=spec.shape).astype(np.float32) for name, spec in shapes(config).items()}
    for name, spec in shapes(config).items():
        if spec.is_matrix:
            weights[name][..., : spec.segments[0], :] *= 3
            weights[name][..., -1, :] = 0
    save_checkpoint(tmp_path / "small.gguf", config, weights, weight_format="nvfp4")
    lm = flint_jax.load(tmp_path / "small.gguf", tokenizer="bytes", kernels="xla", progress=False)
    stored = lora.weights_of(lm)
    for name, spec in shapes(config).items():
        if spec.is_matrix:
            got = np.asarray(quantisation.rounded(jnp.asarray(weights[name])))
            want = np.asarray(stored[name].values(jnp.float32) * stored[name].row_scale()[..., None])
            # The last bit of the products may differ; a wrong code would be off by a twelfth at least.
            np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)
            assert len(np.unique(np.abs(got))) > 50


def test_ties_go_to_the_even_code():
    edges = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2, np.float32) * 448
    weights = np.tile(edges, (16, 1))
    got = np.asarray(quantisation.rounded(jnp.asarray(weights)))[0, :8] / 448
    np.testing.assert_allclose(got, [0, 1, 1, 2, 2, 4, 4, 6], rtol=1e-6)


def test_the_gradient_passes_and_the_share_counts():
    from tests.research.small import CONFIG

    weights = {
        name: jax.random.normal(jax.random.key(1), spec.shape, jnp.float32) for name, spec in shapes(CONFIG).items()
    }
    for share in (0.0, 0.5, 1.0):
        made = quantisation.straight_through(weights, CONFIG, jnp.float32(share))
        full = quantisation.rounded(weights["o"])
        want = weights["o"] + share * (full - weights["o"])
        np.testing.assert_allclose(made["o"], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(made["attn_norm"], weights["attn_norm"])
    gradient = jax.grad(lambda w: quantisation.straight_through(w, CONFIG, jnp.float32(1))["o"].sum())(weights)
    np.testing.assert_array_equal(gradient["o"], np.ones_like(weights["o"]))
