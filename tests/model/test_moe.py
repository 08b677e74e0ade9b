"""The two ways to run routed experts agree with each other and with a plain loop; every routing field counts."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flint_jax import moe
from flint_jax.model import Flint, Router
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


def dense(gate_up, down, x, r):
    """All experts of one layer on all tokens, in plain jnp: what gradients are held against."""
    total = jnp.zeros_like(x)
    for e in range(EXPERTS):
        gate, up = jnp.split(x @ gate_up[e].T, 2, axis=-1)
        share = jnp.where(r.ids == e, r.weights, 0.0).sum(-1, keepdims=True)
        total += share * ((gate * jax.nn.sigmoid(gate) * up) @ down[e].T)
    return total


@pytest.mark.parametrize("path", ["blocked", "gathered", "at once", "everywhere"])
def test_experts_without_tokens_get_no_gradient_and_the_others_theirs(monkeypatch, path):
    monkeypatch.setattr(moe, "GATHER_BYTES", moe.GATHER_BYTES if path == "gathered" else 0)
    monkeypatch.setattr(moe, "EVERYWHERE", EXPERTS if path == "everywhere" else 0)
    training = path in ("at once", "everywhere")

    def ours(gate_up, down, x, r, towards):
        with moe.grouped(1 << 30) if training else contextlib.nullcontext():
            return (moe.experts(x, r, gate_up, down, layer=1, numerics=NUMERICS) * towards).sum()

    def plainly(gate_up, down, x, r, towards):
        return (dense(gate_up[1], down[1], x, r) * towards).sum()

    ours, plainly = (jax.jit(jax.grad(f, (0, 1, 2))) for f in (ours, plainly))
    x, towards = (jnp.asarray(RNG.normal(size=(16, WIDTH)), jnp.float32) for _ in range(2))
    for ids in (
        [[2, 5]] * 16,
        [[0, 2]] * 16,  # 16, 0, 16, 0 ... tokens an expert: none between them, none at the end
        [[6, 7]] * 16,  # only the last ones have any
        [[0, 7]] * 16,  # all between have none
        [[3, 4], [4, 6]] * 8,  # the first and the last have none
    ):
        r = routing(16, 2, ids)
        got, want = ours(GATE_UP, DOWN, x, r, towards), plainly(GATE_UP, DOWN, x, r, towards)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, atol=1e-4 * np.abs(w).max())
        for g in got[:2]:
            used = np.asarray(g).any((2, 3))  # exactly 0 elsewhere, so NaN is used, too
            np.testing.assert_array_equal(np.flatnonzero(used[1]), np.unique(ids))
            assert not used[0].any()


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_every_routing_field_counts(renormalise, factor):
    """Renormalising and scaling are independent of each other: all four ways."""
    lm = golden.language_model("T1")
    weights = {name: param.get_value() for name, param in lm.model.stacks.items()}
    router = lm.model.blocks[2].mlp.router
    config = dataclasses.replace(lm.config, norm_topk_prob=renormalise, routed_scaling_factor=factor)
    other = Flint(config, weights, NUMERICS).blocks[2].mlp.router
    x = jnp.asarray(RNG.normal(size=(4, lm.config.hidden_size)), jnp.float32)
    base, changed = router(x), other(x)
    np.testing.assert_array_equal(base.ids, changed.ids)
    scores = 1 / (1 + np.exp(-np.take_along_axis(np.asarray(base.logits), np.asarray(base.ids), -1)))
    want = factor * (scores / scores.sum(-1, keepdims=True) if renormalise else scores)
    np.testing.assert_allclose(changed.weights, want, rtol=1e-5)


@pytest.mark.parametrize("best", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_thousandth_decides_between_experts(best, dtype):
    """8 and 8 + 2^-10 are one number in bfloat16. In transformers' numerics the router is float32 whatever the model
    is; serving runtimes round its logits to the model's dtype, and of equals the first wins.
    """
    lm = golden.language_model("T1")
    config = dataclasses.replace(lm.config, num_experts_per_tok=1)
    weight = np.zeros((1, config.num_experts, config.hidden_size), np.float32)
    weight[0, :2, 0] = 8.0
    weight[0, best, 1] = 2.0**-9
    x = jnp.zeros((1, config.hidden_size), dtype).at[0, :2].set(jnp.asarray([1.0, 0.5], dtype))

    def chosen(mode):
        return int(Router(config, Numerics(mode, dtype), nnx.Param(jnp.asarray(weight)), 0, "")(x).ids[0, 0])

    assert chosen("transformers") == best
    assert chosen("serving") == (best if dtype == "float32" else 0)


def test_serving_breaks_ties_by_lowest_index():
    lm = golden.language_model("T1", "serving")
    router = lm.model.blocks[2].mlp.router
    ids = np.asarray(router(jnp.zeros((3, lm.config.hidden_size), jnp.float32)).ids)
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 3)
