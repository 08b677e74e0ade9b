"""From logits to the next token: what the device keeps of a request, and how a token is drawn. Pure functions.

Order, the same as vLLM's: logit bias -> repetition, frequency, presence penalty -> stop ids masked until ``min_tokens``
-> temperature -> min-p -> top-k -> top-p -> Gumbel-max draw. Temperature comes first among the filters, so logits
[3, 2, 1] at temperature 0.5 and top_p 0.8 keep one token; an engine that tempers last keeps two.

A draw depends on the row's logits, its request's settings, seed and position, and on nothing else: not on its slot, its
neighbours or the batch size.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flint_jax.errors import RequestError
from flint_jax.sampling_params import SamplingParams
from pallas_kernels.sample import api as sample_kernel
from pallas_kernels.sample.shapes import GREEDY_BELOW, LOWEST_TEMPERATURE, MAX_STOP_IDS
from pallas_kernels.sample.shapes import WHOLES as _WHOLES

HIGHEST_TEMPERATURE = 1e6  # one above counts as this: uniform for any real logits, and float32 still orders them


# -- what the device keeps for each slot -----------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSampling:
    """Sampling state of S slots, or of the B rows that ``gather`` picked. Six leaves: a step's host cost is per leaf.

    The scalars of a slot are columns of two arrays and are read under their own names (``state.top_p``).
    """

    reals: jax.Array  # float32 [S, 6]: _REALS
    wholes: jax.Array  # int32 [S, 3 + MAX_STOP_IDS]: _WHOLES, then stop ids padded with -1
    key: jax.Array  # uint32 [S, 2]: the request's seed, high word first
    prompt_seen: jax.Array  # bool [S, V]: is the token in the prompt
    out_count: jax.Array  # int32 [S, V]: how often the token was drawn
    bias: jax.Array  # float32 [S, V]

    temperature = property(lambda self: self.reals[..., 0])
    top_p = property(lambda self: self.reals[..., 1])
    min_p = property(lambda self: self.reals[..., 2])
    repetition = property(lambda self: self.reals[..., 3])
    presence = property(lambda self: self.reals[..., 4])
    frequency = property(lambda self: self.reals[..., 5])
    top_k = property(lambda self: self.wholes[..., 0])
    min_tokens = property(lambda self: self.wholes[..., 1])
    generated = property(lambda self: self.wholes[..., 2])
    stop_ids = property(lambda self: self.wholes[..., len(_WHOLES) :])

    @classmethod
    def empty(cls, slots: int, vocab: int) -> SlotSampling:
        """Slots that draw greedily and never stop, until a request is admitted."""
        row = slot_row(SamplingParams(temperature=0.0), (), vocab, (), 0)
        return cls(
            reals=jnp.tile(row.reals, (slots, 1)),
            wholes=jnp.tile(row.wholes, (slots, 1)),
            key=jnp.zeros((slots, 2), jnp.uint32),
            prompt_seen=jnp.zeros((slots, vocab), bool),
            out_count=jnp.zeros((slots, vocab), jnp.int32),
            bias=jnp.zeros((slots, vocab), jnp.float32),
        )

    def gather(self, rows: jax.Array) -> SlotSampling:
        """The state of slots ``rows`` (int32 [B]), in that order. Inside a jit the large leaves fuse into their use."""
        return jax.tree.map(lambda leaf: leaf[rows], self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotRow:
    """One request's part of SlotSampling, built on the host; shapes depend on the vocabulary only."""

    reals: np.ndarray  # float32 [6]
    wholes: np.ndarray  # int32 [3 + MAX_STOP_IDS]
    key: np.ndarray  # uint32 [2]
    prompt_seen: np.ndarray  # bool [V]
    out_count: np.ndarray  # int32 [V]
    bias: np.ndarray  # float32 [V]


def slot_row(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    vocab: int,
    stop_ids: Iterable[int],
    default_seed: int,
    output_ids: Sequence[int] = (),
) -> SlotRow:
    """Host arrays for ``admit``.

    Args:
      params: resolved settings; n is ignored.
      prompt_ids: the whole prompt, each id in [0, vocab).
      stop_ids: the model's end tokens, or what ``params.stop_set`` made of them (the result is the same).
      default_seed: used when the request names no seed.
      output_ids: tokens it drew before; not empty when a request comes back after it gave its slot away.

    Raises RequestError for ids outside the vocabulary and for too many stop ids.
    """
    params.check_vocabulary(vocab)
    prompt = np.asarray(prompt_ids, np.int64)
    if prompt.size and not (prompt.min() >= 0 and prompt.max() < vocab):
        raise RequestError(f"the prompt holds token ids outside the vocabulary, 0 to {vocab - 1}", param="prompt")
    seed = (default_seed if params.seed is None else params.seed) & (2**64 - 1)
    reals = np.array(
        (
            min(params.temperature, HIGHEST_TEMPERATURE),
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        ),
        np.float32,
    )
    wholes = np.full(len(_WHOLES) + MAX_STOP_IDS, -1, np.int32)
    wholes[: len(_WHOLES)] = (min(params.top_k, vocab), min(params.min_tokens, 2**31 - 1), len(output_ids))
    stops = params.stop_set(stop_ids)
    wholes[len(_WHOLES) : len(_WHOLES) + len(stops)] = stops
    seen = np.zeros(vocab, bool)
    seen[prompt] = True
    bias = np.zeros(vocab, np.float32)
    for token, value in (params.logit_bias or {}).items():
        bias[token] = value
    drawn = np.zeros(vocab, np.int32)
    np.add.at(drawn, np.asarray(output_ids, np.int64), 1)
    return SlotRow(reals, wholes, np.array((seed >> 32, seed & (2**32 - 1)), np.uint32), seen, drawn, bias)


def admit(state: SlotSampling, slot: jax.Array, row: SlotRow) -> SlotSampling:
    """The state with ``row`` written to slot ``slot`` (int32 scalar). Pure; donate ``state``."""
    return SlotSampling(
        reals=state.reals.at[slot].set(row.reals),
        wholes=state.wholes.at[slot].set(row.wholes),
        key=state.key.at[slot].set(row.key),
        prompt_seen=state.prompt_seen.at[slot].set(row.prompt_seen),
        out_count=state.out_count.at[slot].set(row.out_count),
        bias=state.bias.at[slot].set(row.bias),
    )


def update(state: SlotSampling, slots: jax.Array, tokens: jax.Array, active: jax.Array) -> SlotSampling:
    """Count the drawn tokens: slot ``slots[b]`` drew ``tokens[b]``, for rows where ``active`` holds and token >= 0.

    Args: int32 [B], int32 [B], bool [B]. Pure; donate ``state``. Inactive rows may name any slot.
    """
    counts = active & (tokens >= 0)
    slot_count, vocab = state.out_count.shape
    slot = jnp.where(counts, slots, slot_count)  # out of range, hence dropped
    generated = _WHOLES.index("generated")
    return dataclasses.replace(
        state,
        wholes=state.wholes.at[slot, generated].add(1, mode="drop"),
        out_count=state.out_count.at[slot, jnp.where(counts, tokens, vocab)].add(1, mode="drop"),
    )


def stopped(rows: SlotSampling, tokens: jax.Array) -> jax.Array:
    """Whether each row's token (int32 [B]) is one of its stop ids: bool [B]. Token -1 is not."""
    return jnp.any((rows.stop_ids == tokens[:, None]) & (tokens[:, None] >= 0), axis=-1)


# -- drawing (device) ------------------------------------------------------------------------------------------------


def sample(
    logits: jax.Array,
    rows: SlotSampling,
    position: jax.Array,
    *,
    adjusted: bool = True,
    filtered: bool = True,
    drawn: bool = True,
) -> jax.Array:
    """Draw one token per row. Pure and jittable; a row's result never depends on the other rows.

    Args:
      logits: float32 [B, V]; -inf excludes a token.
      rows: SlotSampling of B rows.
      position: int32 [B]; any number that differs between the draws of a request (its position in the sequence).
      adjusted, filtered, drawn: Python bools. False leaves out a stage that no row of the batch uses (see ``needs``):
        bias, penalties and min_tokens; min-p, top-k and top-p (a sort of [B, V]); anything but argmax. The tokens are
        the same. They are arguments rather than ``lax.cond`` because the host knows them and a device-side branch
        would make it wait.

    Returns int32 [B]. -1 where no token can be drawn: the row's logits hold NaN or +inf, or all of them are -inf. That
    is an error of that request only.
    """
    scores = _adjust(logits, rows) if adjusted else logits
    best = jnp.max(scores, axis=-1)
    broken = jnp.any(jnp.isnan(logits), axis=-1) | ~jnp.isfinite(best)
    token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    if drawn:
        scores = _temper(scores, jnp.where(broken, 0.0, best), rows)
        if filtered:
            scores = jnp.where(_kept(scores, rows), scores, -jnp.inf)
        chosen = jnp.argmax(scores + _gumbel(rows.key, position, scores.shape[-1]), axis=-1).astype(jnp.int32)
        token = jnp.where(rows.temperature < GREEDY_BELOW, token, chosen)
    return jnp.where(broken, -1, token)


def advance(
    state: SlotSampling, logits: jax.Array, tile_max: jax.Array | None, slots: jax.Array, progress: jax.Array
) -> tuple[SlotSampling, jax.Array]:
    """The tokens of ``sample`` for requests within ``fast_path``, and all that follows from them for their slots.

    logits: float32 [B, V]. tile_max: float32 [B, V/16], the largest logit of each 16 (the head's kernel gives it).
    slots: int32 [B], distinct, out of range for padding. progress: int32 [S, 4], see ``pallas_kernels.sample``; what
    is not active there stays as it is. Returns (state, progress): one kernel on a GPU. Donate both.
    """
    moved = sample_kernel.advance(
        logits, tile_max, slots, state.reals, state.key, state.wholes, progress, state.out_count
    )
    return dataclasses.replace(state, wholes=moved.wholes, out_count=moved.out_count), moved.progress


def support(logits: jax.Array, rows: SlotSampling) -> jax.Array:
    """Which tokens ``sample`` could draw: bool [B, V] for float32 [B, V]. None where it would return -1."""
    scores = _adjust(logits, rows)
    best = jnp.max(scores, axis=-1)
    broken = jnp.any(jnp.isnan(logits), axis=-1) | ~jnp.isfinite(best)
    greedy = jnp.argmax(scores, axis=-1)[:, None] == jnp.arange(scores.shape[-1])
    tempered = _temper(scores, jnp.where(broken, 0.0, best), rows)
    kept = _kept(tempered, rows)
    return jnp.where((rows.temperature < GREEDY_BELOW)[:, None], greedy, kept) & ~broken[:, None]


def _temper(scores: jax.Array, best: jax.Array, rows: SlotSampling) -> jax.Array:
    """Scores relative to the best one (float32 [B]), divided by the temperature: float32 [B, V], the best one 0.

    Relative, so that the noise is not rounded away when a low temperature makes scores large.
    """
    return (scores - best[:, None]) / jnp.maximum(rows.temperature, LOWEST_TEMPERATURE)[:, None]


def _adjust(scores: jax.Array, rows: SlotSampling) -> jax.Array:
    """Bias, then penalties, then stop ids to -inf while a row has fewer than ``min_tokens``. float32 [B, V]."""
    scores = scores + rows.bias
    drawn_before = rows.out_count > 0
    repetition = rows.repetition[:, None]
    repeated = jnp.where(scores > 0, scores / repetition, scores * repetition)
    scores = jnp.where(rows.prompt_seen | drawn_before, repeated, scores)
    scores = scores - rows.frequency[:, None] * rows.out_count.astype(jnp.float32)
    scores = scores - jnp.where(drawn_before, rows.presence[:, None], 0.0)
    # Sixteen comparisons an element fuse with the rest; a scatter would write [B, V] once more.
    ids = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    is_stop = functools.reduce(operator.or_, [rows.stop_ids[:, i, None] == ids for i in range(MAX_STOP_IDS)])
    return jnp.where(is_stop & (rows.generated < rows.min_tokens)[:, None], -jnp.inf, scores)


def _kept(scores: jax.Array, rows: SlotSampling) -> jax.Array:
    """Which tokens survive min-p, then top-k, then top-p: bool [B, V]. ``scores``: tempered, best one 0."""
    vocab = scores.shape[-1]
    scores = jnp.where(scores >= jnp.log(rows.min_p)[:, None], scores, -jnp.inf)
    ascending = _ascending(scores)
    top_k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    threshold = jnp.take_along_axis(ascending, vocab - top_k[:, None], axis=-1)
    in_top_k = ascending >= threshold
    # Summed from the unlikely end: there the sums are small and float32 resolves a top_p close to 1.
    mass = jnp.cumsum(jnp.where(in_top_k, jnp.exp(ascending), 0.0), axis=-1)
    in_top_p = mass > (1.0 - rows.top_p)[:, None] * mass[:, -1:]
    in_top_p = jnp.where(rows.top_p[:, None] < 1.0, in_top_p & in_top_k, in_top_k)
    count = jnp.maximum(jnp.sum(in_top_p, axis=-1, keepdims=True, dtype=jnp.int32), 1)
    # Back to token order: everything above the lowest kept score, and of its equals the lowest ids.
    lowest = jnp.take_along_axis(ascending, vocab - count, axis=-1)
    above = scores > lowest
    equal = scores == lowest
    room = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    kept = above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room))
    return kept & (scores > -jnp.inf)  # without top-k and top-p, what min-p took out equals the lowest score


def _ascending(scores: jax.Array) -> jax.Array:
    """float32 [B, V] sorted along the last axis, NaN in any place.

    As integers that have the floats' order: XLA on a CPU sorts those 2.4 times as fast (30 us instead of 72 for 768).
    """

    def flipped(bits):  # below zero the order of the bits is the other way round
        return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)

    keys = flipped(jax.lax.bitcast_convert_type(scores, jnp.int32))
    return jax.lax.bitcast_convert_type(flipped(jnp.sort(keys, axis=-1)), jnp.float32)


def _gumbel(keys: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise, float32 [B, vocab], a function of (key, position, token id) alone. Finite, in [-2.9, 22.9].

    All 32 random bits count at the end that matters, the large values: with 23, the usual number, two of 150,000
    equally likely tokens would often share the largest value, and the lower id would win.
    """

    def bits(key, at):
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), at)
        return jax.random.bits(key, (vocab,), jnp.uint32)

    uniform = (jax.vmap(bits)(keys, position).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24)))


def logprobs(logits: jax.Array, tokens: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Natural log-probabilities from the raw logits: before bias, penalties, temperature and filters.

    Args:
      logits: float32 [B, V].
      tokens: int32 [B], the drawn tokens; the figures of a row with -1 mean nothing.
      k: alternatives, a Python int >= 0.

    Returns (log p of the token float32 [B]; the k likeliest ids int32 [B, k], ties by lowest id; their log p float32
    [B, k]; the token's rank int32 [B], 1 plus the number of strictly likelier tokens). May hold -inf.
    """
    logits = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    top, top_ids = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    return (chosen - normaliser)[:, 0], top_ids.astype(jnp.int32), top - normaliser, rank
