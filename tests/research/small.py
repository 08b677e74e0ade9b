"""A three-layer Flint with random weights: dense and full, experts and window, experts and full."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flint_jax.config import FULL, SLIDING, FlintConfig
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from flint_jax.random_weights import random_weights
from loaders.synthetic import spread

CONFIG = FlintConfig(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
    layer_types=(FULL, SLIDING, FULL),
    rope_layers=(False, True, False),
    mlp_only_layers=(0,),
    sliding_window=5,
    max_position_embeddings=128,
)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12)).astype(np.int32)


@functools.cache
def weights(weight_format="bf16", dtype="float32", mode="transformers"):
    tree = random_weights(CONFIG, Numerics(mode, dtype), weight_format=weight_format, spread=spread)
    rng = np.random.default_rng(1)
    for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm", "final_norm"):  # ones hide what a norm does
        tree[name] = tree[name] + jnp.asarray(0.2 * rng.normal(size=tree[name].shape), tree[name].dtype)
    return tree


@functools.cache
def model(weight_format="bf16", dtype="float32", mode="transformers"):
    return Flint(CONFIG, dict(weights(weight_format, dtype, mode)), Numerics(mode, dtype))


def close(got, want, limit=2e-5):
    """Largest difference, relative to the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)
    assert error <= limit, error


def plain(made, tokens=TOKENS, lengths=None):
    """Logits without any research code. Models of one configuration share a program."""
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else lengths
    return np.asarray(_plain(*nnx.split(made), jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)))


@functools.partial(jax.jit, static_argnums=0)
def _plain(graph, state, tokens, lengths):
    return nnx.merge(graph, state)(tokens, lengths)
