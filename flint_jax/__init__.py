"""Flint in JAX: load a checkpoint, read, score and generate. Start with ``load`` and its docstring.

Names are imported when first used, so that light parts (configuration, errors, the HTTP layer) do not import jax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flint_jax.config import FlintConfig
    from flint_jax.errors import CheckpointError, ConfigError, FlintError, RequestError, TokenizerError
    from flint_jax.lm import Generation, LanguageModel, load
    from flint_jax.sampling_params import SamplingParams
    from flint_jax.scoring import Score, Scorer

__version__ = "0.1.0"

_HOME = {
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "FlintConfig": "config",
    "FlintError": "errors",
    "Generation": "lm",
    "LanguageModel": "lm",
    "RequestError": "errors",
    "SamplingParams": "sampling",
    "Score": "scoring",
    "Scorer": "scoring",
    "TokenizerError": "errors",
    "load": "lm",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "FlintConfig",
    "FlintError",
    "Generation",
    "LanguageModel",
    "RequestError",
    "SamplingParams",
    "Score",
    "Scorer",
    "TokenizerError",
    "load",
]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"flint_jax.{_HOME[name]}"), name)
    raise AttributeError(f"module 'flint_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
