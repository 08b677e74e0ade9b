"""KV cache: pages for full-attention layers, a ring per slot for window layers, and attention over both.

A slot is one running request. Full layers: position p of a slot lives in page ``table[slot, p // PAGE]`` at place
``p % PAGE``. Window layers: at place ``p % ring`` of the slot's ring. Both are written in place (donate the cache).
Nothing that was not written by the request itself is ever read into a result: unread places may hold NaN.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flint_jax.config import FULL, FlintConfig
from flint_jax.numerics import Numerics
from pallas_kernels.sink_attention import reference as sink_attention

PAGE = 64  # tokens in a page; one kv head's keys of a page are 16 KB in bfloat16
PAGES_PER_BLOCK = 8  # pages attended to at once by the reference path
SPARE = 63  # ring places beyond the window: up to SPARE + 1 tokens are written, then attended to, in one go


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """k/v_pages [full layers, pages, K, PAGE, H]; k/v_ring [window layers, slots, K, ring, H]; the compute dtype."""

    k_pages: Float[Array, "Lf P K page H"]
    v_pages: Float[Array, "Lf P K page H"]
    k_ring: Float[Array, "Lw S K ring H"]
    v_ring: Float[Array, "Lw S K ring H"]

    @classmethod
    def create(cls, config: FlintConfig, slots: int, pages: int, dtype) -> KVCache:
        """Zeros."""
        return cls(**{name: jnp.zeros(shape, dtype) for name, shape in cls.shapes(config, slots, pages).items()})

    @staticmethod
    def shapes(config: FlintConfig, slots: int, pages: int) -> dict[str, tuple[int, ...]]:
        """Shape of every leaf."""
        heads, width = config.num_key_value_heads, config.head_dim
        paged = (len(config.full_layers), pages, heads, PAGE, width)
        ring = (len(config.sliding_layers), slots, heads, ring_size(config.sliding_window), width)
        return {"k_pages": paged, "v_pages": paged, "k_ring": ring, "v_ring": ring}


def ring_size(window: int) -> int:
    """Places in a slot's ring: the window and the spare places, in whole pages (513 -> 576)."""
    return -(-(window + SPARE) // PAGE) * PAGE


def page_bytes(config: FlintConfig, itemsize: int) -> int:
    """Bytes of one page across all full layers, keys and values."""
    return 2 * len(config.full_layers) * config.kv_size * PAGE * itemsize


def slot_bytes(config: FlintConfig, itemsize: int) -> int:
    """Bytes of one slot's rings across all window layers, keys and values."""
    return 2 * len(config.sliding_layers) * config.kv_size * ring_size(config.sliding_window) * itemsize


def table_width(max_context: int) -> int:
    """Entries of a slot's block table: pages for ``max_context`` tokens, in whole blocks."""
    return -(-max_context // (PAGE * PAGES_PER_BLOCK)) * PAGES_PER_BLOCK


class CachedAttention:
    """The model's Attend over a cache: B rows of T consecutive tokens each, appended to their slots.

    tables: int32 [S, table width], page of each PAGE tokens of a slot (unused entries: any valid page).
    slots: int32 [B], distinct; a row whose slot is out of range is inert. start: int32 [B], position of the first
    token. count: int32 [B], how many of the T tokens are real (0 makes a row inert). After the forward pass ``cache``
    holds the written cache.
    """

    def __init__(
        self,
        config: FlintConfig,
        numerics: Numerics,
        cache: KVCache,
        tables: Int[Array, "S W"],
        slots: Int[Array, " B"],
        start: Int[Array, " B"],
        count: Int[Array, " B"],
        length: int,
    ):
        self.config, self.numerics, self.cache = config, numerics, cache
        total = cache.k_ring.shape[1]
        real = (slots >= 0) & (slots < total)
        self.slots = jnp.where(real, slots, 0)
        self.start = start
        self.count = jnp.where(real, count, 0)
        self.last = self.start + self.count - 1
        offsets = jnp.arange(length, dtype=jnp.int32)
        self.positions = self.start[:, None] + offsets[None, :]
        self.real = self.written = offsets[None, :] < self.count[:, None]
        self.tables = tables.at[self.slots].get(mode="clip")

    def attend(self, layer: int, q: Array, k: Array, v: Array, sinks: Array) -> Array:
        """See flint_jax.model.Attend."""
        kind = self.config.layer_types[layer]
        options = {"scale": self.config.head_dim**-0.5, "normalise_first": not self.numerics.serving}
        if kind == FULL:
            return self._full(self.config.full_layers.index(layer), q, k, v, sinks, options)
        return self._window(self.config.sliding_layers.index(layer), q, k, v, sinks, options)

    # -- full layers -----------------------------------------------------------------------------------------------

    def _full(self, i, q, k, v, sinks, options):
        c = self.cache
        entry = jnp.minimum(self.positions // PAGE, self.tables.shape[1] - 1)
        page = jnp.take_along_axis(self.tables, entry, axis=1)
        page = jnp.where(self.written, page, c.k_pages.shape[1])  # out of range: dropped
        place = self.positions % PAGE
        pools = tuple(_put(p, i, page, place, x) for p, x in ((c.k_pages, k), (c.v_pages, v)))
        self.cache = dataclasses.replace(c, k_pages=pools[0], v_pages=pools[1])
        flat = tuple(p.reshape(-1, *p.shape[2:]) for p in pools)  # one gather with an offset, no slice of a layer
        base = i * c.k_pages.shape[1]
        inside = jnp.arange(PAGE * PAGES_PER_BLOCK, dtype=jnp.int32)

        def keys(b):
            pages = jax.lax.dynamic_slice_in_dim(self.tables, b * PAGES_PER_BLOCK, PAGES_PER_BLOCK, 1)
            blocks = (p.at[base + pages].get(mode="clip") for p in flat)  # [B, pages, K, PAGE, H]
            joined = (x.transpose(0, 2, 1, 3, 4).reshape(x.shape[0], x.shape[2], -1, x.shape[4]) for x in blocks)
            return sink_attention.Keys(*joined, jnp.broadcast_to(b * inside.size + inside, (q.shape[0], inside.size)))

        blocks = jnp.max(self.last) // (PAGE * PAGES_PER_BLOCK) + 1
        return sink_attention.attend(q, self.positions, self.last, keys, blocks, sinks, **options)

    # -- window layers ---------------------------------------------------------------------------------------------

    def _window(self, i, q, k, v, sinks, options):
        c, window = self.cache, self.config.sliding_window
        ring = c.k_ring.shape[3]
        if q.shape[1] <= ring - window + 1:
            # Few tokens: none of them overwrites a key that another still sees, so write first.
            rings = self._write_ring(i, k, v, ring)
            place = jnp.arange(ring, dtype=jnp.int32)
            last = self.last[:, None]
            positions = last - (last - place) % ring  # negative where nothing was written yet
            mine = tuple(r[i, self.slots] for r in rings)
            keys = sink_attention.Keys(*mine, positions)
            return sink_attention.attend(
                q, self.positions, self.last, lambda _: keys, 1, sinks, window=window, **options
            )
        past = window - 1
        places = (self.start[:, None] - past + jnp.arange(past, dtype=jnp.int32)) % ring
        both = []
        for stack, new in ((c.k_ring, k), (c.v_ring, v)):
            old = stack[i, self.slots[:, None], :, places].transpose(0, 2, 1, 3)
            both.append(jnp.concatenate([old, new.transpose(0, 2, 1, 3)], axis=2))
        out = sink_attention.attend_window(q, *both, self.start, self.last, sinks, window=window, **options)
        self._write_ring(i, k, v, ring)
        return out

    def _write_ring(self, i, k, v, ring):
        """Write the last ``ring`` real tokens of each row (earlier ones would be overwritten by them)."""
        c = self.cache
        offset = self.positions - self.start[:, None]
        keep = self.written & (offset >= self.count[:, None] - ring)
        slot = jnp.where(keep, self.slots[:, None], c.k_ring.shape[1])  # out of range: dropped
        place = self.positions % ring
        rings = tuple(_put(r, i, slot, place, x) for r, x in ((c.k_ring, k), (c.v_ring, v)))
        self.cache = dataclasses.replace(c, k_ring=rings[0], v_ring=rings[1])
        return rings


def _put(stack, layer: int, which: Int[Array, "B T"], place: Int[Array, "B T"], x: Float[Array, "B T K H"]):
    """stack [L,W,K,R,H] with x at (layer, which, :, place); a ``which`` out of range is dropped.

    One token would be a scatter of one index, which XLA turns into a select and an update of a slice, with copies of
    the whole cache around them (100 ms a token in a cache of 100 MB on a CPU). A second index that is dropped keeps it
    a scatter in place.
    """
    if which.size == 1:
        which = jnp.concatenate([which, jnp.full_like(which, stack.shape[1])], axis=1)
        place, x = (jnp.concatenate([a, a], axis=1) for a in (place, x))
    return stack.at[layer, which, :, place].set(x, mode="drop")
