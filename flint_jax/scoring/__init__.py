"""Batch scoring: log-probabilities of given tokens. Start with ``Scorer`` (scorer.py).

plan.py decides what runs when and in which pages, programs.py are the compiled programs, rolling.py is the rule for
sequences longer than the context, inputs.py makes token ids; records.py, files.py and command.py are ``python -m
flint_jax score``. Names are imported when first used, so that the command line's parser does not import jax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flint_jax.scoring.inputs import encode_pair
    from flint_jax.scoring.rolling import Window, windows
    from flint_jax.scoring.scorer import Score, Scorer, Stats

_HOME = {
    "Score": "scorer",
    "Scorer": "scorer",
    "Stats": "scorer",
    "Window": "rolling",
    "encode_pair": "inputs",
    "windows": "rolling",
}

__all__ = ["Score", "Scorer", "Stats", "Window", "encode_pair", "windows"]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"flint_jax.scoring.{_HOME[name]}"), name)
    raise AttributeError(f"module 'flint_jax.scoring' has no attribute {name!r}")
