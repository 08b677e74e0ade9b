"""Held-out items under teacher forcing: a reply counts when every token of it, end included, is the likeliest.

That is exactly when greedy decoding would have written it, thought and all, so one forward pass tells.
"""

from __future__ import annotations

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np

from examples.train_tiny.data import Encoder
from flint_jax.evals import Item


def batches(encoder: Encoder, items: list[Item], length: int, rows: int):
    """(items, tokens [rows, length], lengths, start of reply) in groups; items longer than ``length`` are left out."""
    short = []
    for item in items:
        ids, weights = encoder(item)
        end = encoder.ids["<|observation|>" if item.calls else "<|user|>"]
        if len(ids) < length:
            short.append((item, [*ids, end], weights.index(1.0)))
    for at in range(0, len(short), rows):
        group = short[at : at + rows]
        tokens = np.zeros((rows, length), np.int32)
        lengths, starts = np.ones(rows, np.int32), np.ones(rows, np.int32)
        for i, (_, ids, start) in enumerate(group):
            tokens[i, : len(ids)], lengths[i], starts[i] = ids, len(ids), start
        yield [item for item, _, _ in group], tokens, lengths, starts


def make_check(build):
    """jitted (params, frozen, tokens, lengths, starts) -> bool [rows]: the whole reply is what greedy decoding gives.

    Either end of a turn (the next speaker's mark or the end of the text) counts as the right end.
    """

    @jax.jit
    def check(params, frozen, tokens, lengths, starts, ends):
        model = build(params, frozen, tokens.shape[1])

        def one(pair):
            row, length = pair
            best = jnp.argmax(model(row[None], length[None])[0], axis=-1)
            return best.astype(jnp.int32)

        best = jax.lax.map(one, (tokens, lengths))[:, :-1]
        wanted = tokens[:, 1:]
        place = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)[None]
        counts = (place >= starts[:, None]) & (place < lengths[:, None])
        is_end = (place == lengths[:, None] - 1) & (best[..., None] == ends).any(-1)
        return jnp.all((best == wanted) | is_end | ~counts, axis=1)

    return check


def scores(check, params, frozen, encoder: Encoder, groups) -> dict[str, tuple[int, int]]:
    """family: detail -> (right, asked)."""
    ends = jnp.asarray(sorted(encoder.ids.values()), jnp.int32)
    found: dict[str, list[bool]] = defaultdict(list)
    for items, tokens, lengths, starts in groups:
        right = np.asarray(check(params, frozen, tokens, lengths, starts, ends))
        for item, ok in zip(items, right, strict=False):
            found[f"{item.family}: {item.detail}"].append(bool(ok))
            found[item.family].append(bool(ok))
    return {name: (sum(marks), len(marks)) for name, marks in found.items()}
