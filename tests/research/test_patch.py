"""Patches do what the same change of weights or configuration does, where there is one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flint_jax import RequestError, research
from flint_jax.model import Flint
from flint_jax.research.capture import _run
from tests.research import small


def run(patch=None, patterns=(), **options):
    return research.capture(small.model(), small.TOKENS, patterns, patch=patch, **options)


def changed(config=None, **leaves):
    """Logits of a model with another configuration or other stacks."""
    other = Flint(config or small.CONFIG, small.weights() | leaves, small.model().numerics)
    return small.plain(other)


def test_putting_back_what_was_there_changes_nothing():
    names = [
        "blocks.*.pre",
        "blocks.1.attn.q",
        "blocks.1.mlp.router.ids",
        "blocks.2.mlp.experts",
        "blocks.1.attn.probs.3",
    ]
    base = run(patterns=names)
    again = run({name: research.replace(value) for name, value in base.items()})
    small.close(again.logits, base.logits)


def test_sinks_and_window_are_those_of_another_model():
    sinks = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
    patch = {f"blocks.{i}.attn.sinks": research.replace(sinks[i]) for i in range(3)}
    patch["blocks.1.attn.window"] = research.window(3)
    narrow = dataclasses.replace(small.CONFIG, sliding_window=3)
    small.close(run(patch).logits, changed(narrow, sinks=sinks))
    patch = {"blocks.*.attn.window": research.window(None), "blocks.*.attn.sinks": research.replace(-jnp.inf)}
    got = run(patch, ["blocks.1.attn.probs.0"])
    full = dataclasses.replace(small.CONFIG, layer_types=("full_attention",) * 3)
    small.close(got.logits, changed(full, sinks=jnp.full((3, 4), -jnp.inf)))
    probs = np.asarray(got["blocks.1.attn.probs.0"])
    assert (probs[:, 11, :12] > 0).all()
    assert not probs[..., 12].any()


def test_ablations_are_zeroed_weights():
    zeroed = changed(o=small.weights()["o"].at[1].set(0))
    small.close(run({"blocks.1.attn.out": research.ablate()}).logits, zeroed)
    o = small.weights()["o"].at[2, :, 16:32].set(0)  # head 1
    small.close(run({"blocks.2.attn.heads": research.ablate(np.s_[:, :, 1])}).logits, changed(o=o))
    small.close(run({"blocks.1.mlp.shared.out": research.scale(0.5)}).logits,
                changed(shared_down=small.weights()["shared_down"].at[0].multiply(0.5)))  # fmt: skip


def test_experts_forced_and_banned():
    base = run(patterns=["blocks.*.mlp.router.ids", "blocks.*.mlp.router.logits"])
    patch = {
        "blocks.1.mlp.router.choice": [research.ban([0, 3]), research.force([5])],
        "blocks.2.mlp.router.choice": research.force([2, 7]),
    }
    got = run(patch, ["blocks.*.mlp.router.*", "blocks.1.mlp.experts"])
    ids = np.asarray(got["blocks.1.mlp.router.ids"])
    assert (ids == 5).any(-1).all()
    assert not np.isin(ids, [0, 3]).any()
    assert np.isin(np.asarray(base["blocks.1.mlp.router.ids"]), [0, 3]).any()
    assert (np.sort(got["blocks.2.mlp.router.ids"], -1) == [2, 7]).all()
    # Weights follow the chosen experts' own scores.
    score = 1 / (1 + np.exp(-np.take_along_axis(np.asarray(got["blocks.1.mlp.router.logits"]), ids, -1)))
    small.close(got["blocks.1.mlp.router.weights"], score / score.sum(-1, keepdims=True))
    # The other expert is the best of those left.
    left = np.array(base["blocks.1.mlp.router.logits"])
    left[..., [0, 3, 5]] = -np.inf
    assert (ids == left.argmax(-1)[..., None]).any(-1).all()


def test_a_patched_stream_is_what_the_next_norm_sees():
    """Serving norms the unrounded sum; a patch must win over it."""
    model = small.model("nvfp4", "bfloat16", "serving")
    vector = jnp.asarray(np.random.default_rng(3).normal(size=64), jnp.bfloat16)
    name = "blocks.1.mid"
    got = research.capture(
        model, small.TOKENS, ["blocks.1.mlp.input", name], patch={name: research.replace(vector)}, logits=False
    )
    np.testing.assert_array_equal(got[name][0, 3], vector)
    want = model.blocks[1].mlp_norm(vector)
    np.testing.assert_array_equal(got["blocks.1.mlp.input"][1, 5], want)


def test_positions_values_and_kinds():
    base = run(patterns=["embed", "blocks.0.post"])
    vector = np.linspace(-1, 1, 64, dtype=np.float32)
    count = _run._cache_size()
    got = run({"embed": research.add(vector, np.s_[:, 5])}, ["embed"])
    small.close(got["embed"][:, 5] - base["embed"][:, 5], np.tile(vector, (2, 1)))
    np.testing.assert_array_equal(got["embed"][:, :5], base["embed"][:, :5])
    np.testing.assert_array_equal(got.logits[:, :5], base.logits[:, :5])  # causal
    assert np.abs(np.asarray(got.logits[:, 5:] - base.logits[:, 5:])).max() > 0.05
    run({"embed": research.add(2 * vector, np.s_[:, 7])}, ["embed"])
    assert _run._cache_size() == count + 1  # numbers, positions included, compile nothing new
    doubled = run({"embed": research.apply(lambda x: 2 * x)}, ["embed"])
    small.close(doubled["embed"], 2 * base["embed"])
    post = run({"blocks.0.post": research.add(1.0)}, ["blocks.0.post", "blocks.1.pre"])
    small.close(post["blocks.1.pre"], base["blocks.0.post"] + 1)
    small.close(post["blocks.0.post"], base["blocks.0.post"] + 1)


def test_patches_can_be_differentiated():
    """Direction of a steering vector: the derivative against a difference quotient."""
    direction = np.random.default_rng(4).normal(size=64).astype(np.float32)

    def target(amount):
        patch = {"blocks.1.pre": research.add(amount * direction)}
        return run(patch).logits[0, -1, 7]

    slope = float(jax.grad(target)(jnp.float32(0.0)))
    quotient = float(target(jnp.float32(1e-2)) - target(jnp.float32(-1e-2))) / 2e-2
    assert abs(slope - quotient) <= 2e-2 * abs(slope) + 1e-4


def test_what_cannot_work_is_refused():
    for patch, text in [
        ({"blocks.0.attn.window": research.add(1)}, "takes only research.window, got add"),
        ({"embed": research.window(3)}, "takes research.replace, add and the like, got window"),
        ({"blocks.0.lens": research.ablate()}, "captured, not patched; patch blocks.0.post"),
        ({"blocks.1.mlp.router.choice": research.force([1, 2, 3])}, "3 experts forced"),
        ({"blocks.1.mlp.router.choice": research.ban(range(7))}, "7 of 8 banned"),
        ({"blocks.1.mlp.router.choice": [research.ban([1]), research.force([1])]}, "none can be both"),
        ({"blocks.1.mlp.router.choice": research.force([8])}, "expert 8; need 0 to 7"),
        ({"blocks.0.mlp.router.choice": research.force([1])}, "no site is called"),
        ({"embed": research.apply(lambda x: x[:1])}, "need the same shape"),
        ({"embed": research.force([1])}, "research.force is for ...mlp.router.choice"),
        ({"embed": 3.0}, "need research.replace, add and the like, got 3.0"),
    ]:
        with pytest.raises(RequestError, match=text):
            run(patch)
    with pytest.raises(RequestError, match="need whole numbers, slices or masks"):
        research.ablate(np.s_[:, 1.5])
    with pytest.raises(RequestError, match="at least 1 key"):
        research.window(0)
    with pytest.raises(RequestError, match="name at least one expert"):
        research.ban([])
