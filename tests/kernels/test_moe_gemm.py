"""Grouped products: the kernels' program, executed on the CPU, against the reference; and the tiles of rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device, emulate, testing
from pallas_kernels.moe_gemm import group, mosaic, natural_order, product_order, reference, tile_rows
from tests.kernels.test_moe_gemv import random_tiles

HOPPER = device.Device("emulated", (9, 0), 3, 0.0)
BLACKWELL = device.Device("emulated", (10, 0), 3, 0.0)
D, F, E, LAYERS = 256, 256, 5, 2


def routing(kind: str, tokens: int, active: int, rng) -> np.ndarray:
    if kind == "spread":
        return np.stack([rng.permutation(E)[:active] for _ in range(tokens)])
    if kind == "one expert":
        return np.broadcast_to(np.arange(active) + 1, (tokens, active))
    ids = np.stack([rng.permutation(E)[:active] for _ in range(tokens)])
    ids[tokens // 2 :] = E  # out of use
    return ids


def operands(seed, kind, tokens, active, rows, nvfp4):
    rng = np.random.default_rng(seed)
    x = product_order(jnp.asarray(rng.normal(size=(tokens, D)), jnp.bfloat16))
    groups = group(jnp.asarray(routing(kind, tokens, active, rng), jnp.int32), E, rows)
    tiles = functools.partial(random_tiles, rng, (LAYERS, E), nvfp4=nvfp4)
    return x, groups, tiles(2 * F, D, paired=True), tiles(D, F, paired=False)


def emulated(function, target, *args):
    with emulate.active(), device.assume(target):
        return np.asarray(function(*args))


def real_rows(groups):
    return (np.arange(groups.rows)[None, :] < np.asarray(groups.count)[:, None]).reshape(-1)


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["wgmma", "mma"])
@pytest.mark.parametrize("nvfp4", [True, False], ids=["nvfp4", "bf16"])
@pytest.mark.parametrize(("kind", "tokens", "rows"), [("spread", 50, 32), ("one expert", 70, 64), ("unused", 90, 32)])
def test_products_match_the_reference(target, nvfp4, kind, tokens, rows):
    x, groups, up, down = operands(3, kind, tokens, 2, rows, nvfp4)
    real = real_rows(groups)
    assert real.sum() == (np.asarray(groups.place).size // 2 if kind == "unused" else 2 * tokens)
    expected = np.asarray(reference.gate_up(x, groups, up, 1))
    act = emulated(mosaic.gate_up, target, x, groups, up, 1)
    assert testing.row_error(act[real], expected[real]) < 4e-3  # bfloat16 rounding, in either direction
    expected = np.asarray(reference.down(jnp.asarray(act), groups, down, 1))
    y = emulated(mosaic.down, target, jnp.asarray(act), groups, down, 1)
    assert testing.row_error(y[real], expected[real]) < 4e-3


def test_full_tiles_and_a_wide_one():
    x, groups, up, _ = operands(5, "one expert", 140, 1, 128, True)
    real = real_rows(groups)
    act = emulated(mosaic.gate_up, HOPPER, x, groups, up, 0)
    assert testing.row_error(act[real], np.asarray(reference.gate_up(x, groups, up, 0))[real]) < 4e-3


@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize("kind", ["spread", "one expert", "unused"])
def test_tiles_hold_every_pair_once(kind, rows):
    rng = np.random.default_rng(1)
    ids = routing(kind, 133, 3, rng)
    groups = jax.tree.map(np.asarray, group(jnp.asarray(ids, jnp.int32), E, rows))
    seen = set()
    for token in range(133):
        for rank in range(3):
            if ids[token, rank] == E:
                continue
            place = int(groups.place[token, rank])
            tile = place // rows
            assert tile < groups.total[0]
            assert groups.expert[tile] == ids[token, rank]
            assert place % rows < groups.count[tile]
            assert groups.token[place] == token
            seen.add(place)
    assert len(seen) == (ids < E).sum() == groups.count.sum()
    assert (groups.token >= 0).all()
    assert (groups.token < 133).all()


def test_the_size_of_a_tile_follows_the_usual_share():
    assert [tile_rows(6 * tokens, 256) for tokens in (64, 1024, 2048, 8192)] == [32, 32, 64, 128]


def test_orders_undo_each_other():
    x = jnp.arange(64).reshape(2, 32)
    assert (natural_order(product_order(x)) == x).all()
    assert product_order(x)[0, :8].tolist() == [0, 1, 4, 5, 8, 9, 12, 13]
