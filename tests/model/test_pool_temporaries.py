"""The prefill step compiled for a GPU that is not here, with a pool that fills it: no temporary of the pool's order.

Two layers at Flint's own widths, and so many pages that the arguments are those of the full model at its defaults: more
than the share of the GPU from which on XLA would recompute instructions to save memory.
"""

import json

import pytest

from pallas_kernels import aot
from tests.compiled import printed

PROGRAM = """
import dataclasses, json
import jax
from flint_jax import tiles
from flint_jax.config import FULL, SLIDING
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from flint_jax.random_weights import random_weights
from flint_jax.step import OPTIONS, Sizes, Steps
from loaders.synthetic import preset, spread
from pallas_kernels import aot

config = dataclasses.replace(
    preset("full", 2), layer_types=(FULL, SLIDING), rope_layers=(False, True), mlp_only_layers=(0,)
)
numerics = Numerics("serving", "bfloat16")
weights = jax.eval_shape(
    lambda: tiles.tile_weights(random_weights(config, numerics, weight_format="FORMAT", spread=spread))
)
steps = Steps(Flint(config, weights, numerics, max_positions=262144), Sizes(16, 950_000, 262144, (16,), (32,)), False)

class Recorded:  # what the step is lowered with
    def lower(self, *args):
        self.args = args

step, steps._prefill = steps._prefill, Recorded()
steps.lower_prefill(32)
args = steps._prefill.args
compiled = aot.compile_for("sm_90a", step.__wrapped__, *args, donate_argnums=1, compiler_options=OPTIONS)
memory = compiled.memory_analysis()
print(json.dumps({
    "pool": steps.state.cache.k_pages.size * 2,
    "state": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(steps.state)),
    "arguments": memory.argument_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
    "aliased": memory.alias_size_in_bytes,
    "recomputed": compiled.as_text().count(".remat"),
}))
"""


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.skipif(not aot.available(), reason="the CUDA plugin is not installed")
@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_a_prefill_step_with_a_full_gpu_makes_no_second_pool(weight_format):
    found = json.loads(printed(PROGRAM.replace("FORMAT", weight_format)).splitlines()[-1])
    assert found["pool"] > 57 * 2**30
    assert found["arguments"] > 121e9
    assert found["temporaries"] < found["pool"] / 30
    assert found["aliased"] >= found["state"]
    assert found["recomputed"] == 0
