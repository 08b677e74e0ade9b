"""Strict dtypes everywhere; CPU unless a GPU is really there."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
