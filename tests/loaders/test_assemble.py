"""Both formats load to the right tree, value for value; what is missing, left over or wrong is named."""

import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import loaders
from flint_jax.errors import CheckpointError, ConfigError
from loaders import assemble, name_map, place
from pallas_kernels import nvfp4
from tests.loaders import files
from tests.loaders.files import GOLDENS, matrix_values


@pytest.fixture(params=["host", "device"], autouse=True)
def where(request, monkeypatch):
    """Every test twice: leaves put together on the host (small ones), and written in place on the device (large)."""
    if request.param == "device":
        monkeypatch.setattr(place, "HOST_BYTES", -1)
    return request.param


def load(path, dtype="float32", **options):
    return loaders.load_weights(loaders.open_checkpoint(path), dtype=dtype, progress=False, **options)


def refused(path, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path, **options)
    return str(caught.value)


def save(tmp_path, tensors, values=None):
    return files.save_gguf(tmp_path / "model.gguf", tensors, values)


# -- the tree, by an independent route -------------------------------------------------------------------------------


def tree_from_published_names(tensors, config):
    """float32 tree stacked with numpy from a dict under the published names."""
    f32 = {name: np.asarray(value, np.float32) for name, value in tensors.items()}
    layers = [f"model.layers.{i}." for i in range(config.num_hidden_layers)]
    dense = [layers[i] for i in config.mlp_only_layers]
    moe = [layers[i] for i in config.moe_layers]
    ids = range(config.num_experts)

    def stack(heads, *names):
        return np.stack([np.concatenate([f32[head + name] for name in names]) for head in heads])

    def experts(*names):
        joined = [[np.concatenate([f32[f"{m}mlp.experts.{e}.{n}.weight"] for n in names]) for e in ids] for m in moe]
        return np.array(joined)

    return {
        "embed": f32["model.embed_tokens.weight"],
        "final_norm": f32["model.norm.weight"],
        "head": f32["lm_head.weight"],
        "attn_norm": stack(layers, "input_layernorm.weight"),
        "mlp_norm": stack(layers, "post_attention_layernorm.weight"),
        "qkv": stack(layers, *(f"self_attn.{n}_proj.weight" for n in "qkv")),
        "q_norm": stack(layers, "self_attn.q_norm.weight"),
        "k_norm": stack(layers, "self_attn.k_norm.weight"),
        "sinks": stack(layers, "self_attn.softmax_offset"),
        "o": stack(layers, "self_attn.o_proj.weight"),
        "dense_gate_up": stack(dense, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "dense_down": stack(dense, "mlp.down_proj.weight"),
        "router": stack(moe, "mlp.gate.weight"),
        "expert_gate_up": experts("gate_proj", "up_proj"),
        "expert_down": experts("down_proj"),
        "shared_gate_up": stack(moe, "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        "shared_down": stack(moe, "mlp.shared_expert.down_proj.weight"),
    }


GGUF_TO_PUBLISHED = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{p}": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
    **{f"ffn_{p}_shexp": f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")},
}


def published_from_gguf(tensors):
    """(values without scale, scales) under the published names, from (kind, data), by gguf-py's decoder."""
    values, scales = {}, {}
    for name, (kind, data) in tensors.items():
        if name.endswith(".scale"):
            continue
        parts = name.removesuffix(".weight").split(".")
        head = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        found = files.decoded(kind, data)
        scale = tensors.get(name.removesuffix(".weight") + ".scale", ("F32", np.ones(1, np.float32)))[1]
        if parts[-1].endswith("_exps"):
            part = parts[-1].split("_")[1]
            for e in range(len(found)):
                new = f"{head}mlp.experts.{e}.{part}_proj.weight"
                values[new] = found[e]
                scales[new] = scale[e % len(scale)]
            continue
        new = head + (
            "self_attn.softmax_offset" if parts[-1] == "attn_sinks" else f"{GGUF_TO_PUBLISHED[parts[-1]]}.weight"
        )
        values[new], scales[new] = found, scale[0]
    return values, scales


def scaled_values(leaf):
    """float32 values with the global scale of each row multiplied in."""
    if isinstance(leaf, jax.Array):
        return np.asarray(leaf, np.float32)
    return matrix_values(leaf) * np.repeat(np.asarray(leaf.global_scale), leaf.segments, axis=-1)[..., None]


def assert_trees_equal(tree, expected):
    assert set(tree) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(scaled_values(tree[name]), value, err_msg=name)


# -- safetensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["T1", "T2"])
def test_golden_safetensors(model):
    ckpt = loaders.open_checkpoint(GOLDENS / model)
    assert (ckpt.format, ckpt.weight_format, ckpt.name) == ("safetensors", "bf16", model)
    tensors = {}
    for file in (GOLDENS / model).glob("*.safetensors"):
        tensors |= load_file(file)
    tree = loaders.load_weights(ckpt, dtype="float32", progress=False)
    assert_trees_equal(tree, tree_from_published_names(tensors, ckpt.config))
    assert {v.dtype for v in tree.values()} == {jnp.dtype("float32")}
    narrow = loaders.load_weights(ckpt, dtype="bfloat16", router_dtype="float32", progress=False)
    wide = {name for name, v in narrow.items() if v.dtype == jnp.float32}
    assert wide == {"sinks", "router"}
    assert {v.dtype for name, v in narrow.items() if name not in wide} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(narrow["router"], tree["router"])
    np.testing.assert_array_equal(np.asarray(narrow["qkv"], np.float32), tree["qkv"])


def test_transformers_own_names_and_shards(tmp_path):
    """Experts stacked as gate_up_proj / down_proj, and sinks: the same tree."""
    tensors = files.safetensors_model()
    expected = tree_from_published_names(tensors, files.config())
    fused = {n.replace("softmax_offset", "sinks"): v for n, v in tensors.items() if ".experts." not in n}
    for at, i in enumerate((2, 3)):
        head = f"model.layers.{i}.mlp.experts"
        fused[f"{head}.gate_up_proj"] = expected["expert_gate_up"][at].astype(ml_dtypes.bfloat16)
        fused[f"{head}.down_proj"] = expected["expert_down"][at].astype(ml_dtypes.bfloat16)
    assert_trees_equal(load(files.save_safetensors(tmp_path / "a", tensors)), expected)
    assert_trees_equal(load(files.save_safetensors(tmp_path / "b", tensors, shards=3)), expected)
    assert_trees_equal(load(files.save_safetensors(tmp_path / "c", fused)), expected)


def test_float32_narrows_to_nearest_even_and_float16_converts(tmp_path):
    tensors = files.safetensors_model()
    rng = np.random.default_rng(3)
    tensors["lm_head.weight"] = rng.standard_normal((128, 64), np.float32)
    tensors["lm_head.weight"][0, :4] = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-20]
    tensors["model.norm.weight"] = rng.standard_normal(64).astype(np.float16)
    tensors["model.layers.2.mlp.experts.1.up_proj.weight"] = rng.standard_normal((64, 64), np.float32)
    folder = files.save_safetensors(tmp_path / "a", tensors)
    narrow, wide = load(folder, "bfloat16"), load(folder)
    expected = tensors["lm_head.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(narrow["head"]), expected)
    np.testing.assert_array_equal(np.asarray(expected[0, :4], np.float32), [1.0, 1 + 2**-6, -1.0, 1 + 2**-7])
    assert_trees_equal(wide, tree_from_published_names(tensors, files.config()))


def test_pieces_smaller_than_a_tensor(tmp_path, monkeypatch):
    """A piece size that divides nothing evenly: same tree, and the bar counts every byte once."""
    tensors, packed = files.safetensors_model(), files.gguf_model()
    folder, path = files.save_safetensors(tmp_path / "a", tensors), save(tmp_path, packed)
    whole = load(folder), load(path)
    monkeypatch.setattr(assemble, "PIECE_BYTES", 5000)
    for target, expected in zip((folder, path), whole, strict=True):
        ckpt = loaders.open_checkpoint(target)
        pieces = list(assemble._pieces(ckpt.plan))
        assert len(pieces) > len(ckpt.plan.fills)
        assert abs(sum(p.nbytes for p in pieces) - ckpt.nbytes) <= len(pieces)
        tree = loaders.load_weights(ckpt, dtype="float32", progress=False)
        jax.tree.map(np.testing.assert_array_equal, tree, expected)


# -- NVFP4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["T2-nvfp4", "T2-nvfp4/T2-nvfp4.gguf"])
def test_golden_gguf(path):
    import gguf as gguf_py

    ckpt = loaders.open_checkpoint(GOLDENS / path)
    assert (ckpt.format, ckpt.weight_format) == ("gguf", "nvfp4")
    reader = gguf_py.GGUFReader(GOLDENS / "T2-nvfp4" / "T2-nvfp4.gguf")
    tensors = {
        t.name: (
            t.tensor_type.name,
            t.data.view(ml_dtypes.bfloat16) if t.tensor_type.name == "BF16" else np.array(t.data),
        )
        for t in reader.tensors
    }
    check_packed(loaders.load_weights(ckpt, dtype="float32", progress=False), tensors, ckpt.config)


def bits(values):
    """Bits of float32 values, without the sign of zeros: code 8 is -0 here, 0 in gguf-py."""
    return (np.asarray(values, np.float32) + np.float32(0)).view(np.uint32)


def check_packed(tree, tensors, config):
    """Decoded values bit-equal to gguf-py's, then the same with each row's global scale."""
    values, scales = published_from_gguf(tensors)
    for name, value in tree_from_published_names(values, config).items():
        got = matrix_values(tree[name])
        np.testing.assert_array_equal(bits(got), bits(value), err_msg=name)
    scaled = {name: values[name] * np.float32(scales[name]) for name in values}
    assert_trees_equal(tree, tree_from_published_names(scaled, config))


def test_gguf_written_by_gguf_py(tmp_path):
    tensors = files.gguf_model()
    tree = load(save(tmp_path, tensors), "bfloat16")
    packed = {name for name, leaf in tree.items() if isinstance(leaf, nvfp4.Packed)}
    assert packed == {
        "head", "qkv", "o", "dense_gate_up", "dense_down", "expert_gate_up", "expert_down", "shared_gate_up",
        "shared_down",
    }  # fmt: skip
    assert tree["qkv"].segments == (128, 64, 64)
    assert tree["expert_gate_up"].global_scale.shape == (2, 4, 2)
    tensors = {n: (k, v.astype(ml_dtypes.bfloat16) if k == "F32" and "weight" in n and "sinks" not in n else v)
               for n, (k, v) in tensors.items()}  # fmt: skip
    check_packed(tree, tensors, files.config())


def test_order_in_the_file_does_not_matter(tmp_path):
    tensors = files.gguf_model()
    first = load(save(tmp_path, tensors))
    scales_first = dict(sorted(tensors.items(), key=lambda item: (not item[0].endswith(".scale"), item[0])))
    scales_last = dict(sorted(tensors.items(), key=lambda item: (item[0].endswith(".scale"), item[0][::-1])))
    for order in (scales_first, scales_last):
        jax.tree.map(np.testing.assert_array_equal, load(save(tmp_path, order)), first)


def test_stored_vectors():
    stored = np.load(GOLDENS / "nvfp4_vectors.npz")
    codes, scales, found = jax.jit(place.repack)(stored["records"])
    values = np.asarray(nvfp4.decode(codes, scales, jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(bits(values), bits(stored["values"]))
    assert (int(found[0]), int(found[1])) == (0x7F, 0)


def test_worked_example():
    record = bytes.fromhex(
        "387e012d f0e1d2c3b4a59687 70f71e23456789ab 1032547698badcfe ff7700885aa53cc3".replace(" ", "")
    )
    codes, scales, _ = place.repack(jnp.asarray(np.frombuffer(record, np.uint8)))
    packed = "10325476efcdab89 703e75b9f72164a8 2064a8ec3175b9fd 7f805a3c7f80a5c3"
    assert bytes(np.asarray(codes)).hex() == packed.replace(" ", "")
    values = np.asarray(nvfp4.decode(codes, scales, jnp.float32))
    np.testing.assert_array_equal(values[:16], [0, 0.5, 1, 1.5, 2, 3, 4, 6, -6, -4, -3, -2, -1.5, -1, -0.5, -0.0])
    np.testing.assert_array_equal(values[16:24], [0, 2688, -1792, 672, 1344, 2688, -224, -672])
    np.testing.assert_array_equal(values[32:36], [0, 2**-9, 2**-8, 2**-7])
    np.testing.assert_array_equal(values[48:52], [-2.4375, 2.4375, 0, -0.0])


def test_device_and_host_repack_agree_on_every_scale_byte():
    records = files.records(np.random.default_rng(0), 255, 64).reshape(255, 36)
    records[:, 0] = np.arange(255)
    heard = []
    expected = nvfp4.repack_gguf(records, heard.append)
    codes, scales, found = jax.jit(place.repack)(records)
    np.testing.assert_array_equal(codes, expected[0])
    np.testing.assert_array_equal(scales, expected[1])
    assert heard == [int(found[1])] == [127]


def test_scale_byte_rules(tmp_path, caplog):
    tensors = files.gguf_model()
    data = tensors["blk.2.ffn_up_exps.weight"][1]
    data[3, 5, 0] = 0xB8
    data[0, 0, 1] = 0x7F
    place = r"blk\.2\.ffn_up_exps\.weight\[3, 5, 0\]: the scale of this block of 16 weights is 0xB8"
    with pytest.raises(CheckpointError, match=place):
        load(save(tmp_path, tensors))
    with caplog.at_level(logging.WARNING):
        ckpt = loaders.open_checkpoint(save(tmp_path, tensors), clear_scale_signs=True)
        tree = loaders.load_weights(ckpt, progress=False)
    assert "blk.2.ffn_up_exps.weight: 1 NVFP4 block scales" in caplog.text
    scales = np.asarray(tree["expert_gate_up"].scales)
    assert (scales[0, 3, 64 + 5, 0], scales[0, 0, 64, 1]) == (0x38, 0)
    assert scales.max() < 0x7F
    data[1, 1, 2] = 0xFF
    message = refused(save(tmp_path, tensors))
    assert "blk.2.ffn_up_exps.weight" in message
    assert "0xFF" in message


def test_mixed_stacks(tmp_path):
    """Layer 1's k plain in F32 and layer 3's experts plain in BF16, the rest packed: one stack with exact values."""
    tensors = files.gguf_model()
    rng = np.random.default_rng(5)
    tensors["blk.1.attn_k.weight"] = ("F32", rng.standard_normal((64, 64), np.float32))
    tensors["blk.3.ffn_down_exps.weight"] = ("BF16", files.bf16(rng, 4, 64, 64))
    del tensors["blk.1.attn_k.scale"], tensors["blk.3.ffn_down_exps.scale"]
    path = save(tmp_path, tensors)
    ckpt = loaders.open_checkpoint(path)
    assert ckpt.weight_format == "mixed"
    tree = loaders.load_weights(ckpt, dtype="float32", progress=False)
    assert isinstance(tree["qkv"], nvfp4.Scaled)
    assert isinstance(tree["expert_down"], nvfp4.Scaled)
    assert isinstance(tree["expert_gate_up"], nvfp4.Packed)
    assert float(tree["qkv"].global_scale[1, 1]) == 1.0
    check_packed(tree, tensors, files.config())
    narrow = load(path, "bfloat16")
    np.testing.assert_array_equal(matrix_values(narrow["expert_down"]), matrix_values(tree["expert_down"]))


def test_plain_gguf(tmp_path):
    tensors = {
        name: ("BF16", files.decoded(kind, data).astype(ml_dtypes.bfloat16)) if kind == "NVFP4" else (kind, data)
        for name, (kind, data) in files.gguf_model().items()
        if not name.endswith(".scale")
    }
    ckpt = loaders.open_checkpoint(save(tmp_path, tensors))
    assert ckpt.weight_format == "bf16"
    check_packed(loaders.load_weights(ckpt, dtype="float32", progress=False), tensors, files.config())


def test_global_factor_reaches_the_product(tmp_path):
    """One expert with a factor of 0.25: its matrix times a vector, against float64 by hand."""
    tensors = files.gguf_model()
    tensors["blk.2.ffn_down_exps.scale"][1][:] = [1, 1, 0.25, 1]
    tree = load(save(tmp_path, tensors))
    x = np.random.default_rng(0).standard_normal(64)
    weight = files.decoded(*tensors["blk.2.ffn_down_exps.weight"])[2].astype(np.float64) * 0.25
    got = scaled_values(tree["expert_down"])[0, 2].astype(np.float64) @ x
    np.testing.assert_allclose(got, weight @ x, rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_bad_global_scales_are_named_with_their_expert(tmp_path, value):
    tensors = files.gguf_model()
    tensors["blk.3.ffn_up_exps.scale"][1][2] = value
    message = refused(save(tmp_path, tensors))
    assert f"blk.3.ffn_up_exps.scale of expert 2 is {value}" in message


def test_scale_missing_short_or_left_over(tmp_path):
    tensors = files.gguf_model()
    scale = tensors.pop("blk.2.ffn_gate_exps.scale")
    message = refused(save(tmp_path, tensors))
    assert "1 missing: blk.2.ffn_gate_exps.scale (the global scale of the NVFP4 tensor blk.2.ffn_gate_exps" in message
    tensors["blk.2.ffn_gate_exps.scale"] = ("F32", scale[1][:3])
    assert "blk.2.ffn_gate_exps.scale is F32 [3], need F32 with 4 value(s)" in refused(save(tmp_path, tensors))
    tensors["blk.2.ffn_gate_exps.scale"] = scale
    tensors["blk.2.ffn_gate_inp.scale"] = ("F32", np.ones(1, np.float32))
    assert "1 unexpected: blk.2.ffn_gate_inp.scale" in refused(save(tmp_path, tensors))


def test_no_global_scale_at_all(tmp_path, caplog):
    """They are optional in GGUF: a file without any has them as 1, and one word says so."""
    tensors = {name: t for name, t in files.gguf_model().items() if not name.endswith(".scale")}
    with caplog.at_level(logging.WARNING):
        tree = load(save(tmp_path, tensors))
    assert len([r for r in caplog.records if "no global scale" in r.getMessage()]) == 1
    for name in ("qkv", "expert_gate_up", "head"):
        assert isinstance(tree[name], nvfp4.Packed)
        np.testing.assert_array_equal(np.asarray(tree[name].global_scale), 1)


@pytest.mark.parametrize("byte", [0x80, 0xB8, 0xFE, 0xFF])
def test_bad_block_scales_are_named_in_any_leaf_and_piece(tmp_path, monkeypatch, byte):
    """Leaves made on the host and on the device, mixed stacks, pieces that are not the first."""
    monkeypatch.setattr(assemble, "PIECE_BYTES", 2000)
    tensors = files.gguf_model()
    tensors["blk.2.attn_v.weight"][1][7, 1] = byte
    for host_bytes in (place.HOST_BYTES, 0):
        monkeypatch.setattr(place, "HOST_BYTES", host_bytes)
        with pytest.raises(CheckpointError, match=rf"blk\.2\.attn_v\.weight\[7, 16\].*0x{byte:02X}"):
            load(save(tmp_path, tensors))
    mixed = dict(tensors)
    mixed["blk.1.attn_k.weight"] = ("F32", np.zeros((64, 64), np.float32))
    del mixed["blk.1.attn_k.scale"]
    with pytest.raises(CheckpointError, match=r"blk\.2\.attn_v\.weight\[7, 16\]"):
        load(save(tmp_path, mixed))


def test_one_scale_for_all_experts(tmp_path):
    tensors = files.gguf_model()
    tensors["blk.2.ffn_gate_exps.scale"] = ("F32", np.array([0.5], np.float32))
    scales = np.asarray(load(save(tmp_path, tensors))["expert_gate_up"].global_scale)
    np.testing.assert_array_equal(scales[0, :, 0], [0.5] * 4)
    np.testing.assert_array_equal(scales[0, :, 1], tensors["blk.2.ffn_up_exps.scale"][1])


def test_input_scales_are_tolerated(tmp_path, caplog):
    tensors = files.gguf_model()
    tensors["blk.0.attn_q.input_scale"] = ("F32", np.ones(1, np.float32))
    with caplog.at_level(logging.INFO):
        load(save(tmp_path, tensors))
    assert "blk.0.attn_q.input_scale is not used" in caplog.text
    tensors["blk.0.attn_norm.input_scale"] = ("F32", np.ones(1, np.float32))
    assert "unexpected: blk.0.attn_norm.input_scale" in refused(save(tmp_path, tensors))


def test_selection_bias_only_when_zero(tmp_path):
    tensors = files.gguf_model()
    bias = np.zeros(4, np.float32)
    tensors["blk.2.exp_probs_b.bias"] = ("F32", bias)
    load(save(tmp_path, tensors))
    bias[1] = 1e-3
    assert "blk.2.exp_probs_b.bias" in refused(save(tmp_path, tensors))
    published = files.safetensors_model() | {"model.layers.3.mlp.gate.e_score_correction_bias": bias}
    message = refused(files.save_safetensors(tmp_path / "a", published))
    assert "model.layers.3.mlp.gate.e_score_correction_bias" in message


def test_packed_embedding_is_refused(tmp_path):
    tensors = files.gguf_model()
    tensors["token_embd.weight"] = ("NVFP4", files.records(np.random.default_rng(0), 128, 64))
    tensors["token_embd.scale"] = ("F32", np.ones(1, np.float32))
    assert "token_embd.weight is NVFP4, need BF16" in refused(save(tmp_path, tensors))


# -- what does not fit -----------------------------------------------------------------------------------------------


def test_missing_unexpected_and_misshapen_together(tmp_path):
    tensors = files.safetensors_model()
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"], tensors["lm_head.weight"]
    tensors["model.layers.1.self_attn.q_proj.bias"] = np.zeros(128, np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((64, 63), np.float32)
    message = refused(files.save_safetensors(tmp_path / "a", tensors))
    assert "2 missing: model.layers.2.mlp.experts.3.up_proj.weight, lm_head.weight" in message
    assert "1 unexpected: model.layers.1.self_attn.q_proj.bias" in message
    assert "1 wrong shape or type: model.layers.0.self_attn.k_proj.weight is [64, 63], need [64, 64]" in message


def test_error_stays_short_when_everything_is_wrong(tmp_path):
    values = files.JSON | {"hidden_size": 128, "num_experts": 64}
    message = refused(files.save_safetensors(tmp_path / "a", files.safetensors_model(), values=values))
    assert "missing" in message
    assert "more" in message
    assert len(message) < 8000


def test_config_of_the_folder_wins_and_contradictions_show(tmp_path):
    path = files.save_gguf(tmp_path / "m" / "model.gguf", files.gguf_model())
    (tmp_path / "m" / "config.json").write_text(json.dumps(files.JSON | {"rope_theta": 5.0}))
    assert loaders.open_checkpoint(tmp_path / "m").config.rope_theta == 5.0
    assert loaders.open_checkpoint(path).config.rope_theta == 10000.0
    assert loaders.open_checkpoint(path, config=tmp_path / "m").config.rope_theta == 5.0
    assert loaders.open_checkpoint(path, config=tmp_path / "m" / "config.json").config.rope_theta == 5.0
    assert loaders.open_checkpoint(path, config=files.config(rope_theta=7.0)).config.rope_theta == 7.0
    (tmp_path / "m" / "config.json").write_text(json.dumps(files.JSON | {"moe_intermediate_size": 128}))
    message = refused(tmp_path / "m")
    assert "blk.2.ffn_gate_exps.weight is [4, 64, 64], need [4, 128, 64]" in message


def test_configuration_errors_name_the_file(tmp_path):
    folder = files.save_safetensors(
        tmp_path / "a", files.safetensors_model(), values=files.JSON | {"hidden_act": "gelu"}
    )
    with pytest.raises(ConfigError, match=r"config\.json.*hidden_act = 'gelu'"):
        loaders.open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        loaders.open_checkpoint(folder)
    path = save(tmp_path, files.gguf_model(), files.metadata(flint__expert_gating_func=1))
    with pytest.raises(ConfigError, match=r"model\.gguf.*expert_gating_func = 1"):
        loaders.open_checkpoint(path)


def test_folders_that_are_ambiguous_or_hold_no_model(tmp_path):
    files.save_safetensors(tmp_path / "a", files.safetensors_model())
    files.save_gguf(tmp_path / "a" / "model.gguf", files.gguf_model())
    assert "both .safetensors and .gguf" in refused(tmp_path / "a")
    files.save_gguf(tmp_path / "b" / "x.gguf", files.gguf_model())
    shutil.copy(tmp_path / "b" / "x.gguf", tmp_path / "b" / "y.gguf")
    assert "2 .gguf files (x.gguf, y.gguf)" in refused(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in refused(tmp_path / "c")
    assert "neither a .gguf nor a .safetensors" in refused(tmp_path / "c" / "pytorch_model.bin")
    assert "no such file" in refused(tmp_path / "d")


def test_split_gguf_folder(tmp_path):
    from tests.loaders.test_gguf import split

    paths, tensors = split(tmp_path / "m")
    for path in (tmp_path / "m", paths[1]):
        check_packed(load(path), tensors, files.config())


def test_stop_ids_of_both_files_are_joined(tmp_path):
    folder = files.save_safetensors(tmp_path / "a", files.safetensors_model(), values=files.JSON | {"eos_token_id": 7})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7], "top_k": 20}))
    ckpt = loaders.open_checkpoint(folder)
    assert ckpt.config.eos_token_ids == (7, 9)
    assert ckpt.generation == {"eos_token_id": [9, 7], "top_k": 20}


def test_opening_reads_no_weight(tmp_path):
    """The data of a 30 TB sparse file cannot have been read: only a header of a few kilobytes exists."""
    tensors = files.safetensors_model()
    folder = files.save_safetensors(tmp_path / "a", tensors)
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    with open(file, "r+b") as f:
        f.truncate(8 + length)
        f.truncate(len(raw))
    ckpt = loaders.open_checkpoint(folder)
    assert ckpt.nbytes == sum(t.nbytes for t in tensors.values())
    assert os.stat(file).st_blocks * 512 < len(raw) // 2


# -- names, memory, progress -----------------------------------------------------------------------------------------


def test_counts_of_the_full_size_model():
    """The published checkpoint has 36,096 expert matrices and 638 other tensors."""
    published = dict(
        vocab_size=150144, hidden_size=2048, num_hidden_layers=49, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, intermediate_size=6144, moe_intermediate_size=512, shared_expert_intermediate_size=1024,
        num_experts=256, num_experts_per_tok=6, sliding_window=513, max_position_embeddings=262144,
    )  # fmt: skip
    config = files.config(**published)
    sources = list(name_map.sources(config, "safetensors", {}))
    names = [name for s in sources for name in s.names]
    assert len(names) == len(set(names)) == 36096 + 638
    assert sum(".experts." in name for name in names) == 36096
    values = sum(len(s.names) * int(np.prod(s.shape)) for s in sources)
    assert values == config.num_parameters == 39_785_287_456
    assert sum(int(np.prod(leaf.full_shape)) for leaf in name_map.leaves(config).values()) == values


def test_report_and_bar(tmp_path, capfd):
    ckpt = loaders.open_checkpoint(save(tmp_path, files.gguf_model()))
    assert ckpt.report is None
    loaders.load_weights(ckpt)
    shown = capfd.readouterr().err
    assert "loading weights" in shown
    assert "GB/s" in shown
    assert "host memory peak" in shown
    assert ckpt.report.nbytes == ckpt.nbytes
    assert 0 < ckpt.report.peak_anonymous <= ckpt.report.peak_rss


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host"], indirect=True)
def test_host_memory_is_bounded(tmp_path):
    """An 816 MB file of BF16 experts in pieces of 16 MiB: resident memory grows by the weights and at most 400 MiB.

    The CPU backend keeps the weights in host memory too, so they count; beside them there are a dozen pieces and what
    the allocator keeps. A second copy of the model, or the file's pages left with us, would break the limit.
    """
    script = textwrap.dedent("""
        import json, os, resource, sys
        import ml_dtypes, numpy as np
        import loaders
        from loaders import assemble
        assemble.PIECE_BYTES = 16 << 20
        import jax, jax.numpy as jnp
        jax.jit(lambda x: x + 1)(jnp.zeros(4)).block_until_ready()
        ckpt = loaders.open_checkpoint(sys.argv[1])
        before = assemble._status_kib("VmRSS") << 10
        resident = []
        sample = assemble._MemoryWatch.sample
        def watch(self):
            sample(self)
            resident.append(assemble._status_kib("VmRSS") << 10)
        assemble._MemoryWatch.sample = watch
        tree = loaders.load_weights(ckpt, dtype="bfloat16", progress=False)
        assert all(v.nbytes for v in jax.tree.leaves(tree))
        print(json.dumps({"before": before, "peak": max(resident), "nbytes": ckpt.nbytes}))
    """)
    changes = {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_experts": 32, "num_hidden_layers": 6}
    values = files.JSON | changes
    big = files.config(**changes)
    rng = np.random.default_rng(0)
    tensors = {}
    for source in name_map.sources(big, "safetensors", {}):
        for name in source.names:
            tensors[name] = rng.integers(0, 1 << 14, source.shape, dtype=np.uint16).view(ml_dtypes.bfloat16)
    folder = files.save_safetensors(tmp_path / "big", tensors, values=values)
    size = sum(t.nbytes for t in tensors.values())
    assert size > 700 << 20
    del tensors
    root = str(GOLDENS.parent.parent)
    environment = os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nbytes"] == size
    assert found["peak"] - found["before"] < size + (400 << 20), found
