"""Which rows each block of the grouped products takes: pairs of (token, expert) sorted by expert, cut into tiles."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

SIZES = (32, 64, 128)  # rows that a tile may have


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """T tiles of ``rows`` rows each, the first ``total`` of them in use; a tile's rows belong to one expert.

    expert, count: of each tile, and how many of its rows are real. token: of each row, repeated where a tile has fewer.
    place: the row of each pair.
    """

    expert: Int32[Array, " T"]
    count: Int32[Array, " T"]
    token: Int32[Array, " T*rows"]
    total: Int32[Array, "1"]
    place: Int32[Array, "M A"]
    rows: int = dataclasses.field(metadata={"static": True})


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile: the smallest size that holds what an expert gets on average, and a third."""
    return next((size for size in SIZES if 3 * size * experts >= 4 * pairs), SIZES[-1])


def group(ids: Int32[Array, "M A"], experts: int, rows: int | None = None) -> Groups:
    """Tiles for tokens that chose ``ids``. A token out of use has ids of ``experts``: its pairs get no row (place 0).

    Stable: an expert's rows are in the order of the tokens. Raises ValueError beyond 2^31 / experts pairs.
    """
    tokens, active = ids.shape
    pairs = tokens * active
    if pairs * (experts + 1) >= 1 << 31:
        raise ValueError(f"{pairs} pairs over {experts} experts: the sort keys have 31 bits; take fewer tokens")
    rows = rows or tile_rows(pairs, experts)
    flat = ids.reshape(-1).astype(jnp.int32)
    keys = jnp.sort(flat * pairs + jnp.arange(pairs, dtype=jnp.int32))
    chosen, pair = keys // pairs, keys % pairs
    number = jnp.arange(experts, dtype=jnp.int32)
    counts = jnp.sum(flat[:, None] == number[None, :], axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(counts) - counts
    tiles = -(-counts // rows)
    before = jnp.cumsum(tiles) - tiles
    most = -(-pairs // rows) + min(experts, pairs)
    # Per tile: the experts whose tiles all lie before it.
    tile = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.sum((before + tiles)[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, experts - 1)
    first = (tile - before[expert]) * rows
    count = jnp.clip(counts[expert] - first, 0, rows)
    inside = jnp.minimum(jnp.arange(rows, dtype=jnp.int32)[None, :], jnp.maximum(count - 1, 0)[:, None])
    source = jnp.clip(starts[expert][:, None] + first[:, None] + inside, 0, pairs - 1)
    token = pair[source.reshape(-1)] // active
    safe = jnp.minimum(chosen, experts - 1)
    within = jnp.arange(pairs, dtype=jnp.int32) - starts[safe]
    where = (before[safe] + within // rows) * rows + within % rows
    where = jnp.where(chosen < experts, where, 0)
    place = jnp.zeros((pairs,), jnp.int32).at[pair].set(where, unique_indices=True)
    return Groups(expert, count, token, jnp.sum(tiles)[None], place.reshape(tokens, active), rows)


def product_order(x: jax.Array) -> jax.Array:
    """Columns in the order in which ``mosaic`` reads them: of 16, pairs (0, 2, 4, 6, 1, 3, 5, 7)."""
    *lead, columns = x.shape
    return jnp.swapaxes(x.reshape(*lead, columns // 16, 4, 2, 2), -3, -2).reshape(*lead, columns)


def natural_order(x: jax.Array) -> jax.Array:
    """The inverse of ``product_order``."""
    *lead, columns = x.shape
    return jnp.swapaxes(x.reshape(*lead, columns // 16, 2, 4, 2), -3, -2).reshape(*lead, columns)
