"""Candidates, draw and the slots' progress in plain jnp."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.sample import draw
from pallas_kernels.sample.shapes import (
    GREEDY_BELOW,
    LOWEST_TEMPERATURE,
    MAX_CANDIDATES,
    MAX_TOP_K,
    PROGRESS,
    REALS,
    WHOLES,
)


def sample(scores, *, top_k, tile_max=None, **settings):
    """See ``api.sample``."""
    return draw.draw(*top_candidates(scores, top_k), **settings)


def advance(scores, tile_max, slots, reals, key, wholes, progress, out_count):
    """See ``api.advance``."""
    total = progress.shape[0]
    known = (slots >= 0) & (slots < total)
    safe = jnp.where(known, slots, 0)
    reals, key, mine, before = (x[safe] for x in (reals, key, wholes, progress))
    column = {name: reals[:, REALS.index(name)] for name in ("temperature", "top_p", "min_p")}
    limit, active = (before[:, PROGRESS.index(name)] for name in ("limit", "active"))
    position = before[:, PROGRESS.index("position")] + 1
    live = known & (active > 0)
    token = sample(
        scores,
        top_k=mine[:, WHOLES.index("top_k")],
        greedy=column["temperature"] < GREEDY_BELOW,
        key=key,
        position=position,
        **column | {"temperature": jnp.maximum(column["temperature"], LOWEST_TEMPERATURE)},
    )
    drawn = token >= 0
    stopped = jnp.any(mine[:, len(WHOLES) :] == token[:, None], axis=-1) & drawn
    active = ~(stopped | ~drawn | (position >= limit))
    after = jnp.stack([token, position, limit, active.astype(jnp.int32)], axis=-1)
    counted = jnp.where(live & drawn, slots, total)  # out of range: dropped
    return (
        wholes.at[counted, WHOLES.index("generated")].add(1, mode="drop"),
        progress.at[jnp.where(live, slots, total)].set(after, mode="drop"),
        out_count.at[counted, jnp.maximum(token, 0)].add(1, mode="drop"),
    )


def top_candidates(scores, top_k):
    """Every token whose score is at least the row's ``top_k``-th largest, ties included; never one at -inf.

    Returns (ids int32 [B, MAX_CANDIDATES], -1 where there is none; scores float32, -inf there). Each row: first the
    tokens above the k-th largest score, then those equal to it, both in order of their ids. NaN counts as largest.
    """
    vocab = scores.shape[-1]
    count, width = min(MAX_TOP_K, vocab), min(MAX_CANDIDATES, vocab)
    # As integers NaN has a place in the order: above everything. Both zeros are equal.
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)
    bits = jnp.where(scores == 0, 0, bits)
    order = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    order = jnp.where(jnp.isnan(scores), jnp.int32(0x7FFFFFFF), order)
    lowest = jnp.int32(-0x7F800001)  # of -inf
    best = lax.top_k(order, count)[0]
    threshold = jnp.take_along_axis(best, jnp.clip(top_k, 1, count)[:, None] - 1, axis=-1)
    threshold = jnp.maximum(threshold, lowest + 1)
    # Above the threshold before equal to it, lower ids before higher ones.
    place = jnp.where(order > threshold, 2, jnp.where(order == threshold, 1, 0))
    ids = jnp.argsort(place, axis=-1, descending=True, stable=True)[:, :width].astype(jnp.int32)
    present = jnp.take_along_axis(place, ids, axis=-1) > 0
    found = jnp.where(present, jnp.take_along_axis(scores, ids, axis=-1), -jnp.inf)
    pad = [(0, 0), (0, MAX_CANDIDATES - width)]
    ids = jnp.pad(jnp.where(present, ids, -1), pad, constant_values=-1)
    return ids, jnp.pad(found, pad, constant_values=-jnp.inf)
