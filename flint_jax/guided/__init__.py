"""Forced output: from what a request wants its output held to, to a mask over the vocabulary for every token."""

from flint_jax.guided.compiler import Compiler
from flint_jax.guided.constraint import Constraint, Tracker
from flint_jax.guided.vocabulary import Vocabulary

__all__ = ["Compiler", "Constraint", "Tracker", "Vocabulary"]
