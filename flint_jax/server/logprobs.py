"""Log-probabilities in OpenAI's two formats. Both floor -inf at -9999.0: JSON has no infinity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flint_jax.server.choices import Token
from flint_jax.text import Detokenizer

FLOOR = -9999.0


def floored(value: float) -> float:
    """A log-probability that JSON can carry."""
    return FLOOR if math.isnan(value) or value < FLOOR else value


def token_text(tokenizer: Any, token_id: int) -> str:
    """The token's text; ``bytes:\\xf0\\x9f`` when its bytes are not whole characters, as OpenAI writes them."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def chat_logprobs(tokenizer: Any, tokens: Sequence[Token]) -> dict[str, Any]:
    """``logprobs`` of a chat choice: one entry a token, with its raw bytes and its alternatives."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": floored(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return {
        "content": [entry(t.token_id, t.logprob) | {"top_logprobs": [entry(i, lp) for i, lp in t.top]} for t in tokens]
    }


def prompt_logprobs(tokenizer: Any, entries: Sequence[Any]) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's ``prompt_logprobs``: for each token of the prompt itself and the likeliest others by their ids.

    entries: the engine's, None where nothing comes before.
    """

    def one(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": floored(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token_id)}

    found = []
    for e in entries:
        if e is None:
            found.append(None)
            continue
        others = {str(i): one(i, lp, rank) for rank, (i, lp) in enumerate(e.top, start=1)}
        found.append({str(e.token_id): one(e.token_id, e.logprob, e.rank)} | others)
    return found


def prompt_tokens(
    tokenizer: Any, ids: Sequence[int], entries: Sequence[Any], text: str, *, whole: bool = True
) -> list[Token]:
    """The tokens of an echoed prompt for ``completion_logprobs``; the first has no log-probability.

    entries: the engine's, one a token. text: the prompt as it is echoed, which offsets count in from its end; tokens
    that were put in front of it begin where it begins. whole: whether a character that they end within is part of it.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    tokens, at = [], 0
    for token_id, entry in zip(ids, entries, strict=True):
        logprob, top = (None, ()) if entry is None else (entry.logprob, entry.top)
        tokens.append(Token(token_id, logprob, top, at))
        at += len(detokenizer.push(token_id))
    if whole:
        at += len(detokenizer.flush())
    for token in tokens:
        token.offset = max(token.offset - at, -len(text))
    return tokens


def completion_logprobs(tokenizer: Any, tokens: Sequence[Token], *, top: bool, shift: int) -> dict[str, list]:
    """``logprobs`` of a text completion: parallel lists. ``text_offset`` counts characters of the reply's text, whose
    first ``shift`` ones are the echoed prompt. top: whether alternatives were asked for; the chosen token is always
    among them. A token that nothing comes before has null for both.
    """
    alternatives: list[dict[str, float] | None] = []
    for t in tokens:
        if t.logprob is None:
            alternatives.append(None)
            continue
        own = token_text(tokenizer, t.token_id)
        best = {own: floored(t.logprob)}  # whatever other token has the same text
        for token_id, logprob in t.top:
            text = token_text(tokenizer, token_id)
            if text != own:
                best[text] = max(floored(logprob), best.get(text, FLOOR))
        alternatives.append(best)
    return {
        "tokens": [token_text(tokenizer, t.token_id) for t in tokens],
        "token_logprobs": [None if t.logprob is None else floored(t.logprob) for t in tokens],
        "top_logprobs": alternatives if top else None,
        "text_offset": [t.offset + shift for t in tokens],
    }
