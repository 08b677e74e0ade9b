"""Router statistics and layer-wise KL against the same sums by hand from captured values."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from flint_jax import RequestError, research
from flint_jax.model import Flint
from tests.research import small

LENGTHS = np.array([12, 7])


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def test_router_statistics():
    model = small.model()
    names = ["blocks.*.mlp.router.ids", "blocks.*.mlp.router.logits"]
    run = research.capture(model, small.TOKENS, names, lengths=LENGTHS, logits=False)
    real = np.arange(12) < LENGTHS[:, None]
    once = research.router_statistics(model, [(small.TOKENS, LENGTHS)])
    assert (once.layers, once.tokens) == ((1, 2), 19)
    for n, layer in enumerate(once.layers):
        ids = np.asarray(run[f"blocks.{layer}.mlp.router.ids"])[real]
        chosen = np.zeros((19, 8))
        np.put_along_axis(chosen, ids, 1, axis=1)
        np.testing.assert_array_equal(once.together[n], chosen.T @ chosen)
        np.testing.assert_array_equal(once.counts[n], chosen.sum(0))
        score = 1 / (1 + np.exp(-np.asarray(run[f"blocks.{layer}.mlp.router.logits"], np.float64)[real]))
        share = score / score.sum(-1, keepdims=True)
        small.close(once.token_entropy[n], -(share * np.log(share)).sum(-1).mean())
        load = chosen.sum(0) / chosen.sum()
        small.close(once.load_entropy[n], -sum(p * np.log(p) for p in load if p > 0))
    small.close(once.load.sum(-1), [2, 2])
    twice = research.router_statistics(model, iter([(small.TOKENS, LENGTHS), (small.TOKENS[::-1], LENGTHS[::-1])]))
    assert twice.tokens == 38
    np.testing.assert_array_equal(twice.together, 2 * once.together)
    small.close(twice.token_entropy, once.token_entropy)
    with pytest.raises(RequestError, match="no batch"):
        research.router_statistics(model, [])
    with pytest.raises(RequestError, match="hold no token"):
        research.router_statistics(model, [(small.TOKENS, [0, 0])])


def test_kl_is_that_of_the_lenses():
    a = small.model()
    b = research.with_numerics(a, "serving", "bfloat16")
    assert b.numerics.serving
    found = research.layer_kl(a, b, small.TOKENS, LENGTHS)
    assert found.per_token.shape == (4, 2, 12)
    runs = [research.capture(m, small.TOKENS, ["blocks.*.lens"], lengths=LENGTHS) for m in (a, b)]
    for depth in range(4):
        p, q = (log_softmax(r.logits if depth == 3 else r[f"blocks.{depth}.lens"]) for r in runs)
        want = (np.exp(p) * (p - q)).sum(-1)
        real = np.arange(12) < LENGTHS[:, None]
        np.testing.assert_allclose(found.per_token[depth][real], want[real], atol=1e-5, rtol=1e-3)
        assert not found.per_token[depth][~real].any()
        small.close(found.mean[depth], want[real].mean(), 1e-2)
        small.close(found.max[depth], want[real].max(), 1e-2)  # float32 sums of small differences
    assert found.mean[3] > 1e-5
    assert research.layer_kl(a, a, small.TOKENS, LENGTHS).max.max() == 0


def test_an_isolated_layer_answers_for_itself():
    a = small.model()
    other = small.weights() | {"o": small.weights()["o"].at[1].multiply(1.3)}
    b = Flint(small.CONFIG, other, a.numerics)
    alone = research.layer_kl(a, b, small.TOKENS, isolated=True).mean
    together = research.layer_kl(a, b, small.TOKENS).mean
    assert (alone[[0, 2, 3]] < 1e-6).all()
    assert alone[1] > 1e-3
    small.close(alone[1], together[1], 1e-3)
    assert together[0] < 1e-6
    assert (together[1:] > 1e-3).all()
    short = dataclasses.replace(small.CONFIG, vocab_size=80)
    words = {n: jnp.asarray(w)[:80] if n in ("embed", "head") else w for n, w in small.weights().items()}
    with pytest.raises(RequestError, match=r"differ in vocab_size \(96 and 80\)"):
        research.layer_kl(a, Flint(short, words, a.numerics), small.TOKENS)
