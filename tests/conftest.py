"""Strict dtypes everywhere; CPU unless a GPU is really there."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Half the compile time of a step on two cores (8.3 -> 3.9 s of CPU time for a 9-layer decode step); same results.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
# ``flint_jax.load`` turns the compile cache on. Here it would carry programs from one run, and one worker, to another.
jax.config.update("jax_enable_compilation_cache", False)

# The same examples on every run, so that a change is red for what it changed; HYPOTHESIS_PROFILE=default tries others.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items):
    """Tests marked gpu skip themselves where there is none."""
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
