"""Attention for training: whole rows, every block of queries at once, scores computed again in the backward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flint_jax.config import FULL
from flint_jax.model import WholeSequence
from pallas_kernels.sink_attention import reference

FULL_BLOCK = 512  # queries of a full layer whose scores exist at once


class TrainingSequence(WholeSequence):
    """WholeSequence without loops: the same sums in other pieces, four times the speed where it is differentiated.

    A window layer's queries lie in blocks that see themselves and the block before, all of them in one product. A full
    layer's blocks see only the keys before their own end.
    """

    def attend(self, layer: int, q: Array, k: Array, v: Array, sinks: Array) -> Array:
        """See ``model.Attend``."""
        full = self.config.layer_types[layer] == FULL
        run = jax.checkpoint(self._full if full else self._window)
        return run(q, *(x.transpose(0, 2, 1, 3) for x in (k, v)), sinks)

    def _options(self) -> dict:
        return {"scale": self.config.head_dim**-0.5, "normalise_first": not self.numerics.serving}

    def _full(self, q, k, v, sinks):
        length = q.shape[1]
        out = []
        for begin in range(0, length, FULL_BLOCK):
            end = min(begin + FULL_BLOCK, length)
            out.append(jax.checkpoint(self._block)(q[:, begin:end], k[:, :, :end], v[:, :, :end], sinks))
        return jnp.concatenate(out, axis=1)

    def _block(self, q, k, v, sinks):
        count = k.shape[2]
        keys = reference.Keys(k, v, self.positions[:, :count])
        places = self.positions[:, count - q.shape[1] : count]
        return reference.attend(q, places, self.last, lambda _: keys, 1, sinks, **self._options())

    def _window(self, q, k, v, sinks):
        batch, length, heads, width = q.shape
        window = self.config.sliding_window
        block = min(max(window - 1, 1), length)
        count = -(-length // block)
        pad = count * block - length

        def blocks(x):  # [B, K, T, H] -> [B * count, K, 2 block, H]: the block before, then its own
            x = jnp.pad(x, ((0, 0), (0, 0), (block, pad), (0, 0)))
            x = x.reshape(batch, -1, count + 1, block, width)
            joined = jnp.concatenate([x[:, :, :-1], x[:, :, 1:]], axis=3)
            return joined.swapaxes(1, 2).reshape(batch * count, -1, 2 * block, width)

        place = jnp.arange(count * block, dtype=jnp.int32).reshape(count, block)
        mine = jnp.tile(place, (batch, 1)) + jnp.repeat(self.start, count, total_repeat_length=batch * count)[:, None]
        before = jnp.where(jnp.tile(place, (batch, 1)) >= block, mine - block, -1)
        keys = reference.Keys(blocks(k), blocks(v), jnp.concatenate([before, mine], axis=1))
        last = jnp.repeat(self.last, count, total_repeat_length=batch * count)
        queries = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(batch * count, block, heads, width)
        out = reference.attend(queries, mine, last, lambda _: keys, 1, sinks, window=window, **self._options())
        return out.reshape(batch, count * block, heads, width)[:, :length]
