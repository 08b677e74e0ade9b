"""Drawing a token again, from those that a mask allows: the device side of forced output.

A decode step draws as if there were no masks, so the program is the same whoever is in the batch. The masks of the next
token need the token before it on the host; so while the step runs the host reads that token and makes the masks. Then a
token that its mask allows stands, and another one is drawn again from the step's own logits, from what the mask allows
and with the same noise. Rows without a mask (all bits set) never notice.

Without filters that is the draw from the allowed tokens alone, token for token: whatever has the largest sum of score
and noise among all tokens has it among the allowed ones, too, if it is one of them. With top-k, top-p or min-p a token
that survived the cut among all tokens and is allowed stands; only where the token drawn is not allowed the cut is made
anew and counts what is allowed. So tokens that are allowed and survived the first cut come, taken together, at least as
often as if the mask had been there before the cut.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flint_jax import sampling
from flint_jax.sampling import SlotSampling
from pallas_kernels.sample import api as sample_kernel
from pallas_kernels.sample.shapes import PROGRESS, WHOLES

WORD = 32  # tokens in a word of a mask


def words(vocab: int) -> int:
    """int32 words of a row's mask: bit i % 32 of word i // 32 is token i."""
    return -(-vocab // WORD)


def allowed(masks: Int[Array, "B W"], tokens: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Whether each row's mask has the bit of its token (>= 0)."""
    word = masks.at[jnp.arange(masks.shape[0]), tokens // WORD].get(mode="promise_in_bounds")
    return word >> tokens % WORD & 1 != 0


def masked(logits: Float[Array, "B V"], masks: Int[Array, "B W"]) -> Float[Array, "B V"]:
    """-inf where the mask has no bit. NaN stays, so that broken logits are still noticed."""
    bits = masks[:, :, None] >> jnp.arange(WORD, dtype=jnp.int32) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed | jnp.isnan(logits), logits, -jnp.inf)


def redrawn(
    counts: Int[Array, "S V"],
    progress: Int[Array, "S 4"],
    settings: SlotSampling,
    logits: Float[Array, "B V"],
    slots: Int[Array, " B"],
    masks: Int[Array, "B W"],
    *,
    fast: bool,
) -> tuple[Int[Array, "S V"], Int[Array, "S 4"], Int[Array, " B"]]:
    """Replace what a step has just drawn where the mask does not allow it.

    counts, progress: how often each token was drawn and where the slots are, as the step left them (donate both).
    settings: the rest of the sampling state, ``out_count`` None. logits, slots: of the step, slots distinct and out of
    range for padding. fast: every row that has a mask is within ``sampling_params.fast_path``.

    Returns (counts, progress, last token of each row). A token of -1 stands: no mask mends such logits. Where the mask
    leaves nothing to draw the token becomes -1, and the slot's "generated", which nobody reads after it, counts it.
    """
    token_at, position_at, limit_at, active_at = map(PROGRESS.index, ("token", "position", "limit", "active"))
    known = slots < progress.shape[0]
    safe = jnp.where(known, slots, 0)
    before = progress.at[safe].get(mode="promise_in_bounds")
    first, position = before[:, token_at], before[:, position_at]
    drawn = jnp.maximum(first, 0)
    again = known & (first >= 0) & ~allowed(masks, drawn)

    def second():
        state = dataclasses.replace(settings, out_count=counts)
        rows = jax.tree.map(lambda leaf: leaf.at[safe].get(mode="promise_in_bounds"), state)
        if not fast:  # as before the first draw; that its token counts changes no other token's score
            rows = dataclasses.replace(rows, wholes=rows.wholes.at[:, WHOLES.index("generated")].add(-1))
        return draw(logits, masks, rows, position, fast=fast)

    # A branch on the device has the host wait on a GPU before it can launch the next step; on a CPU it saves the draw.
    token = jax.lax.platform_dependent(
        cpu=lambda: jax.lax.cond(jnp.any(again), second, lambda: first),
        default=second,
    )
    token = jnp.where(again, token, first)
    stops = settings.stop_ids.at[safe].get(mode="promise_in_bounds")
    over = jnp.any((stops == token[:, None]) & (token[:, None] >= 0), axis=-1)
    over = over | (token < 0) | (position >= before[:, limit_at])
    # Sums, as rows that stay as they are add nothing wherever they point: one update each, and no test of bounds.
    change = {"token": token - first, "active": jnp.where(over, 0, 1) - before[:, active_at]}
    change = jnp.stack([jnp.where(again, change.get(name, 0), 0) for name in PROGRESS], axis=-1)
    progress = progress.at[safe].add(change, mode="promise_in_bounds")
    undo, count = again.astype(jnp.int32), (again & (token >= 0)).astype(jnp.int32)
    where = jnp.concatenate([safe, safe]), jnp.concatenate([drawn, jnp.maximum(token, 0)])
    counts = counts.at[where].add(jnp.concatenate([-undo, count]), mode="promise_in_bounds")
    return counts, progress, token


def draw(
    logits: Float[Array, "B V"], masks: Int[Array, "B W"], rows: SlotSampling, position: Int[Array, " B"], *, fast: bool
) -> Int[Array, " B"]:
    """``sampling.sample`` of what the masks allow; the mask wins over bias and penalties. fast: all rows are within
    ``sampling_params.fast_path``."""
    logits = masked(logits, masks)
    if not fast:
        return sampling.sample(logits, rows, position)
    return sample_kernel.sample(
        logits,
        temperature=jnp.maximum(rows.temperature, sampling.LOWEST_TEMPERATURE),
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        key=rows.key,
        position=position,
        greedy=rows.temperature < sampling.GREEDY_BELOW,
    )
