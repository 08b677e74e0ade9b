"""With ``emit.SLICES``, a layer's weights reach a kernel as an address: no copy of a slice, no kernel beside ours."""

import re

import pytest

from pallas_kernels import aot
from tests.compiled import printed

PROGRAM = """
import jax, jax.numpy as jnp
from pallas_kernels import aot, emit
from pallas_kernels.moe_gemv import cases, experts, router
from pallas_kernels.nvfp4_gemv import Norm, gemv
from pallas_kernels.testing import random_tiles

emit.SLICES = True

def chain(x, residual, norm, qkv, gate, weights):
    for layer in range(3):
        normed = Norm(norm, layer, residual)
        dense = gemv(x, qkv, layer, norm=normed)
        routed = router(dense.out[:, :2048], gate, layer, normed)
        x = experts(routed.normed, routed.logits, weights, layer, active=6).out
    return x

def arguments(key):
    row = jnp.ones((1, 2048), jnp.bfloat16)
    norm, gate = jnp.ones((3, 2048), jnp.bfloat16), jnp.ones((3, 256, 2048), jnp.bfloat16)
    qkv = random_tiles(key, (3,), 2048, 2048, nvfp4=NVFP4)
    return row, row, norm, qkv, gate, cases.random_experts(key, 3, NVFP4)

compiled = aot.compile_for("sm_90a", chain, *jax.eval_shape(arguments, jax.random.key(0)))
print(compiled.as_text())
print("temporaries:", compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.skipif(not aot.available(), reason="the CUDA plugin is not installed")
@pytest.mark.parametrize("nvfp4", [True, False])
def test_slices_are_not_copied(nvfp4):
    out = printed(PROGRAM.replace("NVFP4", str(nvfp4)))
    entry = out[out.index("ENTRY") :]
    calls = re.findall(r" = [^=]*? (fusion|custom-call|copy|slice|dynamic-slice|copy-start)\(.*", entry)
    named = re.findall(r"%([\w-]+?)(?:\.\d+)? = [^=]*? (?:fusion|custom-call)\(", entry)
    assert len(calls) == 3 * 4, entry  # gemv, router, gate and up, down
    assert set(named) == {"dynamic_slice_fusion"}
    assert int(out.rsplit("temporaries:", 1)[1]) < 1 << 20
