"""The persistent compilation cache: on, elsewhere, off, and a folder that cannot be made."""

import shutil

import jax
import pytest

from flint_jax import compile_cache
from tests.compiled import printed


@pytest.fixture(autouse=True)
def restore():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_folder_is_private_and_used(tmp_path, monkeypatch):
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "x"))
    assert compile_cache.enable() == tmp_path / "x"
    assert (tmp_path / "x").stat().st_mode & 0o077 == 0
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "x")


def test_default_is_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.delenv(compile_cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache.enable() == tmp_path / "flint_jax" / "xla"


def test_off(monkeypatch):
    monkeypatch.setenv(compile_cache.VARIABLE, "off")
    assert compile_cache.enable() is None


def test_a_folder_that_cannot_be_made_is_said(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "file" / "x"))
    assert compile_cache.enable() is None
    assert "no compilation cache" in caplog.text


def test_memory_is_bounded_unless_the_user_says(monkeypatch):
    import os

    from flint_jax.memory import prepare_process

    pinned, share, older = (
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION",
    )  # fmt: skip
    for name in (pinned, share, older):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    prepare_process()
    assert (os.environ[pinned], os.environ[share]) == ("2", "0.92")
    monkeypatch.setenv(pinned, "16")
    monkeypatch.setenv(share, "0.5")
    prepare_process()
    assert (os.environ[pinned], os.environ[share]) == ("16", "0.5")
    monkeypatch.delenv(share)
    monkeypatch.setenv(older, "0.6")
    prepare_process()
    assert share not in os.environ  # XLA refuses both names at once


def test_utilization_is_a_share_of_the_whole_gpu(monkeypatch):
    from types import SimpleNamespace

    from flint_jax import memory

    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 92_000, "bytes_in_use": 10_000})
    monkeypatch.setattr(memory.jax, "devices", lambda: [device])
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.92")
    assert memory._free_bytes(0.46, on_host=False) == 36_000
    assert memory._free_bytes(0.99, on_host=False) == 82_000


CHILD = """
import jax, jax.monitoring
from flint_jax import compile_cache
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from flint_jax.random_weights import random_weights
from flint_jax.step import Sizes, Steps
from loaders.synthetic import preset, spread

compile_cache.enable()
counts = {"hits": 0, "misses": 0}

def listen(event, **facts):
    what = event.rpartition("/")[2].removeprefix("cache_")
    if what in counts:
        counts[what] += 1

jax.monitoring.register_event_listener(listen)
config, numerics = preset("tiny", 2), Numerics("serving", "bfloat16")
weights = jax.eval_shape(lambda: random_weights(config, numerics, weight_format="bf16", spread=spread))
steps = Steps(Flint(config, weights, numerics), Sizes(1, 8, 64, (1,), (16,), 1), allocate=False)
before = dict(counts)
steps.build()
print(len(steps.programs), counts["hits"] - before["hits"], counts["misses"] - before["misses"])
"""


def test_a_second_start_compiles_none_of_the_steps(tmp_path, monkeypatch):
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path))
    programs, hits, misses = map(int, printed(CHILD).split())
    assert programs >= 11
    assert (hits, misses) == (0, programs)
    assert printed(CHILD).split() == [str(programs), "0", "0"]  # kept as they are: nobody asks JAX's cache
    shutil.rmtree(tmp_path / "programs")
    assert printed(CHILD).split() == [str(programs), str(programs), "0"]
