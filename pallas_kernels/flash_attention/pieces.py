"""Where the tokens of a prefill step belong: pieces of several requests, each from a multiple of 16."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

TILE = 16  # tokens that a block of the kernels takes; a piece begins at a multiple of it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """R pieces in T places. place: of a piece's first token, a multiple of ``TILE``, ascending; T for an unused piece.
    slot: of its request; start: position of its first token; count: its tokens (0: unused)."""

    place: Int32[Array, " R"]
    slot: Int32[Array, " R"]
    start: Int32[Array, " R"]
    count: Int32[Array, " R"]

    def of_places(self, places: int) -> tuple[Array, Array, Array]:
        """(piece of each place, its position, whether there is a token), int32/int32/bool [T]."""
        at = jnp.arange(places, dtype=jnp.int32)
        used = self.count > 0
        piece = jnp.sum((self.place[None, :] <= at[:, None]) & used[None, :], axis=1, dtype=jnp.int32) - 1
        safe = jnp.maximum(piece, 0)
        offset = at - self.place[safe]
        return safe, jnp.maximum(self.start[safe] + offset, 0), (piece >= 0) & (offset < self.count[safe])

    def tiles(self, places: int) -> Int32[Array, "T16 8"]:
        """Per 16 places: row of the block tables (or ring), position of the first, how many tokens; the position and
        the place of the first token that came with them; three unused."""
        piece, position, _ = (x[::TILE] for x in self.of_places(places))
        first = jnp.arange(0, places, TILE, dtype=jnp.int32) - self.place[piece]
        count = jnp.clip(self.count[piece] - first, 0, TILE)
        count = jnp.where(first < 0, 0, count)
        columns = (self.slot[piece], position, count, self.start[piece], self.place[piece])
        return jnp.stack([*columns, *[jnp.zeros_like(count)] * 3], axis=1)

    def in_pages(self, places: int, tables: Int32[Array, "S W"], page: int, pages: int) -> Int32[Array, " T"]:
        """Destination of each place's key in a paged cache, page * size + place in it; -1 for none."""
        piece, position, real = self.of_places(places)
        slot = jnp.clip(self.slot[piece], 0, tables.shape[0] - 1)
        entry = jnp.minimum(position // page, tables.shape[1] - 1)
        at = tables[slot, entry]
        return jnp.where(real & (at >= 0) & (at < pages), at * page + position % page, -1)

    def in_rings(self, places: int, ring: int) -> Int32[Array, " T"]:
        """The same for rings; of a piece longer than the ring only the last tokens."""
        piece, position, real = self.of_places(places)
        end = self.start[piece] + self.count[piece]
        keep = real & (position >= end - ring)
        return jnp.where(keep, self.slot[piece] * ring + position % ring, -1)
