"""How memory is shared out between slots, pages and the snapshots of the prefix cache."""

import pytest

from flint_jax import memory
from flint_jax.cache import PAGE, slot_bytes
from flint_jax.errors import ConfigError
from flint_jax.numerics import Numerics
from loaders.synthetic import preset

CONFIG = preset("full", 49)
NUMERICS = Numerics("serving", "bfloat16")
GIB = 2**30


def plan(free, monkeypatch, **how):
    monkeypatch.setattr(memory, "_free_bytes", lambda *_: int(free * GIB))
    return memory.plan(CONFIG, NUMERICS, **{"max_model_len": 262_144, "max_num_seqs": 16, **how})


def test_a_snapshot_at_full_size_is_what_the_manual_says():
    assert slot_bytes(CONFIG, 2) == pytest.approx(40e6, rel=0.05)


def test_everything_fits(monkeypatch):
    for free in (8, 20, 100):
        p = plan(free, monkeypatch, prefix_caching=True)
        assert p.cache_bytes + p.workspace <= free * GIB
        assert p.cache_bytes + p.workspace > free * GIB - p.page_bytes


def test_snapshots_take_a_tenth_of_the_room_and_eight_a_slot_at_most(monkeypatch):
    small = plan(10, monkeypatch, prefix_caching=True)
    room = 10 * GIB - small.workspace - 16 * small.slot_bytes
    assert small.sizes.snapshots == room // 10 // small.snapshot_bytes
    assert plan(100, monkeypatch, prefix_caching=True).sizes.snapshots == 8 * 16


@pytest.mark.parametrize("how", [{}, {"prefix_caching": True, "prefix_snapshots": 0}])
def test_without_a_prefix_cache_all_goes_to_pages(monkeypatch, how):
    p = plan(10, monkeypatch, **how)
    assert p.sizes.snapshots == 0
    assert "snapshots" not in p.table()
    assert p.sizes.pages > plan(10, monkeypatch, prefix_caching=True).sizes.pages


def test_a_number_of_snapshots_can_be_asked_for(monkeypatch):
    p = plan(10, monkeypatch, prefix_caching=True, prefix_snapshots=100)
    assert p.sizes.snapshots == 100
    assert "100 snapshots" in p.table()
    with pytest.raises(ConfigError, match=r"900 snapshots of the prefix cache.*--prefix-snapshots"):
        plan(10, monkeypatch, prefix_caching=True, prefix_snapshots=900)
    with pytest.raises(ConfigError, match="prefix_snapshots = -1"):
        plan(10, monkeypatch, prefix_caching=True, prefix_snapshots=-1)


def test_with_a_prefix_cache_there_are_pages_for_more_than_the_slots_hold(monkeypatch):
    short = {"max_model_len": 1024}
    slots = 16 * (1024 // PAGE + 1)
    assert plan(100, monkeypatch, **short).sizes.pages == slots
    assert plan(100, monkeypatch, prefix_caching=True, **short).sizes.pages == 2 * slots


def test_a_pool_fits_in_one_piece(monkeypatch):
    """Behind the weights that are to come and the largest of them once more, or in the hole that this leaves."""
    whole = plan(104, monkeypatch).sizes.pages
    behind = plan(104, monkeypatch, largest=13 << 30)
    assert behind.sizes.pages < whole
    assert 0.99 * (91 << 30) < behind.sizes.pages * behind.page_bytes <= 91 << 30
    inside = plan(51, monkeypatch, largest=47 << 30)
    assert (51 - 47) << 30 < inside.sizes.pages * inside.page_bytes <= 0.9 * (47 << 30)
