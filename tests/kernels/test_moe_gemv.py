"""The mixture-of-experts kernels' programs, executed on the CPU, against the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device, dispatch, emulate, layout, testing
from pallas_kernels.moe_gemv import (
    Experts,
    block,
    cases,
    experts,
    mosaic,
    mosaic_block,
    mosaic_select,
    new_exchange,
    reference,
    router,
)
from pallas_kernels.nvfp4_gemv import Norm

FEW_CORES = device.Device("emulated", (9, 0), 66, 0.0)
WIDE, D, E, A, F, S, LAYERS = 2048, 1024, 64, 3, 128, 1024, 2


def random_tiles(rng, lead, rows, columns, *, nvfp4, paired) -> layout.Tiles:
    """Like ``testing.random_tiles``, from numpy's faster bits."""
    width = layout.NVFP4_WORDS if nvfp4 else layout.BF16_WORDS
    words = rng.integers(1 << 32, size=(*lead, rows // 16, columns // 128, width), dtype=np.uint32)
    if nvfp4:
        words[..., 256:] = (words[..., 256:] & 0x0F0F0F0F) + 0x30303030
    else:
        words = (words & 0x807F807F) | 0x3F003F00  # 0.5 to 1 with either sign
    segments = (rows // 2, rows // 2) if paired else (rows,)
    scale = rng.uniform(0.5, 1.5, (*lead, len(segments))) * columns**-0.5 * (0.2 if nvfp4 else 1.4)
    scale = layout.pad_scale(jnp.asarray(scale, jnp.float32))
    return layout.Tiles(jnp.asarray(words.view(np.int32)), scale, segments, paired)


def expert_weights(seed, nvfp4=True, *, model=D, width=F, shared=S, count=E) -> Experts:
    rng = np.random.default_rng(seed)
    tiles = functools.partial(random_tiles, rng, nvfp4=nvfp4)
    return Experts(
        gate_up=tiles((LAYERS, count), 2 * width, model, paired=True),
        down=tiles((LAYERS, count), model, width, paired=False),
        shared_gate_up=tiles((LAYERS,), 2 * shared, model, paired=True),
        shared_down=tiles((LAYERS,), model, shared, paired=False),
    )


def emulated(function, *args, **kwargs):
    with emulate.active(), device.assume(FEW_CORES):
        return function(*args, **kwargs)


def compare(actual, expected, tolerance=4e-3):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert testing.row_error(a, e) < tolerance


@pytest.mark.parametrize(("tokens", "add"), [(1, True), (1, False), (3, True), (16, True)])
def test_router(tokens, add):
    keys = jax.random.split(jax.random.key(tokens), 4)
    x, residual = (jax.random.normal(k, (tokens, WIDE), jnp.bfloat16) for k in keys[:2])
    weight = jax.random.normal(keys[2], (LAYERS, E, WIDE), jnp.bfloat16) * jnp.bfloat16(0.02)
    norm = Norm(jax.random.normal(keys[3], (5, WIDE), jnp.bfloat16), 4, residual if add else None)
    actual, expected = emulated(mosaic.router, x, weight, 1, norm), reference.router(x, weight, 1, norm)
    compare(actual, expected)
    if add:
        np.testing.assert_array_equal(np.asarray(actual.residual), np.asarray(expected.residual))


@pytest.mark.parametrize(
    ("tokens", "nvfp4", "model"),
    [(1, True, WIDE), (2, True, D), (9, True, D), (1, False, D), (3, False, D)],
)
def test_experts(tokens, nvfp4, model):
    """66 blocks: each takes several tiles, not all the same number, and up to two of the shared expert."""
    keys = jax.random.split(jax.random.key(tokens), 3)
    x = jax.random.normal(keys[0], (tokens, model), jnp.bfloat16)
    logits = jax.random.normal(keys[1], (tokens, E), jnp.bfloat16)
    weights = expert_weights(1, nvfp4, model=model)
    actual = emulated(mosaic.experts, x, logits, weights, 1, active=A)
    expected = reference.experts(x, logits, weights, 1, active=A)
    np.testing.assert_array_equal(np.asarray(actual.ids), np.asarray(expected.ids))
    compare(actual, expected)


def test_a_layer_known_only_on_the_device():
    """The same bits as for a layer known at trace time, whose weights are given to the kernels as slices."""
    keys = jax.random.split(jax.random.key(8), 5)
    x, residual = (jax.random.normal(k, (1, WIDE), jnp.bfloat16) for k in keys[:2])
    router_weight = jax.random.normal(keys[2], (LAYERS, E, WIDE), jnp.bfloat16) * jnp.bfloat16(0.02)
    norm = Norm(jax.random.normal(keys[3], (5, WIDE), jnp.bfloat16), 4, residual)
    weights = expert_weights(2, model=WIDE)
    results = []
    for layer, norm_layer in ((1, 4), (jnp.int32(1), jnp.int32(4))):
        routed = emulated(mosaic.router, x, router_weight, layer, dataclasses.replace(norm, layer=norm_layer))
        results.append((routed, emulated(mosaic.experts, x, routed.logits, weights, layer, active=A)))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_shared_expert_that_does_not_split_into_pieces():
    """One token, but the shared expert's columns are no multiple of an expert's: its own path."""
    keys = jax.random.split(jax.random.key(5), 3)
    x, logits = jax.random.normal(keys[0], (1, D), jnp.bfloat16), jax.random.normal(keys[1], (1, E), jnp.bfloat16)
    weights = expert_weights(1, width=384, shared=1024)
    actual = emulated(mosaic.experts, x, logits, weights, 0, active=1)
    compare(actual, reference.experts(x, logits, weights, 0, active=1))


# -- a block in one launch -------------------------------------------------------------------------------------------

MANY_CORES = device.Device("emulated", (9, 0), 64, 0.0)  # as many as the blocks of 1024 columns
BLOCK = {"width": 128, "shared": 512, "count": 128}


@functools.cache
def block_inputs(active, width):
    """(x, router weight, norm, weights) for calls of ``block``, router logits far apart."""
    keys = jax.random.split(jax.random.key(active), 4)
    x, residual = (jax.random.normal(k, (1, D), jnp.bfloat16) for k in keys[:2])
    weight = jax.random.normal(keys[2], (LAYERS, 128, D), jnp.bfloat16) * jnp.bfloat16(0.05)
    norm = Norm(jax.random.normal(keys[3], (5, D), jnp.bfloat16), 4, residual)
    return x, weight, norm, expert_weights(active, model=D, width=width, shared=512, count=128)


def emulated_block(inputs, exchange, layer=1, active=4):
    with emulate.active(), device.assume(MANY_CORES):
        return mosaic.block(*inputs, layer, exchange, active=active)


def fresh_exchange(active=4, width=128):
    return np.asarray(new_exchange(D, 128, active, width, 512))


@pytest.mark.parametrize(("active", "width"), [(4, 128), (6, 256), (3, 128)])
def test_block(active, width):
    """A routed tile for each block; three, as the model has; blocks without one, and a warp without a down item."""
    inputs = block_inputs(active, width)
    actual = emulated_block(inputs, fresh_exchange(active, width), active=active)
    expected = reference.block(*inputs, 1, None, active=active)
    np.testing.assert_array_equal(np.asarray(actual.ids), np.asarray(expected.ids))
    np.testing.assert_array_equal(np.asarray(actual.residual), np.asarray(expected.residual))
    compare(actual._replace(exchange=None), expected)


@pytest.mark.parametrize("count", [0, 7, 0xFFFFFFFE])
def test_an_exchange_serves_call_after_call(count):
    """Whatever the last launch left there, also when the count wraps, and words that look like results."""
    inputs = block_inputs(4, 128)
    other = (inputs[0] * jnp.bfloat16(-2), *inputs[1:])
    exchange = np.full_like(fresh_exchange(), np.uint32(count).astype(np.int32))
    for i in range(4):
        given = inputs if i % 2 else other
        actual = emulated_block(given, exchange, layer=i // 2)
        compare(actual.out, reference.block(*given, i // 2, None, active=4).out)
        exchange = actual.exchange
        assert np.uint32(exchange.view(np.uint32)[0]) == np.uint32((count + i + 1) % 2**32)
    tags = exchange.view(np.uint32)[mosaic_block.COUNT_BYTES // 4 + 1 :: 2]
    assert (tags == exchange.view(np.uint32)[0]).all()  # every place was written: none can carry an old tag


def test_a_launch_that_finds_its_tag_is_noticed():
    """A count that was not moved on would let blocks read the last launch's words."""
    inputs = block_inputs(4, 128)
    exchange = emulated_block(inputs, fresh_exchange()).exchange
    exchange[0] -= 1
    with pytest.raises(AssertionError, match="carries already"):
        emulated_block(inputs, exchange)


def test_what_a_block_in_one_launch_does_not_take_goes_through_three():
    x, weight, norm, weights = block_inputs(4, 128)
    exchange = fresh_exchange()
    two = jnp.concatenate([x, x])
    few = device.Device("emulated", (9, 0), 63, 0.0)
    plain = expert_weights(1, nvfp4=False, model=D, width=128, shared=512, count=128)
    for cores, message, arguments in [
        (few, "64 blocks that wait for each other on 63", (x, weight, norm, weights)),
        (MANY_CORES, "2 tokens", (two, weight, dataclasses.replace(norm, residual=two), weights)),
        (MANY_CORES, "NVFP4 False", (x, weight, norm, plain)),
        (MANY_CORES, "no residual", (x, weight, dataclasses.replace(norm, residual=None), weights)),
        (MANY_CORES, "64 experts for 64 blocks", (x, weight[:, :64], norm, expert_weights(1, shared=512))),
    ]:
        given = np.zeros(mosaic_block.exchange_words(D, arguments[1].shape[1], 4, 128, 512), np.int32)
        with device.assume(cores):
            with pytest.raises(dispatch.KernelUnsupported, match=message):
                mosaic.block(*arguments, 1, given, active=4)
            if arguments[0] is two:
                with emulate.active():
                    result = block(*arguments, 1, given, active=4)
                compare(result.out, reference.block(*arguments, 1, given, active=4).out)
                np.testing.assert_array_equal(result.exchange, given)
    with device.assume(MANY_CORES), pytest.raises(ValueError, match="exchange buffer"):
        mosaic.block(x, weight, norm, weights, 1, exchange[1:], active=4)


# -- selection -------------------------------------------------------------------------------------------------------


def selected(logits, active):
    from pallas_kernels import emit

    tokens, count = logits.shape

    def program(logits, ids, mix, shared):
        lane = emit.Lane()
        with emit.when(lane.warp < tokens):
            best = mosaic_select.select(lane, logits + lane.warp * (count * 2), count, active)
            chosen, weights = [mosaic_select.expert_of(key) for key in best], mosaic_select.weights_of(best)
            with emit.when(lane.lane.equals(0)):
                for rank in range(active):
                    at = lane.warp * (active * 4)
                    emit.store(ids + at, chosen[rank], offset=4 * rank)
                    emit.store_float(mix + at, weights[rank], offset=4 * rank)

    out = [jax.ShapeDtypeStruct((tokens, active), d) for d in (jnp.int32, jnp.float32)]
    with emulate.active():
        return emit.kernel(program, name="select", out=out, shared=[4], grid=1, warps=4)(logits)


def test_selection_ties_go_to_the_lowest_expert_and_zero_beats_minus_zero():
    logits = np.full((3, 256), -1.0, np.float32)
    logits[0, [200, 7, 31, 32]] = 2.0
    logits[1] = -0.0
    logits[1, 250] = 0.0
    logits[2, [0, 255]] = 3.0, np.inf
    logits = jnp.asarray(logits, jnp.bfloat16)
    ids, mix = selected(logits, 6)
    expected_ids, expected_mix = reference.select(logits, 6)
    np.testing.assert_array_equal(ids, np.asarray(expected_ids))
    np.testing.assert_array_equal(ids, [[7, 31, 32, 200, 0, 1], [250, 0, 1, 2, 3, 4], [255, 0, 1, 2, 3, 4]])
    np.testing.assert_allclose(mix, np.asarray(expected_mix), rtol=2**-8)


def test_selection_weights_are_the_contract():
    """s / (sum s + 1e-20), rounded to bfloat16, against float64."""
    logits = jax.random.normal(jax.random.key(0), (4, 256)).astype(jnp.bfloat16) * jnp.bfloat16(3)
    ids, mix = selected(logits, 6)
    chosen = np.take_along_axis(np.asarray(logits, np.float64), ids.astype(np.int64), -1)
    np.testing.assert_array_equal(chosen, -np.sort(-np.asarray(logits, np.float64), -1)[:, :6])
    score = 1 / (1 + np.exp(-chosen))
    exact = score / score.sum(-1, keepdims=True)
    np.testing.assert_array_equal(mix, exact.astype(jnp.bfloat16).astype(np.float32))


def test_a_row_of_nans_selects_existing_experts():
    ids, mix = selected(jnp.full((1, 64), jnp.nan, jnp.bfloat16), 6)
    assert (ids < 64).all()
    assert np.isnan(mix).all()


@pytest.mark.parametrize("count", [64, 256, 1024])
def test_selection_among_any_number_of_experts(count):
    """Sorted in the lane where a lane has few, searched where it has many; many equal logits."""
    rng = np.random.default_rng(count)
    logits = jnp.asarray(rng.integers(-3, 3, (4, count)), jnp.bfloat16)
    ids, mix = selected(logits, 8)
    expected_ids, expected_mix = reference.select(logits, 8)
    np.testing.assert_array_equal(ids, np.asarray(expected_ids))
    np.testing.assert_allclose(mix, np.asarray(expected_mix), rtol=2**-8)


# -- roundings -------------------------------------------------------------------------------------------------------


def test_rounding_is_where_the_contract_has_it():
    """One nonzero activation: the first products are exact, so wherever they round otherwise, many outputs differ."""
    x = jnp.zeros((1, D), jnp.bfloat16).at[0, 0].set(1.0)
    logits = jnp.zeros((1, E), jnp.bfloat16).at[0, 0].set(1.0)
    weights = expert_weights(3, nvfp4=False)
    actual = emulated(mosaic.experts, x, logits, weights, 0, active=A)
    expected = reference.experts(x, logits, weights, 0, active=A)
    # The down products add in different orders, which moves a few sums across the edge between two bfloat16 numbers.
    assert float(np.mean(np.asarray(actual.out) != np.asarray(expected.out))) < 0.02


# -- large stacks ----------------------------------------------------------------------------------------------------


def test_addresses_beyond_four_gibibytes():
    """A stack of 5.4 GB (zeros that the system never materialises) whose last expert alone is filled."""
    count, width = 4096, 128
    bytes_per_expert = (D // 16) * (width // 128) * layout.NVFP4_WORDS * 4
    layers = 1 + (5 << 30) // (count * bytes_per_expert)
    x = jax.random.normal(jax.random.key(1), (1, D), jnp.bfloat16)
    logits = np.full((1, count), -1.0, np.float32)
    logits[0, -1] = 9.0
    logits = jnp.asarray(logits, jnp.bfloat16)
    keys = jax.random.split(jax.random.key(2), 4)
    chosen = {
        "gate_up": testing.random_tiles(keys[0], (1,), 2 * width, D, paired=True),
        "down": testing.random_tiles(keys[1], (1,), D, width),
    }
    shared = {
        "shared_gate_up": testing.random_tiles(keys[2], (1,), 256, D, paired=True),
        "shared_down": testing.random_tiles(keys[3], (1,), D, 128),
    }
    big = {}
    for name, tiles in chosen.items():
        words = np.zeros((layers, count, *tiles.words.shape[1:]), np.int32)
        words[-1, -1] = np.asarray(tiles.words[0])
        scale = np.zeros((layers, count, tiles.global_scale.shape[-1]), np.float32)
        scale[-1, -1] = np.asarray(tiles.global_scale[0])
        big[name] = layout.Tiles(words, scale, tiles.segments, tiles.paired)
    assert big["down"].words.nbytes > 1 << 32
    tail = {
        name: layout.Tiles(
            np.broadcast_to(np.asarray(t.words), (layers, *t.words.shape[1:])),
            np.broadcast_to(np.asarray(t.global_scale), (layers, t.global_scale.shape[-1])),
            t.segments,
            t.paired,
        )
        for name, t in shared.items()
    }
    actual = emulated(mosaic.experts, x, logits, Experts(**big, **tail), jnp.int32(layers - 1), active=1)
    assert actual.ids[0, 0] == count - 1
    small = {name: jax.tree.map(lambda a: a[None], tiles) for name, tiles in chosen.items()}
    expected = reference.experts(x, logits[:, -1:], Experts(**small, **shared), 0, active=1)
    compare(actual.out, expected.out)


@pytest.mark.parametrize(("index", "stride"), [(12031, 1_179_648), (3_000_000, 18_432), (0xFFFFFFFF, 1 << 20)])
def test_an_address_is_computed_in_64_bits(index, stride):
    """What ``emit`` itself (not its emulation) makes of a large stack: constants folded by the compiler."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir, passmanager
    from jaxlib.mlir.dialects import arith, func

    from pallas_kernels import emit

    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        wide = ir.IntegerType.get_signless(64)
        with ir.InsertionPoint(module.body):

            @func.FuncOp.from_py_func()
            def address():
                base = arith.constant(wide, 1 << 40)
                return emit.Address(base, False).index(emit.Int(index), stride).raw

        passmanager.PassManager.parse("builtin.module(canonicalize)").run(module.operation)
        assert f"arith.constant {(1 << 40) + index * stride} : i64" in str(module)


# -- dispatch --------------------------------------------------------------------------------------------------------


def test_what_the_kernels_do_not_take_runs_on_the_reference():
    keys = jax.random.split(jax.random.key(7), 3)
    x = jax.random.normal(keys[0], (17, D), jnp.bfloat16)
    logits = jax.random.normal(keys[1], (17, E), jnp.bfloat16)
    weights = expert_weights(1)
    with pytest.raises(dispatch.KernelUnsupported, match="17 tokens"):
        mosaic.experts(x, logits, weights, 0, active=A)
    with device.assume(FEW_CORES):
        assert experts(x, logits, weights, 0, active=A).out.shape == (17, D)
    plain = expert_weights(1, nvfp4=False)
    mixed = Experts(weights.gate_up, weights.down, plain.shared_gate_up, plain.shared_down)
    with pytest.raises(dispatch.KernelUnsupported, match="different formats"):
        mosaic.experts(x[:1], logits[:1], mixed, 0, active=A)
    norm = Norm(jnp.ones((1, D), jnp.bfloat16), 0)
    with pytest.raises(dispatch.KernelUnsupported, match="17 tokens"):
        mosaic.router(x, jnp.zeros((1, E, D), jnp.bfloat16), 0, norm)
    with device.assume(FEW_CORES):
        assert router(x, jnp.zeros((1, E, D), jnp.bfloat16), 0, norm).logits.shape == (17, E)


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_the_gpu_beyond_four_gibibytes():
    """The model's widths, 24 layers (7.2 and 3.6 GB): the first and the last layer, twice the same bits."""
    weights = cases.random_experts(jax.random.key(0), 24, True)
    assert weights.gate_up.words.nbytes > 1 << 32
    for tokens in (1, 3, 16):
        keys = jax.random.split(jax.random.key(tokens))
        x = jax.random.normal(keys[0], (tokens, cases.D), jnp.bfloat16)
        logits = jax.random.normal(keys[1], (tokens, cases.E), jnp.bfloat16)
        for layer in (0, 23):
            call = jax.jit(functools.partial(experts, layer=layer, active=cases.ACTIVE))
            plain = jax.jit(functools.partial(reference.experts, layer=layer, active=cases.ACTIVE))
            with dispatch.force("kernels"):
                actual, again = call(x, logits, weights), call(x, logits, weights)
            expected = plain(x, logits, weights)
            np.testing.assert_array_equal(np.asarray(actual.ids), np.asarray(expected.ids))
            compare(actual, expected)
            np.testing.assert_array_equal(np.asarray(actual.out), np.asarray(again.out))


@pytest.mark.gpu
def test_on_the_gpu_a_block_in_one_launch():
    """2,000 launches on one exchange buffer whose count wraps: the same bits every time."""
    case = cases.block_case(1)
    *inputs, exchange = jax.jit(case.make)(jax.random.key(0))

    @jax.jit
    def run(exchange, inputs):  # the weights are arguments: 4 GB of them captured as constants stall the compiler
        def body(exchange, _):
            result, exchange = case.run(1, *inputs, exchange)
            return exchange, result.out

        return jax.lax.scan(body, exchange, None, length=2000)

    with dispatch.force("kernels"):
        exchange, outs = run(jnp.full_like(exchange, -1000), inputs)
    assert int(exchange[0]) == 1000
    outs = np.asarray(outs)
    np.testing.assert_array_equal(outs, np.broadcast_to(outs[:1], outs.shape))
    compare(outs[0], jax.jit(functools.partial(case.reference, 1))(*inputs, exchange)[0].out)


@pytest.mark.gpu
def test_on_the_gpu_ties_and_special_logits():
    logits = np.full((3, 256), -1.0, np.float32)
    logits[0, [200, 7, 31, 32]] = 2.0
    logits[1] = -0.0
    logits[1, 250] = 0.0
    logits[2, [0, 255]] = 3.0, 1e38
    logits = jnp.asarray(logits, jnp.bfloat16)
    weights = cases.random_experts(jax.random.key(0), 1, True)
    with dispatch.force("kernels"):
        found = jax.jit(functools.partial(experts, layer=0, active=6))(
            jnp.ones((3, 2048), jnp.bfloat16), logits, weights
        )
    np.testing.assert_array_equal(
        np.asarray(found.ids), [[7, 31, 32, 200, 0, 1], [250, 0, 1, 2, 3, 4], [255, 0, 1, 2, 3, 4]]
    )
    np.testing.assert_allclose(np.asarray(found.weights), np.asarray(reference.select(logits, 6)[1]), rtol=2**-8)
