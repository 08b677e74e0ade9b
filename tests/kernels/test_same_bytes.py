"""A kernel's module is the same bytes whatever was lowered before it: XLA's compile cache finds programs by them."""

import os
import subprocess
import sys

import pytest

from pallas_kernels import aot

PROGRAM = """
import functools, hashlib, sys
import jax
jax.config.update("jax_platforms", "cpu")
from pallas_kernels import aot, bench
wanted = {c.name: c for c in bench.cases("add_rms_norm")}
names = sorted(wanted)
def lowered(name):
    case = wanted[name]
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    return str(aot.lower_for("sm_90a", functools.partial(case.run, 0), *shapes).compiler_ir("stablehlo"))
if sys.argv[1] == "after":
    lowered(names[-1])
print(hashlib.sha256(lowered(names[0]).encode()).hexdigest())
"""


@pytest.mark.compile
@pytest.mark.skipif(not aot.available(), reason="the CUDA plugin is not installed")
def test_order_of_lowering_leaves_no_trace():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    prints = []
    for how in ("alone", "after"):
        command = [sys.executable, "-c", PROGRAM, how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        prints.append(done.stdout.split()[-1])
    assert prints[0] == prints[1]
