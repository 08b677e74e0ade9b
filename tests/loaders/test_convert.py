"""Conversion between the formats: bit-exact round trips, rounding where it must be, nothing half-written loads."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf as reference_gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flint_jax
import loaders
from flint_jax.errors import CheckpointError, ConfigError, FlintError, RequestError, TokenizerError
from loaders import describe, export, gguf, orbax, partial, safetensors, synthetic, writers
from loaders.convert import convert
from loaders.convert import main as command
from pallas_kernels import nvfp4
from tests.loaders import files
from tests.model.test_oracle import PYTHON

GOLDENS = Path(__file__).parents[1] / "goldens"
PACKED = GOLDENS / "T2-nvfp4" / "T2-nvfp4.gguf"
# NVFP4 in GGUF needs rows of whole 64s.
CONFIG = synthetic.preset("tiny", 3, vocab_size=448, num_experts=4, num_experts_per_tok=2, sliding_window=9)


def tensors(path):
    opened = gguf.open_gguf(path) if Path(path).suffix == ".gguf" else safetensors.open_safetensors(path)
    return {name: (t.kind, t.shape, np.asarray(t.array()).tobytes()) for name, t in opened.tensors.items()}


def tree(path, dtype="stored"):
    return loaders.load_weights(loaders.open_checkpoint(path), dtype=dtype, progress=False)


def assert_same(a, b):
    for (path, x), (other, y) in zip(jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b), strict=True):
        assert path == other
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def assert_speaks_the_same(a, b):
    a, b = loaders.open_checkpoint(a), loaders.open_checkpoint(b)
    assert a.config == b.config
    assert a.chat_template == b.chat_template
    if a.tokenizer is None:
        assert b.tokenizer is None
        return
    cases = json.loads((GOLDENS / "tokenizer_cases.json").read_text())["encodings"]
    for case in cases:
        ids = a.tokenizer.encode(case["text"])
        assert b.tokenizer.encode(case["text"]) == ids
        assert b.tokenizer.decode(ids, skip_special_tokens=True) == a.tokenizer.decode(ids, skip_special_tokens=True)
        assert b.tokenizer.encode(case["text"], special=False) == a.tokenizer.encode(case["text"], special=False)
    assert b.tokenizer.eog_ids == a.tokenizer.eog_ids
    assert (b.tokenizer.bos_token, b.tokenizer.pad_token) == (a.tokenizer.bos_token, a.tokenizer.pad_token)


@pytest.mark.parametrize("name", ["T1", "T2"])
def test_safetensors_through_gguf_and_orbax(tmp_path, name):
    """T1's routers and sinks are F32 that BF16 cannot hold and it has no tokenizer; T2 is in shards with one."""
    source = GOLDENS / name
    convert(source, tmp_path / "a.gguf")
    convert(tmp_path / "a.gguf", tmp_path / "b.orbax")
    convert(tmp_path / "b.orbax", tmp_path / "c")
    assert tensors(tmp_path / "c") == tensors(source)
    for made in ("a.gguf", "b.orbax", "c"):
        assert_speaks_the_same(source, tmp_path / made)
    convert(source, tmp_path / "d.orbax")
    assert_same(tree(tmp_path / "d.orbax"), tree(source))
    assert loaders.open_checkpoint(tmp_path / "d.orbax").generation == loaders.open_checkpoint(source).generation
    assert not list(tmp_path.glob("*.partial"))


def test_nvfp4_through_orbax_and_back(tmp_path):
    """Every byte of every tensor; packed leaves stay packed on the way."""
    convert(PACKED, tmp_path / "a.orbax")
    assert loaders.open_checkpoint(tmp_path / "a.orbax").weight_format == "nvfp4"
    assert isinstance(tree(tmp_path / "a.orbax")["expert_down"], nvfp4.Packed)
    convert(tmp_path / "a.orbax", tmp_path / "b.gguf")
    assert tensors(tmp_path / "b.gguf") == tensors(PACKED)
    assert_speaks_the_same(PACKED, tmp_path / "a.orbax")
    assert_speaks_the_same(PACKED, tmp_path / "b.gguf")
    for dtype in ("bfloat16", "float32"):
        assert_same(tree(tmp_path / "a.orbax", dtype), tree(PACKED, dtype))
    convert(PACKED, tmp_path / "c.gguf")
    assert gguf.read_metadata(tmp_path / "c.gguf")["tokenizer.ggml.merges"] == _merges(PACKED)


def _merges(path):
    return gguf.read_metadata(path)["tokenizer.ggml.merges"]


def test_decoding_to_bf16_rounds_once(tmp_path):
    convert(PACKED, tmp_path / "a")
    packed, plain = tree(PACKED), tree(tmp_path / "a")
    for name in ("qkv", "expert_gate_up", "expert_down", "head"):
        leaf = packed[name]
        exact = (
            nvfp4.decode_numpy(np.asarray(leaf.codes), np.asarray(leaf.scales))
            * np.asarray(leaf.row_scale())[..., None]
        )
        np.testing.assert_array_equal(np.asarray(plain[name]), exact.astype(ml_dtypes.bfloat16))
    assert_speaks_the_same(PACKED, tmp_path / "a")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "model"
    synthetic.write_safetensors(folder, CONFIG, seed=3)
    return folder


def test_quantising_to_nvfp4(tmp_path, published):
    """Read back by gguf-py: every weight is the nearest that its scales allow; scales are shared where they must be."""
    path = tmp_path / "q.gguf"
    convert(published, path, weight_format="nvfp4")
    read = {t.name: t for t in reference_gguf.GGUFReader(path).tensors}
    source = safetensors.open_safetensors(published).tensors
    codes = np.unique(nvfp4.E2M1)
    for ours, theirs in [
        ("blk.2.attn_k", "model.layers.2.self_attn.k_proj"),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj"),
        ("output", "lm_head"),
        ("blk.2.ffn_up_exps", "model.layers.2.mlp.experts.3.up_proj"),
    ]:
        scales = read[ours + ".scale"].data.reshape(-1)
        want = np.asarray(source[theirs + ".weight"].array(), np.float32)
        tensor = read[ours + ".weight"]
        assert tensor.tensor_type.name == "NVFP4"
        got = reference_gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got, scale = (got[3], scales[3]) if "exps" in ours else (got, scales[0])
        block = want.reshape(*want.shape[:-1], -1, 16) / scale
        step = (np.abs(block).max(-1) / 6).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)[..., None]
        nearest = np.abs(block[..., None] / step[..., None] - codes).min(-1) * step
        error = np.abs(got.reshape(block.shape) - block)
        np.testing.assert_allclose(error, nearest, atol=2e-5 * np.abs(block).max())
        assert 0.05 < np.sqrt((error**2).mean() / (block**2).mean()) < 0.13
    for group in (["attn_q", "attn_k", "attn_v"], ["ffn_gate_exps", "ffn_up_exps"], ["ffn_gate_shexp", "ffn_up_shexp"]):
        scales = [read[f"blk.2.{name}.scale"].data for name in group]
        assert all(np.array_equal(s, scales[0]) for s in scales)
    ckpt = loaders.open_checkpoint(path)
    assert (ckpt.weight_format, ckpt.config) == ("nvfp4", loaders.open_checkpoint(published).config)
    # What is NVFP4 already is not quantised again.
    convert(path, tmp_path / "again.gguf", weight_format="nvfp4")
    assert tensors(tmp_path / "again.gguf") == tensors(path)


def test_a_tree_in_float32_as_after_training(tmp_path, published):
    """save_checkpoint of numbers that BF16 cannot hold: rounded once in BF16, kept in Orbax, packed in NVFP4."""
    rng = np.random.default_rng(0)
    weights = {k: v.astype(jnp.float32) * (1 + rng.random() * 1e-3) for k, v in tree(published).items()}
    growing = jnp.arange(1, 5, dtype=jnp.float32)[:, None, None]
    wide_up = jnp.where(jnp.arange(128)[:, None] < 64, 1.0, 1.5)  # so that gate alone would choose another scale
    weights["expert_gate_up"] = weights["expert_gate_up"] * growing * wide_up
    lm = loaders.open_checkpoint(published)
    given = {"tokenizer": lm.tokenizer, "generation": lm.generation}
    export.save_checkpoint(tmp_path / "a.orbax", lm.config, weights, **given)
    assert_same(tree(tmp_path / "a.orbax"), weights)
    export.save_checkpoint(tmp_path / "b", lm.config, weights, weight_format="bf16", **given)
    back = tree(tmp_path / "b", "float32")
    np.testing.assert_array_equal(back["o"], weights["o"].astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(back["router"], weights["router"])  # F32 in the file
    assert_speaks_the_same(published, tmp_path / "b")
    export.save_checkpoint(tmp_path / "c.gguf", lm.config, weights, weight_format="nvfp4", **given)
    assert_speaks_the_same(published, tmp_path / "c.gguf")
    leaf = tree(tmp_path / "c.gguf")["expert_gate_up"]
    scales = np.asarray(leaf.global_scale)  # one for gate and up, one for each expert
    np.testing.assert_array_equal(scales[..., 0], scales[..., 1])
    largest = np.abs(np.asarray(weights["expert_gate_up"])).max((2, 3))
    np.testing.assert_allclose(scales[..., 0], largest / (448 * 6), rtol=1e-6)
    got = leaf.values(jnp.float32) * leaf.row_scale()[..., None]
    assert float(jnp.linalg.norm(got - weights["expert_gate_up"]) / jnp.linalg.norm(got)) < 0.13
    mixed = weights | {"o": nvfp4.Scaled(weights["o"].astype(jnp.bfloat16), jnp.full((3, 1), 0.5), (128,))}
    export.save_checkpoint(tmp_path / "d.orbax", lm.config, mixed)
    assert loaders.open_checkpoint(tmp_path / "d.orbax").weight_format == "mixed"
    assert_same(tree(tmp_path / "d.orbax")["o"], mixed["o"])
    convert(tmp_path / "d.orbax", tmp_path / "e")
    want = mixed["o"].values(jnp.float32) * 0.5
    np.testing.assert_array_equal(tree(tmp_path / "e")["o"], want)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_refusals(tmp_path, published, capsys, monkeypatch):
    (tmp_path / "there").mkdir()
    for options, text in [
        ({"target": tmp_path / "there"}, "exists already"),
        ({"target": tmp_path / "x", "weight_format": "nvfp4"}, "published safetensors hold BF16"),
        ({"target": tmp_path / "x.orbax", "weight_format": "bf16"}, "takes weights as they are"),
        ({"target": tmp_path / "x.gguf", "weight_format": "int8"}, "need one of keep, bf16, nvfp4"),
        ({"target": tmp_path / "x", "to": "pickle"}, "need one of safetensors, gguf, orbax"),
        ({"source": GOLDENS / "T2", "target": tmp_path / "x.gguf", "weight_format": "nvfp4"}, "multiple of 64"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            convert(**({"source": published} | options))
    weights = tree(published)
    odd = dataclasses.replace(loaders.open_checkpoint(published).config, mlp_only_layers=(0, 2))
    with pytest.raises(ConfigError, match="GGUF can only say how many layers at the start"):
        describe.config_gguf(odd)
    with pytest.raises(CheckpointError, match="not all weights are finite"):
        export.save_checkpoint(
            tmp_path / "x.gguf", CONFIG, weights | {"o": weights["o"].at[1, 2, 3].set(jnp.nan)}, weight_format="nvfp4"
        )
    with pytest.raises(CheckpointError, match="merge adapters first"):
        export.save_checkpoint(tmp_path / "x", CONFIG, weights | {"o": object()})
    with pytest.raises(CheckpointError, match="only an Orbax folder is restored to shards"):
        flint_jax.load(published, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]), progress=False)
    folder = tmp_path / "odd"
    shutil.copytree(published, folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "x+"
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(TokenizerError, match="GGUF names the rule"):
        convert(folder, tmp_path / "x.gguf")
    convert(folder, tmp_path / "x.gguf", tokenizer="none")
    assert loaders.open_checkpoint(tmp_path / "x.gguf").config == loaders.open_checkpoint(published).config
    assert command([str(published), str(tmp_path / "y.gguf"), "--format", "bf16"]) == 0
    assert "y.gguf: 0.00" in capsys.readouterr().out
    from flint_jax.__main__ import main

    assert main(["convert", str(published), str(tmp_path / "y.gguf")]) == 2
    assert "exists already" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["convert", str(tmp_path / "nothing is read"), str(tmp_path / "file" / "a" / "y.gguf")]) == 2
    assert "file: it is no folder; give another path" in capsys.readouterr().err
    monkeypatch.setattr("loaders.convert.open_checkpoint", lambda *a, **k: Path("/dev/full").write_bytes(b"x"))
    assert main(["convert", str(published), str(tmp_path / "y2.gguf")]) == 2  # one line, not a traceback
    assert "error: [Errno" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.onnx", "out.bin", "out.safetensors", "out.pt", "out.gguff"])
def test_the_ending_of_another_format_is_refused(tmp_path, published, name):
    with pytest.raises(CheckpointError, match=rf"no format here has the ending \{name[3:]}"):
        convert(published, tmp_path / name)
    assert not list(tmp_path.iterdir())
    assert export.format_of(Path(name), "safetensors") == "safetensors"
    assert [export.format_of(Path(p), None) for p in ("flint-1.5", "flint", "a.GGUF", "b.orbax")] == [
        "safetensors", "safetensors", "gguf", "orbax",
    ]  # fmt: skip


def test_signs_of_block_scales_are_cleared_on_demand(tmp_path, capsys):
    tensors = files.gguf_model()
    tensors["blk.2.ffn_up_exps.weight"][1][3, 5, 0] |= 0x80
    source = files.save_gguf(tmp_path / "signed.gguf", tensors)
    from flint_jax.__main__ import main

    for to in (["x.gguf"], ["x"], ["x.gguf", "--format", "bf16"]):
        assert main(["convert", str(source), str(tmp_path / to[0]), *to[1:], "--tokenizer", "none"]) == 2
        assert "--clear-scale-signs" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "y.gguf"), "--tokenizer", "none", "--clear-scale-signs"]) == 0
    tensors["blk.2.ffn_up_exps.weight"][1][3, 5, 0] &= 0x7F
    clean = loaders.open_checkpoint(files.save_gguf(tmp_path / "clean.gguf", tensors))
    made = loaders.open_checkpoint(tmp_path / "y.gguf")
    for a, b in zip(*(jax.tree.leaves(loaders.load_weights(c, progress=False)) for c in (made, clean)), strict=True):
        np.testing.assert_array_equal(a, b)


# -- interrupted and damaged -------------------------------------------------------------------------------------------

_DIES = """
import os, signal, sys
import orbax.checkpoint as ocp
from loaders.convert import convert
save = ocp.StandardCheckpointer.save
def dies(self, *args, **options):
    save(self, *args, **options)
    self.wait_until_finished()
    os.kill(os.getpid(), signal.SIGKILL)  # the arrays are whole, the marker is not there yet
ocp.StandardCheckpointer.save = dies
convert(sys.argv[1], sys.argv[2])
"""


def test_a_killed_save_leaves_nothing_that_loads(tmp_path, published):
    target = tmp_path / "a.orbax"
    done = subprocess.run([sys.executable, "-c", _DIES, str(published), str(target)], timeout=300, capture_output=True)
    assert done.returncode == -9, done.stderr[-2000:]
    assert not target.exists()
    left = tmp_path / "a.orbax.partial"
    assert (left / "weights").is_dir()
    with pytest.raises(CheckpointError, match="interrupted"):
        loaders.open_checkpoint(left)
    (left / "more").write_text("of an interrupted save")
    convert(published, target)  # the next attempt clears what is left
    assert not left.exists()
    assert not (target / "more").exists()
    assert not (target / partial.MARK).exists()
    assert_same(tree(target), tree(published))


@pytest.mark.parametrize("name", ["a", "a.gguf"])
def test_an_interrupted_save_of_files_leaves_nothing_that_loads(tmp_path, monkeypatch, published, name):
    calls = []

    def stops(part, nbytes, fill=export._values_of):
        calls.append(part)
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "_values_of", lambda parts, kind: stops)
    with pytest.raises(KeyboardInterrupt):
        convert(published, tmp_path / name)
    assert calls
    assert not (tmp_path / name).exists()
    with pytest.raises(FlintError):
        loaders.open_checkpoint(tmp_path / f"{name}.partial")
    monkeypatch.undo()
    convert(published, tmp_path / name)
    assert tensors(tmp_path / name)


@pytest.mark.parametrize("name", ["a", "a.gguf", "a.orbax"])
@pytest.mark.parametrize("kind", ["file", "folder", "link", "other"])
def test_a_partial_of_somebody_else_is_left_alone(tmp_path, published, name, kind):
    """Before any weight is read, and byte for byte."""
    part, other = tmp_path / f"{name}.partial", tmp_path / "precious"
    if kind == "file":
        part.write_bytes(b"precious")
    elif kind == "link":
        other.mkdir()
        (other / "notes").write_text("precious")
        part.symlink_to(other)
    elif kind == "folder":
        part.mkdir()
        (part / "notes").write_text("precious")
    else:  # what a save of the other kind leaves
        _interrupted(partial.new_folder(tmp_path / name) if name == "a.gguf" else _file(tmp_path / name))
    before = sorted((str(p), p.read_bytes() if p.is_file() else b"") for p in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=rf"{name}.partial is in the way.* left as it is; move it"):
        convert(published, tmp_path / name)
    assert sorted((str(p), p.read_bytes() if p.is_file() else b"") for p in tmp_path.rglob("*")) == before


def _file(path):
    return partial.new_file(path, replace=False)


def _interrupted(saving):
    with contextlib.suppress(KeyboardInterrupt), saving:
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["a", "a.gguf"])
def test_two_saves_of_one_name(tmp_path, published, name):
    """The second is refused while the first runs; what appears under the name meanwhile stays."""
    path = tmp_path / name
    saving = partial.new_folder(path) if name == "a" else _file(path)
    saving.__enter__()
    with pytest.raises(CheckpointError, match=r"another process is writing .*partial; wait"):
        convert(published, path)
    path.write_text("precious")
    with pytest.raises(CheckpointError, match=r"exists already.*What has been written is in .*partial"):
        saving.__exit__(None, None, None)
    assert path.read_text() == "precious"
    with pytest.raises(CheckpointError, match="exists already"):
        convert(published, path)
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(published, path)
    path.unlink()
    (tmp_path / f"{name}.partial").rename(tmp_path / "moved")
    empty = tmp_path / f"{name}.partial"
    empty.touch() if name == "a.gguf" else empty.mkdir()  # of a save killed at once
    convert(published, path)
    assert tensors(path)
    assert not empty.exists()


def test_adapters_and_other_files_keep_to_the_same_rule(tmp_path):
    (tmp_path / "x.safetensors.partial").write_bytes(b"precious")
    values = writers.from_array("a", np.ones(3, np.float32))
    with pytest.raises(CheckpointError, match="is in the way"):
        writers.write_safetensors_file(tmp_path / "x.safetensors", [values], {})
    for count in (3, 2):  # the second takes the place of the first
        values = writers.from_array("a", np.ones(count, np.float32))
        writers.write_safetensors_file(tmp_path / "y.safetensors", [values], {"k": "v"})
        assert safetensors.open_safetensors(tmp_path / "y.safetensors").metadata == {"k": "v"}
        assert tensors(tmp_path / "y.safetensors") == {"a": ("F32", (count,), np.ones(count, np.float32).tobytes())}


def test_the_name_goes_through_every_pair_of_formats(tmp_path, published):
    """What a GGUF calls general.name; a format that has none yet gives the name of its path."""
    name = "Flïnt 40B, the second"
    ckpt = loaders.open_checkpoint(published)
    first = export.save_checkpoint(tmp_path / "first.gguf", ckpt.config, tree(published), name=name)
    made = {"gguf": first}
    for ending in ("orbax", "st"):
        made[ending] = convert(first, tmp_path / f"first.{ending}")
    for one, path in list(made.items()):
        assert loaders.open_checkpoint(path).name == name
        for other in ("gguf", "orbax", "st"):
            made[one + other] = convert(path, tmp_path / f"{one}-{other}.{other}")
            assert loaders.open_checkpoint(made[one + other]).name == name, (one, other)
    assert reference_gguf.GGUFReader(made["orbaxgguf"]).get_field("general.name").contents() == name
    assert gguf.read_metadata(made["stgguf"])["general.name"] == name
    # Without one of its own.
    assert ckpt.name == "model"
    convert(published, tmp_path / "b.orbax")
    assert loaders.open_checkpoint(convert(tmp_path / "b.orbax", tmp_path / "c.gguf")).name == "model"
    for path, name in (("d.gguf", "d"), ("e.orbax", "e"), ("f-1.5", "f-1.5")):
        export.save_checkpoint(tmp_path / path, ckpt.config, tree(published))
        assert loaders.open_checkpoint(tmp_path / path).name == name
    _edit(tmp_path / "e.orbax", "name", 3)  # as in a folder that was written before it had one
    assert loaders.open_checkpoint(tmp_path / "e.orbax").name == "e.orbax"
    hub = tmp_path / "models--owner--Flint-40B" / "snapshots" / "0123abcd"
    hub.parent.mkdir(parents=True)
    hub.symlink_to(published)
    assert loaders.open_checkpoint(hub).name == "Flint-40B"


@pytest.fixture(scope="module")
def saved(tmp_path_factory, published):
    return convert(published, tmp_path_factory.mktemp("saved") / "a.orbax")


def test_a_damaged_orbax_folder_is_refused(tmp_path, saved):
    for damage, text in [
        (lambda f: next((f / "weights" / "ocdbt.process_0" / "d").iterdir()).unlink(), "missing, need"),
        (lambda f: (f / "weights" / "_METADATA").write_text("{}"), "2 bytes, need"),
        (lambda f: (f / orbax.MARKER).write_text("{"), "damaged"),
        (lambda f: _edit(f, "version", 9), "version 9; this program reads 1"),
        (lambda f: _edit(f, "leaves", {}), "do not fit config.json"),
    ]:
        folder = tmp_path / "damaged"
        shutil.copytree(saved, folder)
        damage(folder)
        with pytest.raises(CheckpointError, match=text):
            loaders.open_checkpoint(folder)
        shutil.rmtree(folder)


def _edit(folder, key, value):
    path = folder / orbax.MARKER
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "arrays", "o"]), inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(["version", "leaves", "files", "o", "kind", "arrays"]), value=_JSON)
def test_any_marker_is_read_or_refused(tmp_path, saved, key, value):
    marker = json.loads((saved / orbax.MARKER).read_text())
    marker["files"] = {}
    if key == "o":
        marker["leaves"]["o"] = value
    elif key in ("kind", "arrays"):
        marker["leaves"]["o"][key] = value
    else:
        marker[key] = value
    (tmp_path / orbax.MARKER).write_text(json.dumps(marker))
    try:
        plan = orbax.open_plan(tmp_path, loaders.open_checkpoint(saved).config)
    except CheckpointError:
        return
    assert plan.nbytes > 0


# -- shards, and transformers ------------------------------------------------------------------------------------------

_SHARDED = """
import sys
import jax, numpy as np
jax.config.update("jax_numpy_dtype_promotion", "strict")
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import flint_jax
mesh = Mesh(np.array(jax.devices()), ("x",))
def where(name, array):
    if name.startswith("expert_") and array.ndim >= 3:
        return NamedSharding(mesh, P(None, "x"))
    return NamedSharding(mesh, P())
lm = flint_jax.load(sys.argv[1], dtype="float32", numerics="transformers", sharding=where, progress=False)
leaf = lm.model.stacks["expert_gate_up"].get_value()
for plane in jax.tree.leaves(leaf):
    assert plane.sharding == where("expert_gate_up.", plane), plane.sharding
    assert {s.data.shape[1] * 2 for s in plane.addressable_shards} == {plane.shape[1]}
assert len(lm.model.stacks["embed"].get_value().sharding.device_set) == 2
from flint_jax.compilations import watch
scorer = flint_jax.Scorer(lm, tokens=128, max_length=128, batch_invariant=True)
scorer.warm_up()
compiled = watch()
compiled.mark_ready()
scores = scorer.score([([7] * 100, [1, 2]), ([7] * 100, [3, 4, 5]), ([1], [2])])
assert compiled.after_ready == 0
assert scorer._pages.k.sharding.is_fully_replicated and len(scorer._pages.k.sharding.device_set) == 2
def odd(name, array):
    return jax.sharding.SingleDeviceSharding(jax.devices()[1]) if name == "embed" else NamedSharding(mesh, P())
try:
    flint_jax.Scorer(flint_jax.load(sys.argv[1], dtype="float32", sharding=odd, progress=False))
    raise AssertionError("weights of no one mesh")
except flint_jax.RequestError as error:
    assert "without one common mesh" in str(error)
try:
    lm.make_engine(max_num_seqs=1)
    raise AssertionError("an engine that compiles ahead over shards")
except flint_jax.ConfigError as error:
    assert "the weights lie on 2 devices" in str(error)
ask = dict(temperature=0, max_tokens=3, ignore_eos=True)
tokens = lm.generate([1, 2, 3], **ask).token_ids
assert lm.generate([1, 2, 3], **ask).token_ids == tokens == tuple(lm.generate([1, 2, 3], **ask).token_ids)
np.savez(sys.argv[2], logits=lm.logits([[1, 2, 3, 4, 5]]), scores=np.concatenate([s.logprobs for s in scores]))
"""


def _deep():
    """For arrays of five axes: there is none."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, None, None, "x"))


def test_an_orbax_folder_goes_straight_to_shards(tmp_path):
    """Two CPU devices: half the experts on each, and the logits and scores of one device."""
    convert(PACKED, tmp_path / "a.orbax")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    out = tmp_path / "found.npz"
    command = [sys.executable, "-c", _SHARDED, str(tmp_path / "a.orbax"), str(out)]
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lm = flint_jax.load(PACKED, dtype="float32", numerics="transformers", progress=False)
    with np.load(out) as found:
        np.testing.assert_allclose(found["logits"], np.asarray(lm.logits([[1, 2, 3, 4, 5]])), atol=1e-4)
        scores = flint_jax.Scorer(lm, tokens=128, batch_invariant=True).score(
            [([7] * 100, [1, 2]), ([7] * 100, [3, 4, 5]), ([1], [2])]
        )
        np.testing.assert_allclose(found["scores"], np.concatenate([s.logprobs for s in scores]), atol=1e-5)


@pytest.mark.parametrize(
    ("sharding", "text"),
    [
        ("x", "sharding = 'x': need a jax.sharding.Sharding"),
        (3, "sharding = 3"),
        (jax.sharding.PartitionSpec("x"), "or a function of"),
        (jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",)), "sharding = Mesh.*need a jax.sharding.Sharding"),
        (lambda name, array: None, "sharding gave None for embed"),
        (_deep(), r"embed is \[448, 128\], which the sharding .* does not fit.*each array its own"),
    ],
)  # fmt: skip
def test_shardings_that_are_none(saved, sharding, text):
    with pytest.raises(RequestError, match=text):
        flint_jax.load(saved, sharding=sharding, progress=False)


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="no environment with transformers")
@pytest.mark.parametrize("source", [PACKED, GOLDENS / "T1"], ids=["nvfp4", "own theta"])
def test_transformers_reads_what_we_export(tmp_path, source):
    """The same float32 logits, to 2e-4 (its own noise is 4e-5), and the same tokens."""
    if source is PACKED:
        convert(source, tmp_path / "model")
    else:  # through GGUF, so that config and tokenizer are made and not copied
        convert(PACKED, tmp_path / "a.orbax")
        ckpt = loaders.open_checkpoint(tmp_path / "a.orbax")
        config = dataclasses.replace(ckpt.config, rope_theta=3000.0, sliding_window=7, rms_norm_eps=1e-5)
        export.save_checkpoint(tmp_path / "model", config, tree(tmp_path / "a.orbax"), tokenizer=ckpt.tokenizer)
    lm = flint_jax.load(tmp_path / "model", dtype="float32", numerics="transformers", progress=False)
    ids = np.random.default_rng(0).integers(0, lm.config.vocab_size, (2, 48))
    out = tmp_path / "oracle.npz"
    script = str(Path(__file__).with_name("oracle_logits.py"))
    done = subprocess.run(
        [PYTHON, script, str(tmp_path / "model"), json.dumps(ids.tolist()), str(out)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(out) as file:
        assert np.abs(np.asarray(lm.logits(ids)) - file["logits"]).max() <= 2e-4
        assert lm.tokenizer.encode("The harbour was quiet, 12345 <think>") == file["words"].tolist()
