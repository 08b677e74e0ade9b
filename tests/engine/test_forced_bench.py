"""bench forced says what it did, on a machine without the server's packages; how much is for the device to say."""

import json
import os
import subprocess
import sys

import pytest

from flint_jax import forced_bench
from flint_jax.bench import main
from flint_jax.errors import RequestError

BLOCKED = ("starlette", "uvicorn", "gguf", "prometheus_client", "openai", "anthropic", "huggingface_hub", "safetensors")
PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"{{name}} is not on this machine", name=name)

sys.meta_path.insert(0, Absent())
from flint_jax import bench
sys.exit(bench.main({arguments}))
"""


def test_what_a_grammar_costs_without_the_servers_packages():
    sizes = {"layers": 3, "context": 20, "tokens": 14, "rounds": 2}
    arguments = ["forced", "--preset", "tiny", "--format", "bf16", *(f"--{k}={v}" for k, v in sizes.items())]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocked=BLOCKED, arguments=arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    free, *held = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["output"] for row in (free, *held)] == ["free", "text", "digits", "json"]
    assert {"decode_call_us", "redraw_call_us"} < set(free)
    for row in held:
        low, high = row["cost_range"]
        assert low <= row["cost"] <= high
        assert row["mask_us"] > 0
        assert row["push_us"] > 0
    text, digits, strings = (row["allowed"] for row in held)
    assert 0 < digits < 0.1 < text < 1
    assert 0 < strings < 1


@pytest.mark.parametrize("wrong", [("--kinds", "prose"), ("--context", "0"), ("--tokens", "9"), ("--rounds", "0")])
def test_arguments_that_make_no_bench(wrong, monkeypatch):
    monkeypatch.setattr(forced_bench, "_model", None)  # refused before anything is made
    with pytest.raises(RequestError, match=f"{wrong[0]} {wrong[1]}: need"):
        main(["forced", *wrong])
