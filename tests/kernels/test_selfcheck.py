"""The check of the kernels on a device that nobody measured."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bench, device, dispatch, emit, selfcheck
from pallas_kernels.add_rms_norm import add_rms_norm

NEW = device.Device("NVIDIA X900", (12, 0), 200, 0.0)
GOOD = {"ok": True, "error": 0.0, "repeatable": True}


@pytest.fixture(autouse=True)
def nothing_off():
    yield
    emit.OFF.clear()


def test_only_devices_that_run_kernels_and_were_not_measured():
    for here, needed in ((NEW, True), (device.CPU, False), (device.Device("NVIDIA H200", (9, 0), 132, 0.0), False)):
        with device.assume(here):
            assert selfcheck.needed() == needed


def test_every_op_has_cases_and_every_kernel_a_name():
    assert set(selfcheck.OPS) == set(bench.OPS)
    for op, (_, wanted) in selfcheck.OPS.items():
        names = {case.name.partition("/")[2] for case in bench.cases(op)}
        assert set(wanted) <= names


def test_what_is_wrong_is_switched_off_and_said(monkeypatch, caplog, tmp_path):
    tried = []

    def measure(case, rate, check_only):
        tried.append(case.name)
        assert check_only
        if case.op == "moe_gemm":
            return GOOD | {"ok": False, "error": 0.5}
        if case.op == "sample":
            raise RuntimeError("no such instruction\nat all")
        return GOOD

    monkeypatch.setattr(bench, "measure", measure)
    record = tmp_path / "folder" / "check.json"
    with device.assume(NEW):
        failed = selfcheck.run(record)
    assert set(failed) == {"moe_gemm", "sample"}
    assert "row error 5.0e-01" in failed["moe_gemm"]
    assert failed["sample"].endswith("RuntimeError: no such instruction")
    assert "stay off" in caplog.text
    assert {"moe_gemm_", "sample"} == emit.OFF
    assert len(tried) >= 15
    # Another process only reads what was found; a damaged record is found again.
    emit.OFF.clear()
    monkeypatch.setattr(bench, "measure", lambda *_, **__: pytest.fail("checked twice"))
    assert selfcheck.run(record) == failed
    assert {"moe_gemm_", "sample"} == emit.OFF
    record.write_text("{")
    monkeypatch.setattr(bench, "measure", lambda *_, **__: GOOD)
    emit.OFF.clear()
    assert selfcheck.run(record) == {}
    assert not emit.OFF


def test_a_kernel_that_is_off_leaves_to_its_reference():
    emit.OFF.add("add_rms_norm")
    x, weight = jnp.ones((3, 1024), jnp.bfloat16), jnp.ones((1, 1024), jnp.bfloat16)
    with device.assume(NEW):
        normed, _ = add_rms_norm(x, weight, 0, eps=1e-6)  # the kernel itself could not run here
        with dispatch.force("kernels"), pytest.raises(dispatch.KernelUnsupported, match="switched off"):
            jax.eval_shape(lambda: add_rms_norm(x, weight, 0, eps=1e-6))
    assert normed.shape == x.shape
