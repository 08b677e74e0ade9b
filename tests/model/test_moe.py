"""The two ways to run routed experts agree with each other and with a plain loop; every routing field counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flint_jax import moe
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from tests.model import golden

NUMERICS = Numerics("transformers", "float32")
RNG = np.random.default_rng(0)
EXPERTS, WIDTH, INNER, LAYERS = 8, 16, 12, 2
GATE_UP = jnp.asarray(RNG.normal(size=(LAYERS, EXPERTS, 2 * INNER, WIDTH)), jnp.float32)
DOWN = jnp.asarray(RNG.normal(size=(LAYERS, EXPERTS, WIDTH, INNER)), jnp.float32)


def plain(x, ids, weights, layer):
    out = np.zeros(x.shape)
    for m in range(len(x)):
        for a, e in enumerate(ids[m]):
            gate, up = np.split(np.asarray(GATE_UP[layer, e], np.float64) @ x[m], 2)
            act = gate / (1 + np.exp(-gate)) * up
            out[m] += weights[m, a] * (np.asarray(DOWN[layer, e], np.float64) @ act)
    return out


def routing(tokens, active, ids=None):
    ids = np.stack([RNG.permutation(EXPERTS)[:active] for _ in range(tokens)]) if ids is None else np.asarray(ids)
    weights = RNG.random(ids.shape)
    return moe.Routing(jnp.zeros((len(ids), EXPERTS)), jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("limit", [0, moe.GATHER_BYTES], ids=["blocked", "gathered"])
@pytest.mark.parametrize(
    ("tokens", "active", "ids"),
    [
        (1, 1, None),
        (5, 3, None),
        (200, 2, None),
        (33, 8, None),
        (70, 1, [[3]] * 70),  # one expert takes every token, in more than one block
        (4, 2, [[0, 7]] * 4),  # the first and the last, nothing between
    ],
)
def test_experts_match_a_loop(monkeypatch, tokens, active, ids, limit, layer):
    monkeypatch.setattr(moe, "GATHER_BYTES", limit)
    x = RNG.normal(size=(tokens, WIDTH))
    r = routing(tokens, active, ids)
    got = moe.experts(jnp.asarray(x, jnp.float32), r, GATE_UP, DOWN, layer=layer, numerics=NUMERICS)
    want = plain(x, np.asarray(r.ids), np.asarray(r.weights), layer)
    assert golden.row_error(got, want) < 1e-5


def test_unused_experts_get_no_gradient(monkeypatch):
    monkeypatch.setattr(moe, "GATHER_BYTES", 0)
    x = jnp.asarray(RNG.normal(size=(12, WIDTH)), jnp.float32)
    r = routing(12, 1, [[2]] * 6 + [[5]] * 6)
    grad = jax.grad(lambda w: moe.experts(x, r, w, DOWN, layer=1, numerics=NUMERICS).sum())(GATE_UP)
    used = np.abs(np.asarray(grad)).sum((2, 3)) > 0
    assert np.isfinite(np.asarray(grad)).all()
    np.testing.assert_array_equal(np.flatnonzero(used[1]), [2, 5])
    assert not used[0].any()


@pytest.mark.parametrize("change", [{"norm_topk_prob": False}, {"routed_scaling_factor": 2.5}])
def test_every_routing_field_counts(change):
    lm = golden.language_model("T1")
    weights = {name: param.get_value() for name, param in lm.model.stacks.items()}
    router = lm.model.blocks[2].mlp.router
    other = Flint(dataclasses.replace(lm.config, **change), weights, NUMERICS).blocks[2].mlp.router
    x = jnp.asarray(RNG.normal(size=(4, lm.config.hidden_size)), jnp.float32)
    base, changed = router(x), other(x)
    np.testing.assert_array_equal(base.ids, changed.ids)
    scores = 1 / (1 + np.exp(-np.take_along_axis(np.asarray(base.logits), np.asarray(base.ids), -1)))
    want = scores if "norm_topk_prob" in change else 2.5 * scores / scores.sum(-1, keepdims=True)
    np.testing.assert_allclose(changed.weights, want, rtol=1e-5)


def test_serving_breaks_ties_by_lowest_index():
    lm = golden.language_model("T1", "serving")
    router = lm.model.blocks[2].mlp.router
    ids = np.asarray(router(jnp.zeros((3, lm.config.hidden_size), jnp.float32)).ids)
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 3)
