"""The decode step compiled for a GPU that is not here: its launches, counted, and no copy of weights or cache.

Three layers at Flint's own widths, one of each kind it has, stand for its 49; weights are shapes without values.
"""

import collections
import itertools
import json
import re

import pytest

from flint_jax.config import FULL
from loaders.synthetic import preset
from pallas_kernels import aot
from tests.compiled import printed

PROGRAM = """
import dataclasses, json
import jax, jax.numpy as jnp
from flint_jax import redraw, tiles
from flint_jax.config import FULL, SLIDING
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from flint_jax.random_weights import random_weights
from flint_jax.step import Sizes, Steps
from loaders.synthetic import preset, spread
from pallas_kernels import aot

kinds = (FULL, SLIDING, FULL)
config = dataclasses.replace(
    preset("full", 3), layer_types=kinds, rope_layers=(False, True, False), mlp_only_layers=(0,)
)
numerics = Numerics("serving", "bfloat16")
weights = jax.eval_shape(
    lambda: tiles.tile_weights(random_weights(config, numerics, weight_format="nvfp4", spread=spread))
)
steps = Steps(Flint(config, weights, numerics, max_positions=1024), Sizes(8, 64, 1024, (BATCH,), (16,)))
logits = jax.ShapeDtypeStruct((BATCH, config.vocab_size), jnp.float32)
rows = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
compiled = aot.compile_for(
    "sm_90a", steps._decode[True], steps.weights, steps.state, logits, steps.tables, rows,
    donate_argnums=(1, 2), keep_unused=True,
)
masks = jax.ShapeDtypeStruct((BATCH, redraw.words(config.vocab_size)), jnp.int32)
again = aot.compile_for("sm_90a", steps._redraw[True], *steps._drawn(), logits, rows, masks, donate_argnums=(0, 1))
memory = compiled.memory_analysis()
print(compiled.as_text())
print(json.dumps({
    "temporaries": memory.temp_size_in_bytes,
    "aliased": memory.alias_size_in_bytes,
    "again": again.as_text(),
    "again_aliased": again.memory_analysis().alias_size_in_bytes,
    "again_temporaries": again.memory_analysis().temp_size_in_bytes,
    "again_kept": steps.state.sampling.out_count.nbytes + steps.state.progress.nbytes,
    "kept": sum(leaf.nbytes for leaf in jax.tree.leaves(steps.state.cache)) + logits.size * 4,
}))
"""
# Instructions that name, pack or unpack buffers. Everything else in the program is a launch.
NO_LAUNCH = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%[\w.-]+ = (?:\([^)]*\)|\S+|\((?:[^()]|\([^()]*\))*\)) ([\w-]+)\(")


KERNEL = re.compile(r'op_name="[^"]*/(\w+)/mpmd_map')


def launches(program):
    """What the entry computation runs, in order: the names of our kernels, XLA's own instructions by their kind."""
    inside, computation = {}, ""  # our kernel in each computation: slices of weights are fused with the call
    found = []
    for line in program.splitlines():
        if line.startswith(("%", "ENTRY")):
            computation = line.split(" ", 1)[0].lstrip("%")
        instruction, kernel = INSTRUCTION.match(line), KERNEL.search(line)
        if instruction is None or instruction[1] in NO_LAUNCH:
            continue
        if instruction[1] == "custom-call" and kernel:
            inside[computation] = kernel[1]
        if computation == "ENTRY":
            called = re.search(r"calls=%([\w.-]+)", line)
            ours = inside.get(called[1]) if called else kernel and kernel[1]
            found.append(ours or instruction[1])
    return found


def by_layer(found):
    """(before the layers, [dense, window, full], norm, head and after). A layer ends with its down product, which one
    row's mixture of experts has inside its only kernel."""
    first = next(i for i, name in enumerate(found) if name in ("gemv_none", "add_rms_norm"))
    dense_down = found.index("gemv_swiglu") + 1
    edges = [first, dense_down + 1, *(i + 1 for i, name in enumerate(found) if name in ("moe_down", "moe_block"))]
    return found[:first], [found[a:b] for a, b in itertools.pairwise(edges)], found[edges[-1] :]


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.skipif(not aot.available(), reason="the CUDA plugin is not installed")
@pytest.mark.parametrize(("batch", "of_a_layer", "of_a_step"), [(1, 5, 250), (8, 8, 400)])
def test_launches_and_copies_of_the_decode_step(batch, of_a_layer, of_a_step):
    """From 3 rows on, the norm in front of a product is a kernel of its own: one more a layer, two in a dense one."""
    program = PROGRAM.replace("BATCH", str(batch))
    text, _, last = printed(program).strip().rpartition("\n")
    before, layers, after = by_layer(launches(text))
    dense, window, full = map(len, layers)
    assert max(window, full) <= of_a_layer, json.dumps(layers)
    flint = preset("full")
    count = collections.Counter((kind == FULL, i in flint.mlp_only_layers) for i, kind in enumerate(flint.layer_types))
    assert set(count) == {(True, True), (False, False), (True, False)}
    total = len(before) + len(after)
    total += dense * count[True, True] + window * count[False, False] + full * count[True, False]
    assert total <= of_a_step, (total, before, layers, after)
    # The embedding, the rows' places and the counters; the head and the sampler, which moves the slots on as well.
    assert len(before) <= 3 + (batch > 2), before
    assert after[-2:] == ["gemv_stream", "sample"], after
    assert len(after) <= 2 + (batch > 2), after
    # Layers are our kernels and nothing else.
    assert {name for layer in layers for name in layer} & {"fusion", "custom-call", "copy", "while", "call"} == set()

    memory = json.loads(last)
    assert memory["aliased"] >= memory["kept"]  # written in place
    assert memory["temporaries"] < 2**20 * batch  # the smallest stack of weights has 4 MB

    # Drawing again under a mask: the sampler's kernel and small fusions around it, and no branch to wait for.
    found = launches(memory["again"])
    assert found.count("sample") == 1
    assert set(found) == {"sample", "fusion"}
    assert len(found) <= 10, found
    assert memory["again_aliased"] >= memory["again_kept"]
    assert memory["again_temporaries"] < 2**20 * batch
