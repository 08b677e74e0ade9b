"""The GGUF reader: damage of every kind ends in a CheckpointError, quickly and cheaply."""

import random
import resource
import shutil
import struct
import time

import gguf as gguf_py
import numpy as np
import pytest

from flint_jax.errors import CheckpointError
from loaders import gguf
from tests.loaders import files
from tests.loaders.files import info, key_u32, raw_gguf, text


def two_tensors(path):
    """Two float32 tensors of 64 and 4096 values: 16,640 bytes of data."""
    data = np.arange(64 + 4096, dtype=np.float32).tobytes()
    return raw_gguf(path, (key_u32("a.b", 7),), (info("first", (64,)), info("second", (64, 64), offset=256)), data)


def error(path) -> str:
    began, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as caught:
        gguf.open_gguf(path)
    assert time.process_time() - began < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 50 << 10
    assert len(str(caught.value)) < 1000 + len(str(path))
    assert str(path.name) in str(caught.value)
    return str(caught.value)


def test_reads_what_is_there(tmp_path):
    opened = gguf.open_gguf(two_tensors(tmp_path / "a.gguf"))
    assert opened.metadata == {"a.b": 7}
    second = opened.tensors["second"]
    assert second.shape == (64, 64)
    np.testing.assert_array_equal(second.array().ravel(), np.arange(64, 64 + 4096, dtype=np.float32))
    assert not second.array().flags.owndata


def test_agrees_with_gguf_py_on_the_golden():
    path = files.GOLDENS / "T2-nvfp4" / "T2-nvfp4.gguf"
    ours, theirs = gguf.open_gguf(path), gguf_py.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, value in fields.items():
        mine = ours.metadata[key]
        assert (mine.tolist() if isinstance(mine, np.ndarray) else mine) == value, key
    assert ours.metadata["flint.attention.rope_pattern"].dtype == bool
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.kind == tensor.tensor_type.name
        assert mine.shape == tuple(tensor.shape.tolist()[::-1])
        assert mine.array().tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("cut", [1, 4096, 16640])
def test_truncated_data_names_tensor_and_bytes(tmp_path, cut):
    path = two_tensors(tmp_path / "cut.gguf")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    message = error(path)
    assert "second" in message or cut == 16640
    assert str(size - cut) in message
    assert "truncated" in message


def test_truncated_anywhere_in_the_header(tmp_path):
    whole = two_tensors(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "b.gguf"
    for length in range(len(whole) - 16640):
        path.write_bytes(whole[:length])
        error(path)


def test_counts_that_no_file_can_hold(tmp_path):
    path = tmp_path / "a.gguf"
    for counts in [(1, 2**31), (2**31, 0), (2**63, 2**63), (0, 2**64 - 1), (5, 1)]:
        raw_gguf(path, (key_u32("a", 1),), (info("t", (8,)),), bytes(64), counts=counts)
        error(path)


@pytest.mark.parametrize("dims", [0, 5, 9, 2**32 - 1])
def test_dimension_count(tmp_path, dims):
    entry = text("t") + struct.pack("<I", dims) + struct.pack("<9Q", *[1] * 9) + struct.pack("<IQ", 0, 0)
    assert "dimensions" in error(raw_gguf(tmp_path / "a.gguf", (), (entry,), bytes(64)))


@pytest.mark.parametrize("shape", [(0,), (2**63,), (2**32, 2**32), (2**62, 2**62, 2**62, 2**62), (4, 0)])
def test_impossible_shapes(tmp_path, shape):
    error(raw_gguf(tmp_path / "a.gguf", (), (info("t", shape),), bytes(64)))


def test_string_and_array_lengths(tmp_path):
    path = tmp_path / "a.gguf"
    huge_key = struct.pack("<Q", 2**40) + b"x" * 100
    huge_value = text("k") + struct.pack("<IQ", 8, 2**40) + b"x" * 100
    strings = text("k") + struct.pack("<IIQ", 9, 8, 2**40)
    numbers = text("k") + struct.pack("<IIQ", 9, 4, 2**61)
    overflow = text("k") + struct.pack("<IIQ", 9, 10, 2**61 + 1)
    inside = text("k") + struct.pack("<IIQ", 9, 8, 3) + text("ok") + struct.pack("<Q", 2**63) + b"rest of the file"
    for key in (huge_key, huge_value, strings, numbers, overflow, inside):
        assert "damaged" in error(raw_gguf(path, (key,), (), bytes(64)))


def test_many_empty_strings_are_capped(tmp_path):
    """2^26 empty strings do fit into a sparse file of 512 MiB; believing them would take half a minute and 4 GB."""
    path = raw_gguf(tmp_path / "a.gguf", (text("k") + struct.pack("<IIQ", 9, 8, 1 << 26),))
    with open(path, "r+b") as file:
        file.truncate((1 << 29) + 4096)
    assert "strings" in error(path)


def test_unknown_value_types(tmp_path):
    path = tmp_path / "a.gguf"
    error(raw_gguf(path, (text("k") + struct.pack("<I", 13),), (), bytes(64)))
    nested = text("k") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 4, 0)
    assert "arrays of type 9" in error(raw_gguf(path, (nested,), (), bytes(64)))
    assert "neither 0 nor 1" in error(raw_gguf(path, (text("k") + struct.pack("<IB", 7, 2),), (), bytes(64)))
    assert "UTF-8" in error(raw_gguf(path, (text("k") + struct.pack("<I", 8) + text(b"\xff\xfe"),), (), bytes(64)))


def test_byte_order_magic_and_version(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(200))
    assert "big-endian" in error(path)
    path.write_bytes(b"FUGG" + struct.pack(">IQQ", 3, 1, 1) + bytes(200))
    assert "big-endian" in error(path)
    for version in (0, 1, 4, 2**31):
        assert f"version {version}" in error(raw_gguf(path, version=version, data=bytes(64)))
    path.write_bytes(b"PK\x03\x04" + bytes(200))
    assert "not a GGUF" in error(path)
    path.write_bytes(b"")
    assert "empty" in error(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "Git LFS" in error(path)


def test_version_2_reads(tmp_path):
    assert gguf.open_gguf(raw_gguf(tmp_path / "a.gguf", (), (info("t", (8,)),), bytes(32), version=2)).tensors


def test_duplicates(tmp_path):
    path = tmp_path / "a.gguf"
    assert "twice" in error(raw_gguf(path, (), (info("t", (8,)), info("t", (8,), offset=32)), bytes(64)))
    assert "twice" in error(raw_gguf(path, (key_u32("a", 1), key_u32("a", 1)), (), bytes(64)))


def test_extents(tmp_path):
    path = tmp_path / "a.gguf"
    assert "overlaps first" in error(
        raw_gguf(path, (), (info("first", (16,)), info("second", (8,), offset=32)), bytes(128))
    )
    assert "alignment" in error(raw_gguf(path, (), (info("t", (8,), offset=4),), bytes(128)))
    assert "truncated" in error(raw_gguf(path, (), (info("t", (8,), offset=2**63),), bytes(128)))
    assert "truncated" in error(raw_gguf(path, (), (info("t", (8,), offset=2**64 - 32),), bytes(128)))
    for alignment in (0, 3, 2**31):
        key = key_u32("general.alignment", alignment)
        assert "general.alignment" in error(raw_gguf(path, (key,), (info("t", (8,)),), bytes(128)))


def test_other_quantisations_are_refused_by_name(tmp_path):
    path = tmp_path / "a.gguf"
    message = error(
        raw_gguf(path, (), (info("x", (256,), 12), info("y", (256,), 12, 160), info("z", (32,), 39)), bytes(512))
    )
    assert "2 Q4_K" in message
    assert "1 MXFP4" in message
    assert "NVFP4, F32, F16, BF16" in message
    assert "unknown ggml type 99" in error(raw_gguf(path, (), (info("x", (256,), 99),), bytes(512)))
    assert "multiple of 64" in error(raw_gguf(path, (), (info("x", (96, 2), 40),), bytes(512)))


def split(folder, count=3, stem="tiny", name=None):
    """A model split into ``count`` files; the first has all metadata."""
    tensors = files.gguf_model()
    names = list(tensors)
    paths = []
    for i in range(count):
        values = files.metadata() if i == 0 else {"general.architecture": "flint"}
        values |= {"split.no": i, "split.count": count, "split.tensors.count": len(tensors)}
        path = folder / (name(i) if name else f"{stem}-{i + 1:05d}-of-{count:05d}.gguf")
        paths.append(files.save_gguf(path, {n: tensors[n] for n in names[i::count]}, values))
    return paths, tensors


def test_split_file_from_any_part(tmp_path):
    paths, tensors = split(tmp_path)
    for path in paths:
        opened = gguf.open_gguf(path)
        assert opened.paths == tuple(paths)
        assert opened.metadata["general.name"] == "tiny"
        assert set(opened.tensors) == set(tensors)
        assert gguf.read_metadata(path)["general.name"] == "tiny"


def test_split_file_order_comes_from_the_headers(tmp_path):
    paths, _ = split(tmp_path)
    paths[0].rename(tmp_path / "swap")
    paths[2].rename(paths[0])
    (tmp_path / "swap").rename(paths[2])
    assert gguf.open_gguf(paths[1]).paths == tuple(paths[::-1])
    loose, _ = split(tmp_path / "loose", name=lambda i: "xca"[i] + ".gguf")
    assert gguf.open_gguf(loose[2]).paths == tuple(loose)


def test_split_file_with_a_part_missing(tmp_path):
    paths, _ = split(tmp_path)
    paths[2].unlink()
    message = error(paths[1])
    assert "tiny-00003-of-00003.gguf" in message
    assert "incomplete download" in message


def test_split_file_with_a_part_twice(tmp_path):
    paths, _ = split(tmp_path)
    shutil.copy(paths[0], paths[2])
    with pytest.raises(CheckpointError, match="part 1 of 3, but tiny-00001-of-00003"):
        gguf.open_gguf(paths[1])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("split.tensors.count", 7),
        ("general.architecture", "llama"),
        ("general.file_type", 1),
        ("general.name", "another"),
        ("flint.block_count", 5),
        ("flint.attention.rope_pattern", [True, False, True, False]),
        ("general.uuid", "only here"),
    ],
)
def test_split_file_whose_parts_say_different_things(tmp_path, key, value):
    paths, tensors = split(tmp_path)
    names = list(tensors)
    values = files.metadata() | {"split.no": 1, "split.count": 3, "split.tensors.count": len(tensors)}
    part = {n: tensors[n] for n in names[1::3]}
    files.save_gguf(paths[1], part, values)  # the first part's words again
    assert gguf.open_gguf(paths[0]).paths == tuple(paths)
    files.save_gguf(paths[1], part, values | {key: value})
    for read in (gguf.open_gguf, gguf.read_metadata):
        for path in paths[1:]:
            with pytest.raises(CheckpointError, match=rf"00002-of-00003.gguf: {key} = .*part 1.*00001-of-00003"):
                read(path)


def test_headers_broken_at_random(tmp_path):
    """3000 mutations of a small valid file: each loads or raises CheckpointError, in a moment."""
    tensors = {k: v for k, v in files.gguf_model().items() if "blk" not in k}
    values = files.metadata() | {"tokenizer.ggml.tokens": ["a", "bc", "ü"], "x.scores": [1.0, 2.0]}
    whole = files.save_gguf(tmp_path / "a.gguf", tensors, values).read_bytes()
    header = min(t.offset for t in gguf.open_gguf(tmp_path / "a.gguf").tensors.values())
    path, rng, refused = tmp_path / "b.gguf", random.Random(0), 0
    interesting = [0, 1, 0x7F, 0x80, 0xFF]
    began, slowest = time.process_time(), 0.0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            at = rng.randrange(header)
            action = rng.randrange(5)
            if action == 0:
                data[at] = rng.choice(interesting)
            elif action == 1:
                data[at] ^= 1 << rng.randrange(8)
            elif action == 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**16, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]))
            elif action == 3:
                del data[at : at + rng.randrange(1, 64)]
            else:
                data[at:at] = bytes(rng.choices(interesting, k=rng.randrange(1, 16)))
        path.write_bytes(data)
        once = time.process_time()
        try:
            for tensor in gguf.open_gguf(path).tensors.values():
                tensor.array()[..., -1].tobytes()
        except CheckpointError:
            refused += 1
        slowest = max(slowest, time.process_time() - once)
    assert refused > 1200
    assert slowest < 1
    assert time.process_time() - began < 60
