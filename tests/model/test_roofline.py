"""The roofline's bytes are those of the real leaves and of the real cache."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flint_jax
from flint_jax import roofline
from flint_jax.__main__ import main
from flint_jax.cache import PAGE, KVCache, ring_size
from flint_jax.roofline import DEVICES
from flint_jax.weights import shapes
from loaders.synthetic import preset
from pallas_kernels import layout, nvfp4
from tests.model import golden

FULL = preset("full")


@pytest.mark.parametrize(
    ("name", "dtype", "weight_format"),
    [("T1", "bfloat16", "bf16"), ("T2-nvfp4", "bfloat16", "nvfp4"), ("T1", "float32", "f32")],
)
def test_leaves(name, dtype, weight_format):
    lm = flint_jax.load(golden.FOLDER / name, dtype=dtype, progress=False)
    real = {
        stack: sum(leaf.nbytes for leaf in jax.tree.leaves(param.get_value()))
        for stack, param in lm.model.stacks.items()
    }
    assert roofline.leaf_bytes(lm.config, weight_format) == real
    # Every stack is in exactly one component, but for the embedding, of which a step reads a row a token.
    named = [stack for names in roofline.COMPONENTS.values() for stack in names]
    assert sorted([*named, "embed"]) == sorted(real)
    everything = roofline.step_bytes(lm.config, batch=10**6, context=1, weight_format=weight_format)
    assert everything.total - everything.embed - everything.kv_full - everything.kv_window == pytest.approx(
        sum(real.values()) - real["embed"]
    )


def test_tiles_hold_the_same_bytes():
    """The kernels' order of a full-size matrix, by shape."""
    rows, columns = shapes(FULL)["qkv"].shape[1:]
    packed = nvfp4.Packed(
        jax.ShapeDtypeStruct((rows, columns // 2), np.uint8),
        jax.ShapeDtypeStruct((rows, columns // 16), np.uint8),
        jax.ShapeDtypeStruct((3,), np.float32),
        shapes(FULL)["qkv"].segments,
    )
    words = jax.eval_shape(layout.tile, packed).words
    one = roofline.leaf_bytes(FULL)["qkv"] / FULL.num_hidden_layers - 3 * 4
    assert math.prod(words.shape) * 4 == one


def test_cache():
    lm = golden.language_model("T2-nvfp4", "serving", "bfloat16")
    config, window = lm.config, lm.config.sliding_window
    cache = KVCache.create(config, 1, 3, jnp.bfloat16)
    full, ring = roofline.cache_bytes(config, 3 * PAGE)
    assert full == cache.k_pages.nbytes + cache.v_pages.nbytes
    assert ring * ring_size(window) == (cache.k_ring.nbytes + cache.v_ring.nbytes) * window
    assert roofline.cache_bytes(config, window - 1)[1] == ring * (window - 1) // window
    parts = roofline.step_bytes(config, batch=5, context=3 * PAGE)
    assert (parts.kv_full, parts.kv_window) == (5 * full, 5 * ring)


def test_operations():
    """Two for each weight that a token meets, and four for each value of a head and each key."""
    flops = roofline.token_flops(FULL, context=1000)
    inactive = FULL.num_experts - FULL.num_experts_per_tok
    unused = inactive * 3 * FULL.hidden_size * FULL.moe_intermediate_size * len(FULL.moe_layers)
    norms = sum(math.prod(shapes(FULL)[n].shape) for n in roofline.COMPONENTS["norms"])
    embedding = math.prod(shapes(FULL)["embed"].shape)
    matrices = FULL.num_parameters - unused - norms - embedding
    assert flops.total - flops.kv_full - flops.kv_window == 2 * matrices
    assert flops.kv_full == len(FULL.full_layers) * 4 * FULL.q_size * 1000
    assert flops.kv_window == len(FULL.sliding_layers) * 4 * FULL.q_size * 513
    assert roofline.token_flops(FULL, context=1, head=0.0).head == 0


def test_floors():
    """Decoding alone is bound by memory, in a large batch by operations."""
    h200 = DEVICES["h200"]
    options = {"context": 1024, "weight_format": "nvfp4"}
    moved = roofline.step_bytes(FULL, batch=1, **options).total
    assert roofline.decode_floor(FULL, h200, batch=1, **options) == moved / h200.bandwidth
    large = roofline.decode_floor(FULL, h200, batch=100_000, context=1, weight_format="nvfp4")
    assert large == 100_000 * roofline.token_flops(FULL, context=1).total / h200.flops
    read = roofline.scoring_floor(FULL, h200, tokens=10, context=5)
    assert read == 10 * roofline.token_flops(FULL, context=5).total / h200.flops
    with pytest.raises(flint_jax.ConfigError, match="'int4': need one of nvfp4"):
        roofline.leaf_bytes(FULL, "int4")


def test_command(capsys):
    model = ["info", "--model", str(golden.FOLDER / "T2-nvfp4"), "--roofline"]
    assert main([*model, "--batch", "4", "--context", "64", "--bandwidth", "2"]) == 0
    out = capsys.readouterr().out
    config = golden.language_model("T2-nvfp4").config
    total = roofline.step_bytes(config, batch=4, context=64).total
    (row,) = [line.split() for line in out.splitlines() if line.split()[:1] == ["total"]]
    assert float(row[1]) == pytest.approx(total / 1e6, abs=0.005)
    assert float(row[2]) == pytest.approx(total / 2e6, abs=0.05)
    assert main([*model, "--device", "abacus"]) == 2
    assert "need one of a100" in capsys.readouterr().err
    for flag, value in (("--bandwidth", "-1"), ("--bandwidth", "nan"), ("--tflops", "0"), ("--tflops", "inf")):
        assert main([*model, flag, value]) == 2
        assert f"{flag} {float(value)}: need a number above 0" in capsys.readouterr().err
    assert main([*model, "--context", "5000"]) == 2
    assert "a context of 1 to 4096" in capsys.readouterr().err
