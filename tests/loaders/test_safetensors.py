"""The safetensors reader: damage, incomplete sets and ambiguous sets end in a CheckpointError."""

import json
import logging
import random
import shutil
import time

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import loaders
from flint_jax.errors import CheckpointError
from loaders import safetensors
from tests.loaders import files


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def error(path) -> str:
    began = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        safetensors.open_safetensors(path)
    assert time.process_time() - began < 1
    return str(caught.value)


@pytest.mark.parametrize("model", ["T1", "T2"])
def test_agrees_with_the_safetensors_package(model):
    folder = files.GOLDENS / model
    ours = safetensors.open_safetensors(folder)
    count = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as theirs:
            for name in list(theirs.keys()):
                tensor, slice_ = ours.tensors[name], theirs.get_slice(name)
                assert (tensor.kind, list(tensor.shape)) == (slice_.get_dtype(), slice_.get_shape())
                count += 1
    assert len(ours.tensors) == count


def test_truncated(tmp_path):
    whole = (files.GOLDENS / "T1" / "model.safetensors").read_bytes()
    path = tmp_path / "a.safetensors"
    for length in [0, 1, 7, 8, 9, 1000, 40000, len(whole) - 4096, len(whole) - 1]:
        path.write_bytes(whole[:length])
        message = error(path)
        assert "a.safetensors" in message
    assert "truncated or incomplete download" in message
    assert str(len(whole) - 1) in message


def test_damaged_headers(tmp_path):
    path = tmp_path / "a.safetensors"
    good = entry([4], 0, 16)
    assert safetensors.open_safetensors(write(path, {"t": good}, bytes(16))).tensors["t"].shape == (4,)
    cases = {
        "at most": (b"{}", bytes(16), 2**60),
        "no JSON header": (b"[1]", b"", None),
        "not valid JSON": (b'{"t":', b"", None),
        "twice": (b'{"t":' + json.dumps(good).encode() + b',"t":' + json.dumps(good).encode() + b"}", bytes(16), None),
        "takes 20 bytes": ({"t": entry([5], 0, 16)}, bytes(16), None),
        "impossible": ({"t": entry([-4], 0, 16)}, bytes(16), None),
        "data_offsets [16, True]": ({"t": entry([4], 16, True)}, bytes(16), None),
        "truncated": ({"t": entry([8], 0, 32)}, bytes(16), None),
        "overlaps": ({"t": good, "u": entry([4], 8, 24)}, bytes(24), None),
        "the header describes": ({"t": good}, bytes(20), None),
        "no description": ({"t": 3}, bytes(16), None),
        "missing": ({"t": {"dtype": "F32"}}, bytes(16), None),
        "2 F8_E4M3": (
            {"t": entry([16], 0, 16, "F8_E4M3"), "u": entry([16], 16, 32, "F8_E4M3")},
            bytes(32),
            None,
        ),
        "1 Q9": ({"t": entry([16], 0, 16, "Q9")}, bytes(16), None),
        "is not valid": (b'{"t":' + b"[" * 200000, b"", None),
    }
    for words, (header, data, length) in cases.items():
        message = error(write(path, header, data, length))
        assert words in message or words == "is not valid", message


def test_headers_broken_at_random(tmp_path):
    whole = (files.GOLDENS / "T1" / "model.safetensors").read_bytes()
    header, rng, path = 8 + int.from_bytes(whole[:8], "little"), random.Random(1), tmp_path / "a.safetensors"
    refused, slowest = 0, 0.0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 2, 8])):
            at = rng.randrange(header) if rng.random() < 0.8 else rng.randrange(8)
            data[at] = rng.choice([0, 0x22, 0x2C, 0x39, 0x5B, 0x7B, 0xFF, rng.randrange(256)])
        path.write_bytes(data)
        once = time.process_time()
        try:
            for tensor in safetensors.open_safetensors(path).tensors.values():
                tensor.array().ravel()[-1:].tobytes()
        except CheckpointError:
            refused += 1
        slowest = max(slowest, time.process_time() - once)
    assert refused > 250
    assert slowest < 1


def test_index_names_a_file_that_is_not_there(tmp_path):
    folder = files.save_safetensors(tmp_path / "m", files.safetensors_model(), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    for path in (folder, folder / "model.safetensors.index.json", folder / "model-00001-of-00002.safetensors"):
        message = error(path)
        assert "model-00002-of-00002.safetensors" in message
        assert "incomplete download?" in message
        assert "00001" not in message.replace(str(path), "").replace("index.json", "")


def test_index_first_and_other_files_never_opened(tmp_path):
    folder = files.save_safetensors(tmp_path / "m", files.safetensors_model(), shards=2)
    (folder / "model.safetensors").write_bytes(b"not even a header")
    (folder / "consolidated.safetensors").write_bytes(b"")
    opened = safetensors.open_safetensors(folder)
    assert [p.name for p in opened.paths] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert safetensors.open_safetensors(folder / "model-00002-of-00002.safetensors").paths == opened.paths


def test_ambiguous_sets_without_an_index(tmp_path):
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "a.safetensors")
    assert list(safetensors.open_safetensors(tmp_path).tensors) == ["a"]
    save_file({"b": np.zeros(2, np.float32)}, tmp_path / "b.safetensors")
    message = error(tmp_path)
    assert "a.safetensors, b.safetensors" in message
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    (tmp_path / "c").mkdir()
    assert "no .safetensors file" in error(tmp_path / "c")
    for name in ("x", "y"):
        (tmp_path / "c" / f"{name}.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "a.safetensors"}})
        )
    assert "several indexes" in error(tmp_path / "c")


def test_index_and_files_disagree(tmp_path):
    save_file({"a": np.zeros(2, np.float32), "c": np.zeros(2, np.float32)}, tmp_path / "1.safetensors")
    save_file({"b": np.zeros(2, np.float32)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"

    def with_map(weight_map):
        index.write_text(json.dumps({"weight_map": weight_map}))
        return error(tmp_path)

    assert "tensor b is not there" in with_map({"a": "1.safetensors", "b": "1.safetensors"})
    assert "need the name of a file" in with_map({"a": "../1.safetensors"})
    assert "need the name of a file" in with_map({"a": 3})
    assert "no weight_map" in with_map({})
    index.write_text("{")
    assert "not valid JSON" in error(tmp_path)


def test_the_index_settles_where_a_tensor_is(tmp_path, caplog):
    """Copies elsewhere are not read, whatever their type; what the index leaves out is kept, with a word."""
    one, two = np.ones(2, np.float32), np.full(2, 2, np.float32)
    save_file({"a": one, "c": one, "d": one, "e": one}, tmp_path / "1.safetensors")
    save_file(
        {"b": two, "a": two, "d": two, "f": np.zeros(2, np.int64), "c": np.zeros(2, np.int64)},
        tmp_path / "2.safetensors",
    )
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "c": "1.safetensors", "b": "2.safetensors"}}))
    with caplog.at_level(logging.WARNING):
        opened = safetensors.open_safetensors(tmp_path)
    assert {name: t.file.path.name[0] for name, t in opened.tensors.items()} == {"a": "1", "c": "1", "b": "2", "e": "1"}
    np.testing.assert_array_equal(opened.tensors["a"].array(), one)
    assert opened.unlisted == {"e"}
    for name in ("a", "c"):
        assert f"{name} in 2.safetensors" in caplog.text
    assert "does not list tensors that the files hold: d, e, f" in caplog.text


def test_a_model_with_tensors_outside_its_index(tmp_path, caplog):
    """One more that nobody needs, a copy elsewhere, and one that is needed: the model loads."""
    tensors = files.safetensors_model()
    folder = files.save_safetensors(tmp_path / "m", tensors, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = [n for n, file in index["weight_map"].items() if "00001-" in file]
    second = {n: tensors[n] for n, file in index["weight_map"].items() if "00002-" in file}
    save_file(
        second | {"extra": np.zeros(2, np.float32), names[0]: np.zeros(3, np.float32)},
        folder / "model-00002-of-00002.safetensors",
    )
    del index["weight_map"][names[1]]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING):
        loaders.open_checkpoint(folder)
    assert f"{names[0]} in model-00002" in caplog.text
    assert "extra" in caplog.text
