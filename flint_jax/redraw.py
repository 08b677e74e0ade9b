"""Drawing a token again, from those that a mask allows: the device side of forced output.

A decode step draws as if there were no masks, so the program is the same whoever is in the batch. The masks of the next
token need the token before it on the host; so while the step runs the host reads that token and makes the masks, and
then the rows that have one are drawn again from the step's own logits. Rows without a mask never notice.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flint_jax import sampling
from flint_jax.sampling import SlotSampling
from pallas_kernels.sample import api as sample_kernel

WORD = 32  # tokens in a word of a mask


def words(vocab: int) -> int:
    """int32 words of a row's mask: bit i % 32 of word i // 32 is token i."""
    return -(-vocab // WORD)


def masked(logits: Float[Array, "B V"], masks: Int[Array, "B W"]) -> Float[Array, "B V"]:
    """-inf where the mask has no bit. NaN stays, so that broken logits are still noticed."""
    bits = masks[:, :, None] >> jnp.arange(WORD, dtype=jnp.int32) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed | jnp.isnan(logits), logits, -jnp.inf)


def undrawn(
    state: SlotSampling, slots: Int[Array, " B"], tokens: Int[Array, " B"], chosen: Bool[Array, " B"]
) -> SlotSampling:
    """The state as it was before ``sampling.update`` counted ``tokens`` in the rows of ``chosen``."""
    total, vocab = state.out_count.shape
    slot = jnp.where(chosen & (tokens >= 0), slots, total)  # out of range, hence dropped
    generated = sampling._WHOLES.index("generated")
    return dataclasses.replace(
        state,
        wholes=state.wholes.at[slot, generated].add(-1, mode="drop"),
        out_count=state.out_count.at[slot, jnp.where(tokens >= 0, tokens, vocab)].add(-1, mode="drop"),
    )


def draw(
    logits: Float[Array, "B V"], masks: Int[Array, "B W"], rows: SlotSampling, position: Int[Array, " B"], *, fast: bool
) -> Int[Array, " B"]:
    """``sampling.sample`` of what the masks allow; the mask wins over bias and penalties. fast: all rows are within
    ``sampling.fast_path``."""
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
