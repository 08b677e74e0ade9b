"""Flint in JAX: load a checkpoint, read, score and generate. See README.md and the docstrings of ``load``."""

from flint_jax.config import FlintConfig
from flint_jax.errors import CheckpointError, ConfigError, FlintError, RequestError, TokenizerError
from flint_jax.lm import Generation, LanguageModel, load
from flint_jax.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "FlintConfig",
    "FlintError",
    "Generation",
    "LanguageModel",
    "RequestError",
    "SamplingParams",
    "TokenizerError",
    "load",
]
