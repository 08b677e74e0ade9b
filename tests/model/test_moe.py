"""The two ways to run routed experts agree with each other and with a plain loop; every routing field counts."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flint_jax import moe
from flint_jax.model import Flint, Router
from flint_jax.numerics import Numerics
from pallas_kernels import aot, device
from pallas_kernels.moe_gemm import reference as moe_gemm_reference
from pallas_kernels.nvfp4 import Packed
from pallas_kernels.testing import random_tiles, row_error
from tests.compiled import printed
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


def stored(form):
    """(gate_up, down) of LAYERS layers, 128 wide, as a checkpoint or the kernels keep them."""
    if form == "packed":
        codes = [RNG.integers(0, 256, (LAYERS, EXPERTS, rows, 64), dtype=np.uint8) for rows in (256, 128)]
        scales = [RNG.integers(0x30, 0x48, (LAYERS, EXPERTS, rows, 8), dtype=np.uint8) for rows in (256, 128)]
        segments = (128, 128), (128,)
        return tuple(
            Packed(jnp.asarray(c), jnp.asarray(s), jnp.asarray(RNG.random((LAYERS, EXPERTS, len(g))) / 20, "f4"), g)
            for c, s, g in zip(codes, scales, segments, strict=True)
        )
    if form == "plain":
        return tuple(jnp.asarray(RNG.normal(size=(LAYERS, EXPERTS, r, 128)) / 11, jnp.float32) for r in (256, 128))
    nvfp4 = form == "nvfp4 tiles"
    return tuple(
        random_tiles(jax.random.key(i), (LAYERS, EXPERTS), rows, 128, nvfp4=nvfp4, paired=i == 0)
        for i, rows in enumerate((256, 128))
    )


def loop(x, ids, weights, gate_up, down, layer):
    """``plain`` for any kind of weights, in float64."""

    def values(stack, e):
        one = stack[layer, e]
        if isinstance(one, jax.Array):
            return np.asarray(one, np.float64)
        return np.asarray(one.values(jnp.float32), np.float64) * np.asarray(one.row_scale(), np.float64)[:, None]

    out = np.zeros(x.shape)
    for m, a in np.ndindex(*ids.shape):
        gate, up = np.split(values(gate_up, ids[m, a]) @ x[m], 2)
        out[m] += weights[m, a] * (values(down, ids[m, a]) @ (gate / (1 + np.exp(-gate)) * up))
    return out


ROUTINGS = {
    "even": [[i % 8, (i + 3) % 8] for i in range(40)],
    "uneven": [[0 if i % 4 else 5, 1 + i % 7] for i in range(40)],
    "all tokens to one": [[6]] * 40,
    "the first and the last": [[0, 7]] * 20,
    "one more than a block each": [[i % 8] for i in range(72)],  # 16 blocks of 8; no routing needs more than 17
}


@pytest.mark.parametrize("form", ["plain", "packed", "nvfp4 tiles", "bf16 tiles"])
def test_groups_of_blocks_match_a_loop(form):
    weights = stored(form)
    numerics = Numerics("serving", "float32")
    run = jax.jit(
        lambda x, r, weights, cut: moe.experts(x, r, *weights, layer=1, numerics=numerics, cut=cut), static_argnums=3
    )
    for ids in ROUTINGS.values():
        r = routing(len(ids), len(ids[0]), ids)
        x = RNG.normal(size=(len(ids), 128))
        want = loop(x, np.asarray(r.ids), np.asarray(r.weights), *weights, 1)
        # Groups that do not divide the number of blocks, blocks one by one, all at once; with and without skipping.
        for cut in (moe.Blocks(8, 3), moe.Blocks(16, 1), moe.Blocks(8, 100), moe.Blocks(8, 4, skip=False)):
            got = run(jnp.asarray(x, jnp.float32), r, weights, cut)
            assert golden.row_error(got, want) < 1e-5, (ids[:3], cut)


@pytest.mark.parametrize(("skip", "groups"), [(True, 3), (False, 6)])
def test_groups_that_no_token_needs_are_not_computed(monkeypatch, skip, groups):
    """70 tokens of one expert are 9 blocks of 8; any routing would find room in 17."""
    runs = []

    def counted(gate_up, numerics, activate=moe._activate):
        jax.debug.callback(lambda: runs.append(None))
        return activate(gate_up, numerics)

    monkeypatch.setattr(moe, "_activate", counted)
    x, r = jnp.ones((70, WIDTH), jnp.float32), routing(70, 1, [[3]] * 70)
    moe.experts(x, r, GATE_UP, DOWN, layer=0, numerics=NUMERICS, cut=moe.Blocks(8, 3, skip)).block_until_ready()
    jax.effects_barrier()
    assert len(runs) == groups


def test_rows_of_nobody_and_experts_of_nobody_stay_out_of_sight():
    """A block's spare rows are computed from token 0, spare blocks with expert 0 of layer 0."""
    x = jnp.asarray(RNG.normal(size=(20, WIDTH)), jnp.float32).at[0].set(jnp.nan)
    gate_up = GATE_UP.at[0, 0].set(jnp.nan)
    r = routing(20, 2, [[2, 5]] * 20)
    out = moe.experts(x, r, gate_up, DOWN, layer=1, numerics=NUMERICS, cut=moe.Blocks(8, 3))
    finite = np.isfinite(out).all(1)
    assert finite[1:].all()
    assert not finite[0]


@pytest.mark.parametrize("form", ["plain", "nvfp4 tiles"])
def test_company_does_not_change_a_tokens_bits(form):
    """What scoring's batch_invariant promises needs this: other tokens move it to other rows, blocks and groups."""
    weights = stored(form)
    weights = weights if form != "plain" else tuple(w.astype(jnp.bfloat16) for w in weights)
    numerics = Numerics("serving", "bfloat16")
    run = jax.jit(lambda x, r: moe.experts(x, r, *weights, layer=1, numerics=numerics, cut=moe.Blocks(8, 3)))
    mine, my_ids = RNG.normal(size=128), [4, 1]
    seen = set()
    for _ in range(6):
        x, r = RNG.normal(size=(40, 128)), routing(40, 2)
        place = int(RNG.integers(40))
        x[place] = mine
        r = r._replace(ids=r.ids.at[place].set(jnp.asarray(my_ids)), weights=r.weights.at[place].set(0.5))
        seen.add(np.asarray(run(jnp.asarray(x, jnp.bfloat16), r)[place]).tobytes())
    assert len(seen) == 1


def test_blocks_fit_the_device():
    """A full-size layer: 256 experts of 3 x 2048 x 512 weights, 6 of them a token."""
    size = {"experts": 256, "expert_bytes": 3 * 2048 * 512 * 2, "packed": True}
    with device.assume(device.Device("a GPU", (9, 0), 132, 4.8e12)):
        cuts = [moe.blocks(6 * tokens, **size) for tokens in (16, 512, 2048, 4096, 16384, 1 << 17)]
        training = moe.blocks(6 * 4096, **size, training=1 << 30)
    assert [cut.rows for cut in cuts] == [12, 64, 64, 128, 512, 512]
    assert {cut.group for cut in cuts} == {moe.GROUP_BYTES // size["expert_bytes"]}
    assert training == moe.Blocks(
        64, 1, skip=False
    )  # 640 blocks do not fit into a GiB, and a loop's gradient is simple
    assert moe.blocks(6 * 4096, **size) == moe.Blocks(64, 1)
    small = {"experts": 16, "expert_bytes": 1 << 17}
    assert moe.blocks(1024, **small, packed=True) == moe.Blocks(64, 8)
    assert moe.blocks(1024, **small, packed=False) == moe.Blocks(64, 1)


PROGRAM = """
import jax, jax.numpy as jnp
from flint_jax import moe, moe_bench
from pallas_kernels import aot

def arguments(key):
    routing = moe.Routing(jnp.zeros((2, 512, 256)), jnp.zeros((2, 512, 6), int), jnp.zeros((2, 512, 6)))
    weights = moe_bench.random_experts(key, moe_bench.SIZES["full"], 2, NVFP4)
    return jnp.zeros((512, 2048), jnp.bfloat16), routing, weights

def layer(x, routing, weights):
    return moe_bench.chain(x, routing, weights, 4, moe.Blocks(64, 16))

print(aot.compile_for("sm_90a", layer, *jax.eval_shape(arguments, jax.random.key(0))).as_text())
"""


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.skipif(not aot.available(), reason="the CUDA plugin is not installed")
@pytest.mark.parametrize("nvfp4", [True, False])
def test_a_gpu_unpacks_a_group_once_and_in_bfloat16(nvfp4):
    program = printed(PROGRAM.replace("NVFP4", str(nvfp4)))
    # Of every array that some kernel writes (the operations inside a fusion write none): its type and dimensions.
    written = [
        (kind, np.prod([int(n) for n in dims.split(",")]))
        for kind, dims in re.findall(r"(\w+)\[([\d,]+)\]", " ".join(re.findall(r"= (.*?) fusion\(", program)))
    ]
    gate_up = 16 * 1024 * 2048
    assert max(size for kind, size in written if kind == "f32") < gate_up / 2  # accumulators of 64 rows
    assert sum(size == gate_up for kind, size in written if kind == "bf16") == 1
    products = re.findall(r"= f32\[(16,64,\d+)\]\S* (?:fusion|custom-call)\(", program)
    assert {"16,64,1024", "16,64,2048"} <= set(products)


def dense(gate_up, down, x, r):
    """All experts of one layer on all tokens, in plain jnp: what gradients are held against."""
    total = jnp.zeros_like(x)
    for e in range(EXPERTS):
        gate, up = jnp.split(x @ gate_up[e].T, 2, axis=-1)
        share = jnp.where(r.ids == e, r.weights, 0.0).sum(-1, keepdims=True)
        total += share * ((gate * jax.nn.sigmoid(gate) * up) @ down[e].T)
    return total


@pytest.mark.parametrize("path", ["blocked", "groups", "gathered", "at once", "everywhere"])
def test_experts_without_tokens_get_no_gradient_and_the_others_theirs(monkeypatch, path):
    monkeypatch.setattr(moe, "GATHER_BYTES", moe.GATHER_BYTES if path == "gathered" else 0)
    monkeypatch.setattr(moe, "EVERYWHERE", EXPERTS if path == "everywhere" else 0)
    training = path in ("at once", "everywhere")
    cut = moe.Blocks(8, 3) if path == "groups" else None

    def ours(gate_up, down, x, r, towards):
        with moe.grouped(1 << 30) if training else contextlib.nullcontext():
            return (moe.experts(x, r, gate_up, down, layer=1, numerics=NUMERICS, cut=cut) * towards).sum()

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


@pytest.fixture
def kernels(monkeypatch):
    """A GPU's choice of implementation, with the kernels' references for kernels."""
    monkeypatch.setattr(moe.moe_gemm.mosaic, "gate_up", moe_gemm_reference.gate_up)
    monkeypatch.setattr(moe.moe_gemm.mosaic, "down", moe_gemm_reference.down)
    with device.assume(device.Device("a GPU", (9, 0), 132, 0.0)):
        yield


@pytest.mark.parametrize("form", ["nvfp4 tiles", "bf16 tiles"])
def test_grouped_products_are_the_same_experts(kernels, form):
    """Rows that do not count change nothing for the others; gradients are those of the plain path."""
    gate_up, down = stored(form)
    tokens = 24
    x = jax.random.normal(jax.random.key(5), (tokens, 128), jnp.bfloat16)
    real = jnp.arange(tokens) % 3 != 0
    chosen = routing(tokens, 2)

    def run(x, **how):
        options = {"layer": 1, "numerics": Numerics(), **how}
        return moe.experts(x, chosen, gate_up, down, **options).astype(jnp.float32)

    plain_cut = moe.Blocks(8, 4)
    expected, ours, some = run(x, cut=plain_cut), run(x), run(x, real=real)
    assert row_error(ours, expected) < 4e-3
    np.testing.assert_array_equal(np.asarray(some)[np.asarray(real)], np.asarray(ours)[np.asarray(real)])
    slopes = [jax.grad(lambda x, how=how: run(x, **how).sum())(x) for how in ({}, {"cut": plain_cut})]
    assert row_error(*slopes) < 2e-2
