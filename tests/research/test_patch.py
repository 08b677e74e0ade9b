"""Patches do what the same change of weights or configuration does, where there is one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flint_jax import RequestError, research
from flint_jax.model import Flint
from flint_jax.random_weights import random_weights
from flint_jax.research.capture import _run
from flint_jax.research.names import site_axes
from flint_jax.research.patches import check_fit
from loaders.synthetic import spread
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


# -- beyond the site ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "at", "text"),
    [
        ("blocks.0.post", np.s_[:, 12], r"blocks.0.post is \[B=2, T=12, D=64\]; axis 1 has 12 entries, got 12; need 0"),
        ("blocks.0.post", np.s_[:, -13], "got -13; need 0 to 11, or -1 to -12"),
        ("blocks.0.post", 2, "axis 0 has 2 entries, got 2"),
        ("blocks.0.post", np.s_[..., 64], "axis 2 has 64 entries, got 64"),
        ("blocks.0.post", np.s_[None, :, [3, 99, 4]], "axis 1 has 12 entries, got 99"),
        ("blocks.0.post", np.s_[:, jnp.asarray([3, 20])], "got 20"),
        ("blocks.*.attn.heads", np.s_[:, :, 4], r"blocks.0.attn.heads is .* N=4, H=16\]; axis 2 has 4 entries, got 4"),
        ("blocks.1.attn.k", np.s_[:, :, 2], "axis 2 has 2 entries, got 2"),
        ("blocks.1.attn.probs.3", np.s_[..., 13], r"T\+1=13\]; axis 2 has 13 entries, got 13"),
        ("blocks.1.attn.sinks", 4, r"is \[N=4\]; axis 0 has 4 entries"),
        ("blocks.1.mlp.router.choice", np.s_[..., 8], "axis 2 has 8 entries, got 8"),
        ("blocks.1.mlp.experts", np.s_[:, :, 2], "A=2, D=64"),
        ("logits", np.s_[0, 0, 96], "axis 2 has 96 entries, got 96"),
        ("blocks.0.post", np.s_[:, 12:], "axis 1 has 12 entries, and at = 12: selects none of them"),
        ("blocks.0.post", np.s_[:, 30:20:2], "at = 30:20:2 selects none"),
        ("blocks.0.post", np.s_[0, 0, 0, 0], "at names 4 axes, need at most 3"),
        ("blocks.0.post", np.s_[np.ones((2, 11), bool)], r"a mask at axis 0 is \[2, 11\], need \[2, 12\]"),
        ("blocks.0.post", np.s_[[0, 1], [1, 2, 3]], "the value or at does not fit"),
    ],
)
def test_an_index_beyond_the_site_is_refused(name, at, text):
    """JAX would leave out what is beyond, and the patch would do nothing."""
    for change in (research.add(1.0, at), research.scale(2.0, at), research.ablate(at), research.replace(1.0, at)):
        with pytest.raises(RequestError, match=text):
            run({name: change})


def test_axes_of_sites_are_the_real_ones():
    names = [name for name in research.site_names(small.CONFIG) if not name.endswith(".window")]
    odd = dataclasses.replace(small.CONFIG, shared_expert_intermediate_size=32, intermediate_size=80)
    model = Flint(odd, random_weights(odd, small.model().numerics, weight_format="bf16", spread=spread),
                  small.model().numerics)  # fmt: skip
    found = jax.eval_shape(lambda: dict(research.capture(model, small.TOKENS[:, :7], names)))
    assert {name: tuple(site_axes(odd, name, 2, 7).values()) for name in names} == {
        n: a.shape for n, a in found.items()
    }
    assert site_axes(odd, "blocks.0.attn.window", 2, 7) == {}


def test_the_last_index_masks_and_slices():
    stream = np.random.default_rng(0).normal(size=(2, 12, 64)).astype(np.float32)
    mask = stream[:, :, 0] < 0
    for at in (np.s_[:, 11], np.s_[-2, :, 63], mask, np.s_[:, mask[0]], np.s_[:, 10:99], np.s_[1, mask[1], 5],
               jnp.asarray(mask), np.zeros((2, 12), bool)):  # fmt: skip
        patch = research.add(2.0, at)
        check_fit(patch, "blocks.0.post", site_axes(small.CONFIG, "blocks.0.post", 2, 12))
        want = stream.copy()
        want[np.asarray(at) if isinstance(at, jax.Array) else at] += 2.0
        np.testing.assert_array_equal(patch(jnp.asarray(stream)), want)
    base = run(patterns=["embed"], logits=False)["embed"]
    got = run({"embed": research.ablate(mask)}, ["embed"], logits=False)["embed"]
    np.testing.assert_array_equal(got, np.where(mask[..., None], 0, base))
    with pytest.raises(RequestError, match="mask in at must be known outside jit"):
        jax.jit(lambda m: research.add(2.0, m)(stream))(mask)


def test_positions_may_be_traced():
    """Then nothing is known about them, and those that are there work."""

    def patched(place):
        return run({"embed": research.ablate(np.s_[:, place])}, ["embed"], logits=False)["embed"]

    np.testing.assert_array_equal(jax.jit(patched)(jnp.int32(5)), patched(5))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: research.add(1.0, 2**32), "need whole numbers"),  # as int32 it would be 0
        (lambda: research.add(1.0, np.s_[:, -(2**31) - 1]), "need whole numbers"),
        (lambda: research.add(1.0, True), "need whole numbers"),
        (lambda: research.add(1.0, "x"), "need whole numbers"),
        (lambda: research.add(1.0, [[1], [2, 3]]), "need whole numbers"),
        (lambda: research.add(1.0, np.s_[..., ...]), "only one ..."),
        (lambda: research.add(1.0, np.s_[1:2.5]), "whole numbers in slices"),
        (lambda: research.add(1.0, np.s_[::0]), "a step that is not 0"),
        (lambda: research.add("a"), "need real numbers"),
        (lambda: research.replace(None), "need real numbers"),
        (lambda: research.scale(1j), "need real numbers"),
        (lambda: research.force([1.5]), r"force\(\[1.5\]\): need a list of whole numbers"),
        (lambda: research.ban(3), "need a list of whole numbers"),
        (lambda: research.force([2**32 + 1]), "need a list of whole numbers"),
        (lambda: research.window(2.5), "window = 2.5: need at least 1 key"),
        (lambda: research.window(True), "window = True: need"),
        (lambda: research.apply(3), "need a function"),
        (lambda: run({"embed": research.apply(lambda x: 3)}), r"into int; need the same shape"),
        (lambda: run({"embed": research.add(np.ones(5))}), "the value or at does not fit"),
        (lambda: run({"blocks.1.mlp.router.choice": research.ban([-1, 2])}), "expert -1; need 0 to 7"),
        (lambda: run({"blocks.1.mlp.router.ids": research.replace(8)}), "whole numbers from 0 to 7"),
        (lambda: run({"blocks.1.mlp.router.ids": research.replace(1.5)}), "whole numbers from 0 to 7"),
        (lambda: run({"blocks.1.mlp.router.ids": research.add(1)}), "replace them by"),
        (lambda: run([1]), "patch = .1.: need a dict"),
        (lambda: run(patterns=5), "patterns = 5: need a name"),
        (lambda: run(patterns=[5]), "5 is no name of a site"),
        (lambda: research.capture("model", small.TOKENS), "need a LanguageModel .* got str"),
    ],
)  # fmt: skip
def test_odd_arguments(make, text):
    with pytest.raises(RequestError, match=text):
        make()
