"""Attention of many tokens in plain jnp: 16 places at a time against all keys that a request can have."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.pieces import TILE
from pallas_kernels.sink_attention import reference as sink_attention


def _split(qkv, kv_heads: int, width: int):
    """q [T, N, H], k and v [T, K, H]."""
    heads = qkv.reshape(qkv.shape[0], -1, width)
    count = heads.shape[1] - 2 * kv_heads
    return heads[:, :count], heads[:, count : count + kv_heads], heads[:, count + kv_heads :]


def _tiles(q, tiles, keys, sinks, window: int | None):
    """keys(tile) -> (k, v [K, S, H], positions [S], -1 where there is none)."""
    places = q.shape[0]

    def one(args):
        tile, q = args
        k, v, positions = keys(tile)
        position = tile[1] + jnp.arange(TILE, dtype=jnp.int32)
        there = jnp.arange(TILE) < tile[2]
        block = sink_attention.Keys(k[None], v[None], positions[None])
        out = sink_attention.attend(
            q[None],
            position[None],
            (tile[1] + tile[2] - 1)[None],
            lambda _: block,
            1,
            sinks,
            scale=q.shape[-1] ** -0.5,
            window=window,
        )[0]
        return jnp.where(there[:, None, None], out, jnp.zeros((), q.dtype))

    out = jax.lax.map(one, (tiles, q.reshape(-1, TILE, *q.shape[1:])))
    return out.reshape(places, -1)


def attend_pages(qkv, tiles, sinks, sinks_layer, k_pages, v_pages, layer, tables, *, window=None):
    """See ``api.attend_pages``."""
    _, pages, kv_heads, page, width = k_pages.shape
    q, _, _ = _split(qkv, kv_heads, width)
    at = jnp.arange(tables.shape[1] * page, dtype=jnp.int32)

    def keys(tile):
        chosen = jnp.clip(tables[jnp.clip(tile[0], 0, tables.shape[0] - 1)], 0, pages - 1)
        k, v = (c[layer, chosen].swapaxes(0, 1).reshape(kv_heads, -1, width) for c in (k_pages, v_pages))
        return k, v, at

    return _tiles(q, tiles, keys, sinks[sinks_layer], window)


def attend_ring(qkv, tiles, sinks, sinks_layer, k_ring, v_ring, layer, *, window: int):
    """See ``api.attend_ring``."""
    _, slots, kv_heads, ring, width = k_ring.shape
    q, k_new, v_new = _split(qkv, kv_heads, width)
    places = qkv.shape[0]

    def keys(tile):
        slot = jnp.clip(tile[0], 0, slots - 1)
        before = tile[3] - 1
        old = before - (before - jnp.arange(ring, dtype=jnp.int32)) % ring  # position in each place of the ring
        old = jnp.where(old > before + 1 - window, old, -1)  # older ones are nobody's
        new = jnp.arange(places, dtype=jnp.int32) - tile[4]
        new = jnp.where(new >= 0, new + tile[3], -1)
        k, v = (
            jnp.concatenate([c[layer, slot], x.swapaxes(0, 1)], axis=1) for c, x in ((k_ring, k_new), (v_ring, v_new))
        )
        return k, v, jnp.concatenate([old, new])

    return _tiles(q, tiles, keys, sinks[sinks_layer], window)
