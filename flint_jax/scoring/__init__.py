"""Batch scoring: log-probabilities of given tokens. Start with ``Scorer`` (scorer.py).

plan.py decides what runs when and in which pages, programs.py are the compiled programs, windows.py is the rule for
sequences longer than the context, records.py and files.py are ``python -m flint_jax score``.
"""

from flint_jax.scoring.inputs import encode_pair
from flint_jax.scoring.scorer import Score, Scorer, Stats
from flint_jax.scoring.windows import Window, windows

__all__ = ["Score", "Scorer", "Stats", "Window", "encode_pair", "windows"]
