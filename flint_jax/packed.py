"""The model's Attend over pieces of several requests in one row of places: what a prefill step and scoring run.

Attention and the cache's writes are kernels (``pallas_kernels.flash_attention``) where there are any, else plain jnp.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from flint_jax.cache import PAGE, KVCache, ring_size
from flint_jax.config import FULL, FlintConfig
from pallas_kernels import flash_attention
from pallas_kernels.flash_attention import Pieces


class PackedAttention:
    """B = 1 row of ``places`` tokens: ``pieces``, back to back. tables: int32 [S, W], see ``cache.CachedAttention``.

    After the forward pass ``cache`` holds the written cache. Serving numerics.
    """

    def __init__(self, config: FlintConfig, cache: KVCache, tables: Int[Array, "S W"], pieces: Pieces, places: int):
        self.config, self.cache, self.tables = config, cache, tables
        _, position, real = pieces.of_places(places)
        self.tiles = pieces.tiles(places)
        self.positions, self.real = position[None], real[None]
        self.in_pages = pieces.in_pages(places, tables, PAGE, cache.k_pages.shape[1])
        self.in_rings = pieces.in_rings(places, ring_size(config.sliding_window))

    def attend(self, layer: int, q: Array, k: Array, v: Array, sinks: Array) -> Array:
        """See flint_jax.model.Attend."""
        shape = q.shape
        qkv = jnp.concatenate([x.reshape(x.shape[1], -1) for x in (q, k, v)], axis=1)
        sinks = sinks.astype(jnp.float32)[None]
        c = self.cache
        if self.config.layer_types[layer] == FULL:
            i = self.config.full_layers.index(layer)
            k_pages, v_pages = flash_attention.write_cache(qkv, self.in_pages, c.k_pages, c.v_pages, i)
            self.cache = dataclasses.replace(c, k_pages=k_pages, v_pages=v_pages)
            out = flash_attention.attend_pages(qkv, self.tiles, sinks, 0, k_pages, v_pages, i, self.tables)
            return out.reshape(shape)
        i = self.config.sliding_layers.index(layer)
        window = self.config.sliding_window
        out = flash_attention.attend_ring(qkv, self.tiles, sinks, 0, c.k_ring, c.v_ring, i, window=window)
        k_ring, v_ring = flash_attention.write_cache(qkv, self.in_rings, c.k_ring, c.v_ring, i, after=out)
        self.cache = dataclasses.replace(c, k_ring=k_ring, v_ring=v_ring)
        return out.reshape(shape)
