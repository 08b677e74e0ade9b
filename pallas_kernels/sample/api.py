"""The next token from logits, without sorting the vocabulary: a kernel on a GPU, plain jnp elsewhere.

``sample`` draws from settings given row by row; ``advance`` draws for slots, whose settings and progress lie in packed
arrays on the device, and writes the slots back, so that a step needs nothing else behind the head. Letters: B rows,
V vocabulary, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels import dispatch
from pallas_kernels.sample import mosaic, reference
from pallas_kernels.sample.shapes import MAX_CANDIDATES, MAX_TOP_K, TILE

__all__ = ["MAX_CANDIDATES", "MAX_TOP_K", "Slots", "advance", "sample", "supports"]


class Slots(NamedTuple):
    """What ``advance`` changes of the slots: their counters, progress, and how often they drew each token."""

    wholes: Int32[Array, "S W"]
    progress: Int32[Array, "S 4"]
    out_count: Int32[Array, "S V"]


def _maxima(scores, tile_max):
    if scores.shape[-1] % TILE == 0 and tile_max is None:
        return jnp.max(scores.reshape(*scores.shape[:-1], -1, TILE), axis=-1)
    return tile_max


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

    For rows that are greedy or keep at most MAX_TOP_K tokens by top-k, ties with the last one included (top_k counts as
    1 below 1 and as MAX_TOP_K above it; of more than MAX_CANDIDATES tied tokens those with high ids are left out);
    scores: after bias and penalties. temperature: at least 0.01. The noise of a token depends on (key, position, its
    id) alone: threefry bits of ``jax.random.bits(fold_in(key, position), (V,))``. -1 where the row holds NaN or +inf,
    or nothing above -inf. tile_max: the largest of each 16 scores, NaN when one is, where the caller has it (the head's
    kernel gives it).
    """
    implementations = {"mosaic": mosaic.sample, "reference": reference.sample}
    return dispatch.run(
        "sample.sample",
        implementations,
        scores,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        key=key,
        position=position,
        greedy=greedy,
        tile_max=_maxima(scores, tile_max),
    )


def advance(
    scores: Float[Array, "B V"],
    tile_max: Float[Array, "B V16"] | None,
    slots: Int32[Array, "B"],
    reals: Float[Array, "S R"],
    key: UInt32[Array, "S 2"],
    wholes: Int32[Array, "S W"],
    progress: Int32[Array, "S 4"],
    out_count: Int32[Array, "S V"],
) -> Slots:
    """``sample`` for each row's slot at its position + 1, and the slot moved on by the token; columns: see ``shapes``.

    slots: distinct. A row whose slot is out of range or not active changes nothing. Otherwise token and position are
    replaced, and the slot stays active unless the token is a stop id or -1, or the position has reached the limit. A
    token other than -1 counts in "generated" and out_count. A temperature below 1e-5 is greedy, one between that and
    0.01 counts as 0.01. Donate the last three, or XLA copies them first.
    """
    implementations = {"mosaic": mosaic.advance, "reference": reference.advance}
    arguments = (scores, _maxima(scores, tile_max), slots, reals, key, wholes, progress, out_count)
    return Slots(*dispatch.run("sample.advance", implementations, *arguments))


def supports(top_k: int, vocab: int) -> bool:
    """Whether ``sample`` takes a request with this top-k (0: none)."""
    return 1 <= top_k <= MAX_TOP_K and vocab % TILE == 0
