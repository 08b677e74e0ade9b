"""Log-probabilities of prompt tokens, from the hidden states that a prefill chunk left."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flint_jax import sampling
from flint_jax.model import Flint

BLOCK = 64  # positions whose logits exist at once: 39 MB at 151,552 tokens of vocabulary


def score(model: Flint, hidden: Float[Array, "T D"], targets: Int[Array, " T"], *, k: int):
    """(log p, ids, log p of the ids, rank) of ``sampling.logprobs`` for the token that follows each position.

    hidden: what ``Flint.hidden`` gave for T positions. targets: int32 [T], the tokens that follow; of a position whose
    target means nothing the figures mean nothing. k: alternatives a position.
    """
    block = BLOCK if targets.shape[0] % BLOCK == 0 else targets.shape[0]
    pieces = hidden.reshape(-1, block, hidden.shape[-1]), targets.reshape(-1, block)
    found = jax.lax.map(lambda piece: sampling.logprobs(model.logits(piece[0]), piece[1], k), pieces)
    return jax.tree.map(lambda a: jnp.reshape(a, (targets.shape[0], *a.shape[2:])), found)
