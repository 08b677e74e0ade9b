"""From a row's few candidates to its token: min-p, top-p and a Gumbel-max draw, in plain jnp.

Comparing all C^2 pairs of candidates replaces the sort: 16,384 comparisons a row in one fused kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def draw(ids, scores, *, temperature, top_p, min_p, key, position, greedy):
    """ids int32 [B, C] (-1: none), scores float32 [B, C] (-inf: none); the rest [B] as in ``api.sample``."""
    best = jnp.max(scores, axis=-1, keepdims=True)  # NaN when there is one
    tempered = (scores - best) / temperature[:, None]
    tempered = jnp.where((ids >= 0) & (tempered >= jnp.log(min_p)[:, None]), tempered, -jnp.inf)
    kept = (tempered > -jnp.inf) & _in_top_p(tempered, top_p[:, None])
    noisy = jnp.where(kept, tempered + gumbel(key, position, ids), -jnp.inf)
    # The first of equal candidates has the lowest id.
    chosen = jnp.argmax(jnp.where(greedy[:, None], scores, noisy), axis=-1, keepdims=True)
    token = jnp.take_along_axis(ids, chosen, axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(best[:, 0]), token, -1)


def _in_top_p(scores: jax.Array, top_p: jax.Array) -> jax.Array:
    """The fewest best candidates whose mass reaches ``top_p``; of equals the first ones stay."""
    mass = jnp.exp(scores)
    place = jnp.arange(scores.shape[-1])
    mine, other = scores[:, :, None], scores[:, None, :]
    # From the unlikely end up to and including mine: there the sums are small, and float32 resolves a top_p near 1.
    below = (other < mine) | ((other == mine) & (place[None, None, :] >= place[None, :, None]))
    up_to_mine = jnp.sum(jnp.where(below, mass[:, None, :], 0.0), axis=-1)
    total = jnp.sum(mass, axis=-1, keepdims=True)
    best = place == jnp.argmax(scores, axis=-1)[:, None]
    return (top_p >= 1.0) | (up_to_mine > (1.0 - top_p) * total) | best


def gumbel(key: jax.Array, position: jax.Array, ids: jax.Array) -> jax.Array:
    """Gumbel noise of tokens ``ids`` (int32 [B, C]), float32, a function of (key, position, id) alone.

    All 32 random bits count at the end that matters, the large values; finite, in [-2.9, 22.9].
    """
    # The same bits as jax.random.bits(fold_in(key, position), (V,))[ids].
    zero = jnp.zeros_like(position).astype(jnp.uint32)
    folded = threefry2x32(key[:, 0], key[:, 1], zero, position.astype(jnp.uint32))
    counter = ids.astype(jnp.uint32)
    high, low = threefry2x32(folded[0][:, None], folded[1][:, None], jnp.zeros_like(counter), counter)
    uniform = ((high ^ low).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24)))


def threefry2x32(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The Threefry-2x32 block cipher with 20 rounds (Salmon et al., 2011) on uint32 arrays, elementwise."""
    schedule = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + key0, x1 + key1
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1
