"""Log-probabilities in OpenAI's two formats. Both floor -inf at -9999.0: JSON has no infinity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flint_jax.server.choices import Token

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


def completion_logprobs(tokenizer: Any, tokens: Sequence[Token], *, top: bool, shift: int) -> dict[str, list]:
    """``logprobs`` of a text completion: parallel lists. ``text_offset`` counts characters of the reply's text, whose
    first ``shift`` ones are the echoed prompt. top: whether alternatives were asked for; the chosen token is always
    among them.
    """
    alternatives = []
    for t in tokens:
        best: dict[str, float] = {}
        for token_id, logprob in ((t.token_id, t.logprob), *t.top):
            text = token_text(tokenizer, token_id)
            best[text] = max(floored(logprob), best.get(text, FLOOR))
        alternatives.append(best)
    return {
        "tokens": [token_text(tokenizer, t.token_id) for t in tokens],
        "token_logprobs": [floored(t.logprob) for t in tokens],
        "top_logprobs": alternatives if top else None,
        "text_offset": [t.offset + shift for t in tokens],
    }
