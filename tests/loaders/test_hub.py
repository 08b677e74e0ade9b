"""Hub ids with a stand-in for huggingface_hub: what is asked for, what is refused; no network."""

import builtins
import fnmatch
import json
import sys
import types

import pytest

import loaders
from flint_jax.errors import CheckpointError
from loaders import hub
from tests.loaders import files

SIDE = ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"]
OTHER = [
    "README.md",
    "training_args.bin",
    "original/consolidated.safetensors",
    "configuration_flint.py",
    ".gitattributes",
]


class Fake(types.ModuleType):
    """Serves the files of a dict name -> bytes, and remembers what was fetched."""

    def __init__(self, folder, contents):
        super().__init__("huggingface_hub")
        self.folder, self.contents, self.fetched = folder, contents, []

    def HfApi(self):
        return self

    def list_repo_files(self, repo):
        return list(self.contents)

    def _fetch(self, name):
        self.fetched.append(name)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.contents[name])
        return str(path)

    def hf_hub_download(self, repo, name):
        return self._fetch(name)

    def snapshot_download(self, repo, allow_patterns):
        for name in self.contents:
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                self._fetch(name)
        return str(self.folder)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    def install(names, contents=()):
        module = Fake(tmp_path / "cache", dict.fromkeys(names, b"{}") | dict(contents))
        module.folder.mkdir(exist_ok=True)
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)
        return module

    monkeypatch.chdir(tmp_path)
    return install


def refused(name) -> str:
    with pytest.raises(CheckpointError) as caught:
        hub.resolve(name)
    return str(caught.value)


def test_sharded_safetensors(fake):
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()}
    module = fake([*SIDE, *OTHER, *shards, "model.safetensors", "x-Q4_K.gguf"], index)
    assert hub.resolve("owner/name") == module.folder
    assert set(module.fetched) == {*SIDE, *shards, *index}
    module = fake([*SIDE, shards[0]], index)
    assert shards[1] in refused("owner/name")


def test_single_safetensors_and_ambiguous_sets(fake):
    module = fake([*SIDE, *OTHER, "model.safetensors"])
    hub.resolve("owner/name")
    assert set(module.fetched) == {*SIDE, "model.safetensors"}
    fake([*SIDE, "a.safetensors", "b.safetensors"])
    assert "a.safetensors, b.safetensors" in refused("owner/name")
    fake(OTHER[:2])
    assert "neither .safetensors nor .gguf" in refused("owner/name")


def test_gguf(fake):
    module = fake([*OTHER[:2], "flint[nvfp4].gguf"])
    assert hub.resolve("owner/name") == module.folder / "flint[nvfp4].gguf"
    assert module.fetched == ["flint[nvfp4].gguf"]
    names = ["flint-bf16.gguf", "sub/flint-nvfp4.gguf"]
    module = fake(names)
    message = refused("owner/name")
    assert all(name in message for name in names)
    assert "owner/name:FILE.gguf" in message
    assert hub.resolve("owner/name:sub/flint-nvfp4.gguf") == module.folder / "sub/flint-nvfp4.gguf"
    assert module.fetched == ["sub/flint-nvfp4.gguf"]
    assert "no x.gguf; there: flint-bf16.gguf" in refused("owner/name:x.gguf")


def test_split_gguf(fake):
    parts = [f"flint-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    module = fake([*parts, "other.gguf"])
    assert hub.resolve(f"owner/name:{parts[1]}") == module.folder / parts[1]
    assert module.fetched == parts
    module = fake(parts)
    assert hub.resolve("owner/name") == module.folder / parts[0]


def test_open_checkpoint_by_hub_id(fake):
    content = {"m.gguf": (files.GOLDENS / "T2-nvfp4" / "T2-nvfp4.gguf").read_bytes()}
    fake([], content)
    assert loaders.open_checkpoint("owner/name").config.num_hidden_layers == 6


def test_local_paths_never_ask_the_hub(fake, tmp_path):
    module = fake(["model.safetensors"])
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert str(hub.resolve("owner/name")) == "owner/name"
    for path in ("./a/b", "/a/b", "a/b/c", "a", "a/b.gguf", "a/model.safetensors", "..", "a/.."):
        assert str(hub.resolve(path)) in (path, path.removeprefix("./"))
    assert module.fetched == []


def test_failures_are_explained(fake, monkeypatch):
    module = fake([])
    monkeypatch.setattr(module, "list_repo_files", lambda repo: (_ for _ in ()).throw(OSError("no route to host")))
    assert "the download failed: OSError: no route to host" in refused("owner/name")
    monkeypatch.delitem(sys.modules, "huggingface_hub")
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "huggingface_hub":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'flint-jax[hub]'" in refused("owner/name")
