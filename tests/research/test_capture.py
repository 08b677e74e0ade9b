"""Captured values are the right ones, capturing changes nothing, and what is not asked for is not in the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flint_jax.model
from flint_jax import RequestError, research
from flint_jax.research.names import match
from flint_jax.sites import recording
from tests.model import golden
from tests.research import small

EVERYTHING = [n for n in research.site_names(small.CONFIG) if not n.endswith(".window")]


def test_captured_values_are_those_of_transformers():
    """T1.debug.npz and the stored residual stream, to 2e-4 of the largest value (the goldens' own limit)."""
    lm = golden.language_model("T1")
    g = golden.arrays("T1")
    with np.load(golden.FOLDER / "T1.debug.npz") as file:
        debug = dict(file)
    sites = ("attn.{input,v,q,k,heads,out}", "mlp.{input,out,routed}", "mlp.shared.out", "mlp.router.*", "post", "pre")
    names = [f"blocks.*.{p}{n}{s}" for p, ns, s in map(_braces, sites) for n in ns]
    run = research.capture(lm, g["len10.input_ids"], names)
    spelling = {
        "in_norm": "attn.input", "v": "attn.v", "attn_heads": "attn.heads", "attn_out": "attn.out",
        "post_norm": "mlp.input", "mlp_out": "mlp.out", "experts_out": "mlp.routed", "shared_out": "mlp.shared.out",
    }  # fmt: skip
    compared = 0
    for layer, rope in enumerate(lm.config.rope_layers):
        plain = {} if rope else {"q_norm": "attn.q", "k_norm": "attn.k"}  # stored before RoPE
        for theirs, ours in (spelling | plain).items():
            want = debug.get(f"{layer}.{theirs}")
            if want is not None:
                small.close(run[f"blocks.{layer}.{ours}"].reshape(want.shape), want, 2e-4)
                compared += 1
    assert compared >= 50
    small.close(run.stack("blocks.*.mlp.router.logits")[:, 0], debug["router_logits"], 2e-4)
    # "len9" has more stored: the stream after every layer, ids and weights of the routers.
    prompt = golden.prompts("T1")[2]
    run = research.capture(lm, g[f"{prompt}.input_ids"], ["blocks.*.post", "embed", "blocks.*.mlp.router.*"])
    stream = jnp.concatenate([run["embed"], run.stack("blocks.*.post")[:, 0]])
    small.close(stream[:, g[f"{prompt}.hidden_pos"]], g[f"{prompt}.hidden"], 2e-4)
    small.close(
        run.stack("blocks.*.mlp.router.weights")[:, 0, g[f"{prompt}.hidden_pos"]], g[f"{prompt}.topk_weights"], 2e-4
    )
    np.testing.assert_array_equal(run.stack("blocks.*.mlp.router.ids")[:, 0], g[f"{prompt}.topk_ids"])


def _braces(text):
    if "{" not in text:
        return text, [""], ""
    head, rest = text.split("{")
    return head, rest[:-1].split(","), ""


@pytest.mark.parametrize(
    ("weight_format", "dtype", "mode"), [("bf16", "float32", "transformers"), ("nvfp4", "bfloat16", "serving")]
)
def test_capturing_everything_changes_no_bit(weight_format, dtype, mode):
    model = small.model(weight_format, dtype, mode)
    lengths = np.array([12, 7])
    names = EVERYTHING if dtype == "float32" else [n for n in EVERYTHING if "probs" not in n and "lens" not in n]
    run = research.capture(model, small.TOKENS, names, lengths=lengths)
    assert list(run) == names
    want = small.plain(model, lengths=lengths)
    np.testing.assert_array_equal(run.logits, want)
    np.testing.assert_array_equal(run["logits"], want)
    assert all(np.isfinite(np.asarray(a, np.float32)).all() for n, a in run.items() if "choice" not in n)


def test_names_fit_together():
    run = research.capture(small.model(), small.TOKENS, EVERYTHING, lengths=np.array([12, 12]))
    for i in (1, 2):
        np.testing.assert_array_equal(run[f"blocks.{i}.pre"], run[f"blocks.{i - 1}.post"])
        moe = {
            n.removeprefix(f"blocks.{i}.mlp."): np.asarray(a, np.float64) for n, a in run.items() if f"s.{i}.mlp" in n
        }
        small.close(np.einsum("bta,btad->btd", moe["router.weights"], moe["experts"]), moe["routed"])
        small.close(moe["routed"] + moe["shared.out"], moe["out"])
        np.testing.assert_array_equal(moe["input"], moe["shared.input"])
        np.testing.assert_array_equal(moe["router.ids"], np.argsort(-moe["router.logits"], -1, "stable")[..., :2])
    for i in range(3):
        small.close(run[f"blocks.{i}.pre"] + run[f"blocks.{i}.attn.out"], run[f"blocks.{i}.mid"])
        small.close(run[f"blocks.{i}.mid"] + run[f"blocks.{i}.mlp.out"], run[f"blocks.{i}.post"])
        for head in range(4):
            probs = np.asarray(run[f"blocks.{i}.attn.probs.{head}"], np.float64)
            assert probs.shape == (2, 12, 13)
            small.close(probs.sum(-1), np.ones((2, 12)))
            v = np.asarray(run[f"blocks.{i}.attn.v"], np.float64)[:, :, head // 2]
            small.close(np.einsum("bts,bsh->bth", probs[..., :-1], v), run[f"blocks.{i}.attn.heads"][:, :, head])
            assert (probs[..., -1] > 0).all()  # the sink's share
            seen = probs[0, 11, :12] > 0
            assert seen.sum() == (5 if i == 1 else 12)  # the window of block 1
    np.testing.assert_array_equal(run["blocks.2.lens"], run["logits"])
    assert np.abs(np.asarray(run["blocks.0.lens"] - run["logits"])).max() > 0.1


def test_without_a_recorder_the_program_is_the_same(monkeypatch):
    """The traced program with ``site`` in place, idle, and with ``site`` cut out; then one capture, then a patch."""
    graph, state = nnx.split(small.model())

    def trace(recorder=None, extra=()):
        def run(state, tokens):
            found = {}

            def keep(name, value):
                if name in extra:
                    found[name] = value
                return value

            with recording(recorder and keep):
                return nnx.merge(graph, state)(tokens), found

        return jax.make_jaxpr(run)(state, jnp.asarray(small.TOKENS))

    idle = trace()
    asked_nothing = trace(True)
    asked = trace(True, ["blocks.1.attn.q", "blocks.2.mlp.router.ids"])
    with monkeypatch.context() as patch:
        patch.setattr(flint_jax.model, "site", lambda module, name, value: value)
        cut = trace()
    assert str(idle) == str(cut)
    assert str(asked_nothing) == str(cut)
    assert len(asked.eqns) == len(cut.eqns)  # two more outputs, no more work
    assert len(asked.jaxpr.outvars) == len(cut.jaxpr.outvars) + 2


def test_what_is_not_asked_for_is_not_computed():
    """Without logits, blocks above the last captured site are not in the compiled program."""
    from flint_jax.research.capture import _run

    graph, state = nnx.split(small.model())
    tokens, lengths = jnp.asarray(small.TOKENS), jnp.full((2,), 12, jnp.int32)

    def flops(patterns, logits):
        wanted = tuple(match(small.CONFIG, patterns))
        return _run.lower(graph, state, tokens, lengths, {}, wanted, logits).compile().cost_analysis()["flops"]

    low, high = flops(["blocks.0.attn.q"], False), flops(["blocks.2.post"], False)
    assert low < high / 4
    assert high < flops(["blocks.2.post"], True)


def test_patterns():
    names = match(small.CONFIG, ["blocks.*.post", "blocks.1.attn.probs.[01]", "**.ids"])
    assert names == [
        "blocks.0.post", "blocks.1.attn.probs.0", "blocks.1.attn.probs.1", "blocks.1.mlp.router.ids", "blocks.1.post",
        "blocks.2.mlp.router.ids", "blocks.2.post",
    ]  # fmt: skip
    with pytest.raises(RequestError, match=r"no site is called 'blocks.7.attn.q'; near it: blocks"):
        match(small.CONFIG, ["blocks.7.attn.q"])
    with pytest.raises(RequestError, match="can be patched, not captured"):
        research.capture(small.model(), small.TOKENS, ["blocks.0.attn.window"])
    run = research.capture(small.model(), small.TOKENS[0], ["embed"], logits=False)
    assert run.logits is None
    with pytest.raises(RequestError, match="nothing that 'norm' names was captured; captured: embed"):
        run.stack("norm")
    with pytest.raises(KeyError):
        run["norm"]
    mixed = research.capture(small.model(), small.TOKENS[0], ["blocks.0.pre", "blocks.0.attn.q"], logits=False)
    with pytest.raises(RequestError, match=r"blocks.0.pre \[1, 12, 64\], blocks.0.attn.q \[1, 12, 4, 16\]. Name fewer"):
        mixed.stack("blocks.0.**")
    assert mixed.stack("blocks.0.pre").shape == (1, 1, 12, 64)
    assert list(research.capture(small.model(), small.TOKENS[0], "embed", logits=False)) == ["embed"]


@pytest.mark.parametrize(
    ("tokens", "lengths", "what"),
    [
        ([1, 96], None, "token id 96 is outside the vocabulary, 0 to 95"),
        ([1, -1], None, "token id -1 is outside"),
        ([1.5], None, "must be integers, got float64"),
        ("text", None, "must be integers.*lm.encode"),
        ([[1, 2], [3]], None, "rectangle"),
        ([], None, r"T from 1 to 128, got \(1, 0\)"),
        ([[[1]]], None, r"got \(1, 1, 1\)"),
        ([1] * 129, None, r"T from 1 to 128, got \(1, 129\)"),
        ([[1, 2], [3, 4]], [2], "one for each of 2 rows"),
        ([[1, 2], [3, 4]], [2, 3], "from 0 to 2"),
        ([[1, 2]], [-1], "from 0 to 2"),
    ],
)
def test_rows_that_are_none(tokens, lengths, what):
    """A lookup outside the vocabulary or the positions would give numbers all the same."""
    with pytest.raises(RequestError, match=what):
        research.capture(small.model(), tokens, ["embed"], lengths=lengths, logits=False)


def test_padding_may_be_any_number():
    """And under jit tokens and lengths may be traced."""
    rows, lengths = np.array([[1, 2, -100]]), np.array([2])

    def embed(rows, lengths):
        return research.capture(small.model(), rows, ["embed"], lengths=lengths, logits=False)["embed"][:, :2]

    assert (embed(rows, lengths) == jax.jit(embed)(jnp.asarray([[1, 2, 0]]), jnp.asarray(lengths))).all()
