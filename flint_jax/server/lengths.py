"""Whether a prompt fits the context, told as early as it can be known: texts that cannot are never encoded."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from flint_jax.server.errors import TOO_LONG, ApiError, bad_request
from flint_jax.server.state import ServedModel

_DENSE = 8  # bytes a token: texts of more would have to be all but spaces to fit, so a part of them is tried first
_SLICE = 1 << 17  # characters encoded between two looks at whether anyone still waits
_PER_CUT = 16  # tokens that cutting a text in two may add
_SHARE = 0.99  # of the tokens of all slices, what the text as a whole has at least, near ties left aside

_longest: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def longest_token(tokenizer: Any) -> int:
    """Bytes of the longest token: a text of n bytes has at least n / that tokens. Counted once for each tokenizer."""
    found = _longest.get(tokenizer)
    if found is None:
        found = max((len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), default=1) or 1
        _longest[tokenizer] = found
    return found


def check_length(served: ServedModel, length: int, *, wanted: int, param: str, least: bool = False) -> None:
    """Raise ApiError 400 ``context_length_exceeded`` unless ``length`` + ``wanted`` tokens fit the context.

    least: the prompt has at least this length, which is not known exactly.
    Agents look for the words "maximum context length is N tokens" to know that they must shorten their history.
    """
    limit = served.max_model_len
    if length + wanted > limit:
        raise too_long(limit, length, wanted=wanted, param=param, least=least)


def too_long(limit: int, length: int, *, wanted: int, param: str, least: bool = False) -> ApiError:
    """The error for a prompt that does not fit."""
    output = f" and at least {wanted} for the output" if wanted else ""
    error = bad_request(
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{'at least ' if least else ''}{length} tokens in the {param}{output}. Please reduce the length of the "
        f"{param}.",
        param,
        TOO_LONG,
    )
    error.tokens = f"{length} tokens > {limit - wanted} maximum"
    return error


def check_text(
    served: ServedModel, text: str, *, wanted: int, param: str, look: Callable[[], None] = lambda: None
) -> None:
    """Raise ApiError 400 ``context_length_exceeded`` for a text that cannot fit, at little cost.

    By its bytes where these prove it; a text that is long for its limit is encoded piece by piece until it is too long.
    What passes is short enough to be encoded, and may still be too long by a little. look: called between two pieces;
    raises when nobody waits for the answer.
    """
    limit = served.max_model_len
    if len(text) <= limit:
        return
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    fail = functools.partial(too_long, limit, wanted=wanted, param=param, least=True)
    least = -(-size // longest_token(served.tokenizer))
    if least + wanted > limit:
        raise fail(least)
    if size <= _DENSE * limit:
        return
    counted = 0
    for cuts, at in enumerate(range(0, len(text), _SLICE), 1):
        look()
        counted += len(served.tokenizer.encode(text[at : at + _SLICE], special=False))
        least = int(counted * _SHARE) - _PER_CUT * cuts
        if least + wanted > limit:
            raise fail(least)
