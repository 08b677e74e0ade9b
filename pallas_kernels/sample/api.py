"""The next token from logits, without sorting the vocabulary.

``top_candidates`` finds the few tokens that top-k keeps (a kernel on a GPU); ``sample`` does the rest on those few in
plain jnp. Letters: B rows, V vocabulary, C = MAX_CANDIDATES.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels import dispatch
from pallas_kernels.sample import draw, mosaic, reference
from pallas_kernels.sample.shapes import MAX_CANDIDATES, MAX_TOP_K, TILE

__all__ = ["MAX_CANDIDATES", "MAX_TOP_K", "Candidates", "sample", "top_candidates"]


class Candidates(NamedTuple):
    """ids: int32 [B, C], -1 where there is none. scores: float32 [B, C], -inf there. Each row: first the tokens above
    the k-th largest score, then those equal to it, both in order of their ids."""

    ids: Int32[Array, "B C"]
    scores: Float[Array, "B C"]


def top_candidates(
    scores: Float[Array, "B V"], top_k: Int32[Array, "B"], tile_max: Float[Array, "B V16"] | None = None
) -> Candidates:
    """Every token whose score is at least the row's ``top_k``-th largest, ties included; never one at -inf.

    top_k counts as 1 below 1 and as MAX_TOP_K above it. tile_max: the largest of each 16 scores, where the caller has
    it (the head's kernel gives it); NaN counts as larger than everything. Only exact ties of the k-th score can make
    more than C candidates; some of those, those with high ids, are then left out.
    """
    if scores.shape[-1] % TILE == 0 and tile_max is None:
        tile_max = jnp.max(scores.reshape(*scores.shape[:-1], -1, TILE), axis=-1)
    implementations = {"mosaic": mosaic.top_candidates, "reference": reference.top_candidates}
    return Candidates(*dispatch.run("sample.top_candidates", implementations, scores, top_k, tile_max))


def sample(
    scores: Float[Array, "B V"],
    *,
    temperature: Float[Array, "B"],
    top_k: Int32[Array, "B"],
    top_p: Float[Array, "B"],
    min_p: Float[Array, "B"],
    key: UInt32[Array, "B 2"],
    position: Int32[Array, "B"],
    greedy: Bool[Array, "B"],
    tile_max: Float[Array, "B V16"] | None = None,
) -> Int32[Array, "B"]:
    """One token per row: temperature, min-p, top-k, top-p, then a Gumbel-max draw; the best token where ``greedy``.

    For rows that are greedy or keep at most MAX_TOP_K tokens by top-k; scores: after bias and penalties. temperature
    must be above zero. The noise of a token depends on (key, position, its id) alone: threefry bits of
    ``jax.random.bits(fold_in(key, position), (V,))``. -1 where the row holds NaN or +inf, or nothing above -inf.
    """
    candidates = top_candidates(scores, top_k, tile_max)
    return draw.draw(
        candidates.ids,
        candidates.scores,
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        key=key,
        position=position,
        greedy=greedy,
    )


def supports(top_k: int, vocab: int) -> bool:
    """Whether ``sample`` takes a request with this top-k (0: none) on its fast path."""
    return 1 <= top_k <= MAX_TOP_K and vocab % TILE == 0
