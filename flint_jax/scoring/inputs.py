"""From texts and ids to checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flint_jax.errors import RequestError

LanguageModel = Any  # flint_jax.lm.LanguageModel, which is above this layer


def default_prefix(lm: LanguageModel) -> int | None:
    """The model's BOS, else its EOS (the tokenizer's, else the lowest of the config's), else None."""
    tokenizer, config = lm.tokenizer, lm.config
    if config.bos_token_id is not None:
        return config.bos_token_id
    for name in ("bos_token", "eos_token"):
        token = getattr(tokenizer, name, None)
        if token is not None and (found := tokenizer.token_id(token)) is not None:
            return found
    return min(config.eos_token_ids, default=None)


def two(pair: Sequence, name: str) -> tuple[Any, Any]:
    """(context, continuation) of a pair; ``name`` stands for it in the RequestError for what is none."""
    if isinstance(pair, str | bytes | Mapping) or not hasattr(pair, "__len__") or len(pair) != 2:
        raise RequestError(f"{name}: need (context, continuation), got {pair!r:.60}")
    return tuple(pair)


def encode_pair(
    lm: LanguageModel, context: Sequence[int] | str, continuation: Sequence[int] | str
) -> tuple[Sequence[int], Sequence[int]]:
    """Token ids of a pair. Ids stay as they are; two texts follow lm-evaluation-harness' rule.

    Spaces at the context's end move to the continuation; then the continuation's tokens are those of the joined text
    beyond the number of tokens of the context alone, with what the tokenizer puts before texts and without what it puts
    behind them. An empty context stays empty, and so does an empty continuation.
    Raises RequestError for a mixture, and when the rule leaves no token of a continuation that has text.
    """
    if isinstance(context, str) != isinstance(continuation, str):
        if isinstance(context, str | Sequence) and not context:  # "" or [] fits both
            return [], encode(lm, continuation, special=False)
        raise RequestError("context and continuation must both be text or both be token ids")
    if not isinstance(context, str):
        return context, continuation
    if not continuation:
        return _open(lm, context), []
    bare = context.rstrip()
    context, continuation = bare, context[len(bare) :] + continuation
    if not context:
        return [], encode(lm, continuation, special=False)
    head, whole = (_open(lm, text) for text in (context, context + continuation))
    if len(whole) <= len(head):  # 0.0 and greedy would be the best of all scores
        raise RequestError(
            f"the tokenizer joins the end of the context, {context[-20:]!r}, and the whole continuation, "
            f"{continuation[:20]!r}, so that no token of the continuation is left to score. Put the boundary between "
            "words, or give token ids"
        )
    return head, whole[len(head) :]


def check_ids(ids: Sequence[int], vocab_size: int, what: str) -> np.ndarray:
    """Token ids as int32 [n]. Raises RequestError when they are no integers or outside the vocabulary."""
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise RequestError(f"{what}: token ids must be a flat list of integers ({error})") from None
    if not array.size:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise RequestError(f"{what}: token ids must be a list of integers, got {array.dtype} {array.shape}")
    if array.min() < 0 or array.max() >= vocab_size:
        bad = int(array[(array < 0) | (array >= vocab_size)][0])
        raise RequestError(f"{what}: token id {bad} is outside the vocabulary, 0 to {vocab_size - 1}")
    return array.astype(np.int32)


def encode(lm: LanguageModel, text: Sequence[int] | str, *, special: bool = True) -> Sequence[int]:
    """Token ids of a text (special: with what the tokenizer itself puts around texts); ids as they are."""
    return lm._tokenizer().encode(text, add_special_tokens=special) if isinstance(text, str) else text


def _open(lm: LanguageModel, text: str) -> Sequence[int]:
    """Token ids of a text that goes on: without what the tokenizer puts behind whole ones (an EOS)."""
    ids = encode(lm, text)
    return ids[: len(ids) - len(lm.tokenizer.end_ids)]
