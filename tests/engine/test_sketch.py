"""A model of shapes, from a checkpoint's headers: the tree that loading gives, array by array."""

import dataclasses
from pathlib import Path

import jax
import pytest
from flax import nnx

from flint_jax import lm
from flint_jax.errors import CheckpointError, ConfigError
from loaders import weight_shapes
from loaders.checkpoint import open_checkpoint
from loaders.synthetic import preset, write_description, write_gguf

GOLDENS = Path(__file__).parents[1] / "goldens"
SMALL = {"vocab_size": 768, "hidden_size": 256, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1}
SMALL |= {"intermediate_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256}


def described(model):
    leaves, structure = jax.tree.flatten(nnx.state(model))
    return [(leaf.shape, leaf.dtype) for leaf in leaves], structure


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["T1", "T2-nvfp4"])
def test_a_sketch_is_the_loaded_model_in_shapes(name, dtype):
    opened = lm.open_model(GOLDENS / name, dtype=dtype)
    sketch = opened.sketch()
    kinds = {type(leaf) for leaf in jax.tree.leaves(nnx.state(sketch.model, nnx.Param))}
    assert kinds == {jax.ShapeDtypeStruct}
    loaded = opened.load(progress=False)
    assert described(sketch.model) == described(loaded.model)
    assert (sketch.name, sketch.eos_ids, sketch.max_context) == (loaded.name, loaded.eos_ids, loaded.max_context)


def test_in_tiles_too(tmp_path):
    write_gguf(tmp_path / "small.gguf", preset("tiny", 4, **SMALL))
    opened = lm.open_model(tmp_path / "small.gguf", kernels="pallas")
    assert opened.tiled
    assert described(opened.sketch().model) == described(opened.load(progress=False).model)


def test_an_engine_is_planned_and_compiled_before_its_weights_are_read():
    opened = lm.open_model(GOLDENS / "T1")
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 64, "enable_prefix_caching": False}
    planned = opened.sketch().plan_engine(**sizes)
    planned.build()
    loaded = opened.load(progress=False)
    engine = planned.finish(loaded.model)
    assert engine.compile_seconds > 0
    params = lm.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    got = []
    engine.submit([1, 2, 3], params, on_event=got.append)
    while not (got and got[-1].finish_reason):
        engine.step()
    drawn = [token for event in got for token in event.token_ids]
    assert drawn == list(loaded.generate([1, 2, 3], params).token_ids)


def test_orbax_tells_its_shapes_on_reading(tmp_path):
    from loaders import orbax

    checkpoint = open_checkpoint(GOLDENS / "T1")
    plan = orbax.OrbaxPlan.__new__(orbax.OrbaxPlan)
    assert weight_shapes(dataclasses.replace(checkpoint, plan=plan)) is None


@pytest.mark.parametrize("kernels", ["xla", "pallas"])
@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
def test_dummy_weights_need_no_file_of_weights(tmp_path, weight_format, kernels):
    write_description(tmp_path / "alone", preset("tiny", 4, **SMALL))
    assert not any(p.suffix in (".safetensors", ".gguf") for p in (tmp_path / "alone").iterdir())
    opened = lm.open_model(tmp_path / "alone", kernels=kernels, dummy=True, weight_format=weight_format)
    assert opened.tiled == (kernels == "pallas")
    loaded = opened.load(progress=False)
    assert described(opened.sketch().model) == described(loaded.model)
    assert loaded.tokenizer is not None
    assert loaded.name == "alone"
    again = opened.load(progress=False)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(loaded.model), nnx.state(again.model))
    )


def test_dummy_weights_are_those_of_the_same_shapes_in_files(tmp_path):
    write_gguf(tmp_path / "small.gguf", preset("tiny", 4, **SMALL))
    real, dummy = lm.open_model(tmp_path / "small.gguf"), lm.open_model(tmp_path / "small.gguf", dummy=True)
    assert dummy.checkpoint.weight_format == "nvfp4"
    assert described(real.sketch().model) == described(dummy.sketch().model)


def test_dummy_weights_of_a_folder_that_says_no_shapes(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        lm.open_model(tmp_path, dummy=True)
    with pytest.raises(CheckpointError, match="a local folder"):
        lm.open_model("some/model", dummy=True)
