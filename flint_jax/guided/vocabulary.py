"""A tokenizer as llguidance sees it: the bytes of every ordinary token, and which tokens are no text at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import llguidance

from flint_jax.errors import RequestError

# Besides JSON's text, the tokens that a rule lets through together or not at all, so that a mask does not look at each:
# 10 to 15 us instead of 1,100 for `[A-Za-z ]{1,3200}` where 150,000 tokens are letters.
_LETTERS = ("[a-z]{1,10}", "[a-z ]{1,10}", "[a-z ]{1,30}")


class Vocabulary:
    """The rows of a model's head for grammars. Takes 0.5 s to make for 150,000 tokens; thread-safe.

    An added token (``<think>``, ``<|user|>``) can only be asked for as that token: its characters from ordinary tokens
    are other output, and no rule for text lets the token itself through. Rows without a token are never allowed.

    tokenizer: loaders' Tokenizer. size: rows of the head. eos_ids: tokens that end the output where it may end.
    Raises RequestError when none of ``eos_ids`` is a row: nothing could end then.
    """

    def __init__(self, tokenizer: Any, size: int, eos_ids: Iterable[int]):
        self.size = size
        self.added: dict[str, int] = {tag: i for tag, i in tokenizer.added_tokens.items() if i < size}
        eos = sorted({int(i) for i in eos_ids if 0 <= i < size})
        if not eos:
            raise RequestError("forced output needs a token that ends it, and this model's vocabulary names none")
        source = _Source(tokenizer, size, self.added, eos[0])
        wrapper = llguidance.TokenizerWrapper(source)
        slices = [*_LETTERS, *llguidance.LLTokenizer.general_slices()]
        self.tokens = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=eos, slices=slices)


class _Source:
    """What ``llguidance.TokenizerWrapper`` asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, size: int, added: dict[str, int], eos: int):
        self.eos_token_id = eos
        self._encode = tokenizer.encode
        spelling = {i: tag.encode() for tag, i in added.items()}
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        for i in range(size):
            text = b"" if i in spelling else tokenizer.token_bytes(i)
            if not text:  # an empty token would be allowed anywhere and accepted nowhere
                self.special_token_ids.append(i)
            self.tokens.append(text or spelling.get(i) or b"<|row %d|>" % i)

    def __call__(self, text: str | bytes) -> Sequence[int]:
        """Ids of forced text, so that it comes out in the pieces that the model knows."""
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text, special=False)
