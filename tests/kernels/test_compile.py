"""Every kernel case must assemble for Hopper and Blackwell; one process per architecture."""

import json
import os
import subprocess
import sys

import pytest

from pallas_kernels import aot, bench


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.skipif(not aot.available(), reason="the CUDA plugin is not installed")
@pytest.mark.parametrize("target", sorted(aot.TARGETS))
@pytest.mark.parametrize("op", bench.OPS)
def test_every_case_assembles(target, op):
    command = [sys.executable, "-m", "pallas_kernels.aot", target, "--ops", op]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["cases"]
    broken = {name: result for name, result in report["cases"].items() if isinstance(result, str)}
    assert not broken
