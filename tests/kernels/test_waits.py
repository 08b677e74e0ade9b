"""Every wait and every barrier of the kernels is needed: without any one of them the emulator, or the result, says so.

A wait is taken away where it is called, by file and line. What may go is listed with the reason.
"""

import functools
import os
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import emulate, testing
from pallas_kernels.moe_gemm import mosaic as moe_gemm
from pallas_kernels.moe_gemm import reference as moe_gemm_reference
from tests.kernels import test_flash_attention as flash
from tests.kernels import test_moe_gemm as grouped
from tests.kernels import test_moe_gemv as moe
from tests.kernels import test_nvfp4_gemv as gemv
from tests.kernels import test_sink_attention as sink

WAITS = (
    "barrier", "warp_barrier", "cluster_barrier", "arrival_wait", "copies_wait", "async_fence", "group_wait",
)  # fmt: skip


def grouped_products():
    x, groups, up, down = grouped.operands(3, "one expert", 150, 1, 64, True)
    real = grouped.real_rows(groups)
    one_core = grouped.device.Device("emulated", (9, 0), 1, 0.0)  # so that a block goes from item to item
    act = grouped.emulated(moe_gemm.gate_up, one_core, x, groups, up, 1)
    assert testing.row_error(act[real], np.asarray(moe_gemm_reference.gate_up(x, groups, up, 1))[real]) < 4e-3
    y = grouped.emulated(moe_gemm.down, one_core, jnp.asarray(act), groups, down, 1)
    assert (
        testing.row_error(y[real], np.asarray(moe_gemm_reference.down(jnp.asarray(act), groups, down, 1))[real]) < 4e-3
    )


def many_tokens():
    """More keys than the ring in shared memory holds, so that its slots are filled again."""
    args = flash.paged(np.random.default_rng(0), flash.pieces((0, 1, 440, 16)), 16)
    expected = np.asarray(flash.reference.attend_pages(*args))
    out = np.asarray(flash.emulated(flash.mosaic.attend_pages, flash.HOPPER, *args))
    assert testing.row_error(out, expected) < 4e-3


def dense():
    for tokens, how in ((3, {"norm": "add", "segments": (128, 128)}), (1, {})):
        gemv.compare(*gemv.arguments(256, 1024, tokens, **how))
    gemv.compare(*gemv.arguments(1024, 1024, 3), epilogue="logits")


def experts():
    moe.test_router(3, True)
    moe.test_experts(2, True, moe.D)
    moe.test_experts(1, True, moe.WIDE)
    moe.test_experts(1, False, moe.D)


def block():
    moe.test_block(4, 128)


def attention():
    sink.test_page_ragged_rows_share_blocks()
    sink.test_ring_rounds_that_reuse_their_places()
    sink.test_one_row_in_clusters(383, sink.SPANS[1])


SCENARIOS = (grouped_products, many_tokens, dense, experts, block, attention)

# What may go, and why.
SPARE = {
    "moe_gemm/mosaic.py group_wait": "bounds how many products are under way; registers are the assembler's care",
    "moe_gemv/mosaic_block.py warp_barrier": "behind a wait for words: lanes leave it one by one, here together",
    "moe_gemv/mosaic_down.py warp_barrier": "before a warp's next item; it has one in these cases",
    "sink_attention/block.py barrier": "orders global memory between blocks, which the emulator does not see",
}


class _Without:
    """Counts the places that wait, and leaves out the wait at one of them."""

    def __init__(self, monkeypatch, place=None):
        self.places, self.place = {}, place
        for name in WAITS:
            monkeypatch.setattr(emulate, name, functools.partial(self.wait, name, getattr(emulate, name)))

    def wait(self, name, function, *args, **kwargs):
        frame = sys._getframe(1)
        place = f"{os.path.relpath(frame.f_code.co_filename, os.path.dirname(emulate.__file__))}:{frame.f_lineno}"
        self.places[place] = name
        if place != self.place:
            return function(*args, **kwargs)
        return list(args[1]) if name == "group_wait" and len(args) > 1 else []


@functools.cache
def places(scenario):
    with pytest.MonkeyPatch.context() as patch:
        without = _Without(patch)
        scenario()
        return without.places


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_wait_can_go(scenario):
    survivors = []
    for place, name in places(scenario).items():
        with pytest.MonkeyPatch.context() as patch:
            _Without(patch, place)
            try:
                scenario()
            except (AssertionError, RuntimeWarning):  # or garbage that numpy cannot convert
                continue
        survivors.append(f"{place} {name}")
    assert [s for s in survivors if s.split()[0].rpartition(":")[0] + " " + s.split()[1] not in SPARE] == []


def test_there_are_enough_of_them():
    """The seven removals that once survived, and as many more."""
    assert sum(len(places(scenario)) for scenario in (grouped_products, many_tokens)) >= 8
