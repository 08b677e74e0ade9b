"""What training computes in other pieces equals what serving computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flint_jax import moe
from flint_jax.config import FULL, SLIDING
from flint_jax.model import WholeSequence
from flint_jax.numerics import Numerics
from flint_jax.research import attention
from tests.research.small import CONFIG

NUMERICS = Numerics("serving", "float32")


def pieces(length, seed=0):
    c = CONFIG
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(2, length, n, c.head_dim) for n in (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)]
    q, k, v = (jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys[:3], shapes, strict=True))
    return q, k, v, jax.random.normal(keys[3], (c.num_attention_heads,), jnp.float32)


@pytest.mark.parametrize("kind", [FULL, SLIDING])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_same_attention_and_gradients(kind, length, monkeypatch):
    """Lengths within, at and beyond the window and the block; ragged rows. Measured differences: 3e-7."""
    monkeypatch.setattr(attention, "FULL_BLOCK", 16)
    layer = CONFIG.layer_types.index(kind)
    lengths = jnp.asarray([length, max(length - 3, 1)], jnp.int32)
    real = (jnp.arange(length)[None] < lengths[:, None])[..., None, None]

    def total(args, cls):
        out = cls(CONFIG, NUMERICS, (2, length), lengths).attend(layer, *args)
        kept = jnp.where(real, out, 0)
        return jnp.sum(kept * jnp.cos(jnp.arange(kept.size, dtype=jnp.float32)).reshape(kept.shape)), kept

    run = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    (want_grad, want), (got_grad, got) = (
        run(pieces(length), cls) for cls in (WholeSequence, attention.TrainingSequence)
    )
    np.testing.assert_allclose(got, want, atol=3e-6)
    assert float(jnp.abs(want).max()) > 0.1
    for a, b in zip(got_grad, want_grad, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_experts_everywhere_are_the_chosen_ones():
    config = dataclasses.replace(CONFIG, num_experts=4, num_experts_per_tok=2)
    d, f = config.hidden_size, config.moe_intermediate_size
    keys = jax.random.split(jax.random.key(3), 4)
    x = jax.random.normal(keys[0], (9, d), jnp.float32)
    gate_up = jax.random.normal(keys[1], (2, 4, 2 * f, d), jnp.float32) / d**0.5
    down = jax.random.normal(keys[2], (2, 4, d, f), jnp.float32) / f**0.5
    logits = jax.random.normal(keys[3], (9, 4), jnp.float32)
    scores, ids = jax.lax.top_k(jax.nn.sigmoid(logits), 2)
    routing = moe.Routing(logits, ids.astype(jnp.int32), scores)

    def run(x, gate_up, down):
        return moe.experts(x, routing, gate_up, down, layer=1, numerics=NUMERICS)

    want = jax.jit(run)(x, gate_up, down)
    with moe.grouped(1 << 30):
        got = jax.jit(lambda *a: run(*a))(x, gate_up, down)
        assert " sort[" not in str(jax.make_jaxpr(run)(x, gate_up, down))
    np.testing.assert_allclose(got, want, atol=1e-5)
