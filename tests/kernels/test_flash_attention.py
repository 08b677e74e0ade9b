"""Attention of many tokens: the kernels' program, executed on the CPU, against the reference."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device, emulate, testing
from pallas_kernels.flash_attention import Pieces, mosaic, reference, write

HOPPER = device.Device("emulated", (9, 0), 3, 0.0)
BLACKWELL = device.Device("emulated", (10, 0), 3, 0.0)
TARGETS = pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["wgmma", "mma"])
K, H, N, SLOTS = 1, 128, 8, 3


def emulated(function, target, *args, **kwargs):
    with emulate.active(), device.assume(target):
        return function(*args, **kwargs)


def pieces(*rows):
    """(place, slot, start, count) of each."""
    return Pieces(*(jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True)))


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def paged(rng, work, places):
    """Pages of NaN but for the positions that the requests have, up to the end of each piece."""
    tables = np.arange(SLOTS * 8).reshape(SLOTS, 8)[:, ::-1].copy()
    k, v = (np.full((2, SLOTS * 8, K, 64, H), np.nan, np.float32) for _ in range(2))
    for slot, start, count in zip(*(np.asarray(x) for x in (work.slot, work.start, work.count)), strict=True):
        for position in range(start + count if count else 0):
            for cache in (k, v):
                cache[1, tables[slot, position // 64], :, position % 64] = rng.normal(size=(K, H))
    qkv = normal(rng, places, (N + 2 * K) * H)
    sinks = jnp.asarray(rng.normal(size=(3, N)), jnp.float32)
    return (
        qkv,
        work.tiles(places),
        sinks,
        2,
        *(jnp.asarray(c, jnp.bfloat16) for c in (k, v)),
        1,
        jnp.asarray(tables, jnp.int32),
    )


@TARGETS
def test_pages_match_the_reference(target):
    """A first piece, a short one behind others, one in the middle of a page, nothing at the end."""
    rng = np.random.default_rng(0)
    work = pieces((0, 1, 0, 20), (32, 0, 130, 3), (48, 2, 50, 16), (80, 0, 0, 0))
    args = paged(rng, work, 80)
    expected = np.asarray(reference.attend_pages(*args))
    out = np.asarray(emulated(mosaic.attend_pages, target, *args)[:])
    real = np.asarray(work.of_places(80)[2])
    assert real.sum() == 39
    assert testing.row_error(out[real], expected[real]) < 4e-3
    assert not out[~real].any()


def test_a_window_over_pages():
    args = paged(np.random.default_rng(4), pieces((0, 1, 0, 20), (32, 0, 330, 3)), 48)
    expected = np.asarray(reference.attend_pages(*args, window=100))
    out = np.asarray(emulated(mosaic.attend_pages, HOPPER, *args, window=100))
    assert testing.row_error(out[[*range(20), 32, 33, 34]], expected[[*range(20), 32, 33, 34]]) < 4e-3
    assert not (expected == np.asarray(reference.attend_pages(*args))).all()


@TARGETS
@pytest.mark.parametrize("window", [513, 100])
def test_rings_match_the_reference(target, window):
    """A piece longer than its window behind a full ring, one that begins the request, one whose ring has wrapped."""
    rng = np.random.default_rng(1)
    ring = -(-(window + 63) // 64) * 64
    work = pieces((0, 2, 700, 40), (48, 0, 0, 17), (80, 1, 95, 16))
    places = 96
    k, v = (np.full((2, SLOTS, K, ring, H), np.nan, np.float32) for _ in range(2))
    for slot, start in ((2, 700), (1, 95)):
        for position in range(max(0, start - window + 1), start):
            for cache in (k, v):
                cache[0, slot, :, position % ring] = rng.normal(size=(K, H))
    caches = (jnp.asarray(c, jnp.bfloat16) for c in (k, v))
    args = (
        normal(rng, places, (N + 2 * K) * H),
        work.tiles(places),
        jnp.asarray(rng.normal(size=(1, N)), jnp.float32),
        0,
        *caches,
        0,
    )
    expected = np.asarray(reference.attend_ring(*args, window=window))
    out = np.asarray(emulated(mosaic.attend_ring, target, *args, window=window))
    real = np.asarray(work.of_places(places)[2])
    assert testing.row_error(out[real], expected[real]) < 4e-3
    assert not out[~real].any()


def test_a_row_is_the_same_in_any_company():
    rng = np.random.default_rng(2)
    qkv, tiles, *rest = paged(rng, pieces((0, 1, 0, 20), (32, 0, 130, 16)), 48)
    together = np.asarray(emulated(mosaic.attend_pages, HOPPER, qkv, tiles, *rest))
    alone = np.asarray(emulated(mosaic.attend_pages, HOPPER, qkv[32:], tiles[2:], *rest))
    assert (together[32:] == alone).all()


@pytest.mark.parametrize("kind", ["pages", "rings"])
def test_writes_match_the_reference(kind):
    """Only what a piece brings is written; of more tokens than a ring has only the last ones."""
    rng = np.random.default_rng(3)
    work = pieces((0, 1, 30, 40), (48, 0, 3, 5), (64, 2, 10, 200))
    places = 288
    qkv = normal(rng, places, (N + 2 * K) * H)
    if kind == "pages":
        tables = jnp.asarray(np.arange(SLOTS * 8).reshape(SLOTS, 8)[:, ::-1].copy(), jnp.int32)
        k, v = (normal(rng, 2, SLOTS * 8, K, 64, H) for _ in range(2))
        destination = work.in_pages(places, tables, 64, SLOTS * 8)
        assert int((destination >= 0).sum()) == 245
    else:
        k, v = (normal(rng, 2, SLOTS, K, 128, H) for _ in range(2))
        destination = work.in_rings(places, 128)
        assert int((destination >= 0).sum()) == 40 + 5 + 128
    kept = np.asarray(destination)[np.asarray(destination) >= 0]
    assert len(set(kept.tolist())) == len(kept)
    expected = write.reference(qkv, destination, k, v, 1)
    actual = emulated(write.mosaic, HOPPER, qkv, destination, k, v, 1)
    for a, e in zip(actual, expected, strict=True):
        assert (np.asarray(a, np.float32) == np.asarray(e, np.float32)).all()
