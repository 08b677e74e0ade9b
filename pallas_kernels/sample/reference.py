"""The candidates in plain jnp."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.sample.shapes import MAX_CANDIDATES, MAX_TOP_K


def top_candidates(scores, top_k, tile_max=None):
    """See ``api.top_candidates``."""
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
