"""Which implementation runs, and what the log says about it."""

import logging

import pytest

from pallas_kernels import device, dispatch

HOPPER = device.Device("a GPU", (9, 0), 132, 0.0)
AMPERE = device.Device("an older GPU", (8, 0), 108, 0.0)


def refuse(*_):
    raise dispatch.KernelUnsupported("7 tokens")


OPS = {"fast": refuse, "slower": lambda x: ("slower", x), "reference": lambda x: ("reference", x)}


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(dispatch, "_said", set())


def run(operations=OPS):
    return dispatch.run("op", operations, 1)[0]


def test_the_first_kernel_that_takes_it_runs_and_the_log_says_it_once(caplog):
    caplog.set_level(logging.INFO)
    with device.assume(HOPPER):
        assert [run(), run()] == ["slower", "slower"]
    assert [record.message for record in caplog.records] == [
        "op: the fast kernel does not take this (7 tokens); using the next implementation"
    ]


def test_devices_without_kernels_use_the_reference():
    for one in (AMPERE, device.CPU):
        with device.assume(one):
            assert run() == "reference"


def test_forcing():
    with device.assume(HOPPER), dispatch.force("reference"):
        assert run() == "reference"
    with device.assume(device.CPU), dispatch.force("kernels"):
        assert run() == "slower"
        with pytest.raises(dispatch.KernelUnsupported):
            run({"fast": refuse, "reference": OPS["reference"]})
        with dispatch.force(None):
            assert run() == "reference"
    with pytest.raises(ValueError, match="force"), dispatch.force("fastest"):
        pass


def test_errors_other_than_unsupported_are_not_hidden():
    def broken(_):
        raise RuntimeError("a bug")

    with device.assume(HOPPER), pytest.raises(RuntimeError, match="a bug"):
        run({"fast": broken, "reference": OPS["reference"]})
