"""Exercises with exact answers, for training the small embedded model and for measuring any model."""

from flint_jax.evals.item import HELD_OUT, TRAIN, Item
from flint_jax.evals.numbers import arithmetic, lists
from flint_jax.evals.recall import later, memory, record, telling
from flint_jax.evals.talk import talk
from flint_jax.evals.tools import beside, call, result

__all__ = [
    "HELD_OUT", "TRAIN", "Item", "arithmetic", "beside", "call", "later", "lists", "memory", "record", "result", "talk",
    "telling",
]  # fmt: skip
