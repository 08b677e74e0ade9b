"""Text from tokens: incremental detokenising and stop strings. Knows bytes and characters, no model."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from flint_jax.errors import RequestError


class TokenBytes(Protocol):
    """The part of a tokenizer that detokenising needs."""

    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Token ids to text, one at a time.

    A push returns only whole characters: the bytes of an unfinished one wait for the next token. Bytes that cannot be
    UTF-8 become U+FFFD. All pushes and the flush joined are what ``tokenizer.decode`` gives for the whole sequence.
    A push costs the bytes of its own token plus at most 3 waiting ones, however long the text is by then.
    begun: the bytes of an unfinished character that the text before ends with (``unfinished``).
    """

    def __init__(self, tokenizer: TokenBytes, *, skip_special_tokens: bool = True, begun: bytes = b""):
        self._token_bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(begun)

    def push(self, token_id: int) -> str:
        """Text that became complete with this token; often one word, sometimes nothing."""
        return "" if token_id in self._skip else self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """U+FFFD for bytes still waiting, else nothing. Ends the text: later pushes begin a new one."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def unfinished(tokenizer: TokenBytes, ids: Sequence[int]) -> bytes:
    """The bytes of a character that the text of ``ids`` ends within, 1 to 3; none when it ends with a whole one."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(b"".join(map(tokenizer.token_bytes, ids[-8:])))
    return decoder.getstate()[0]


class StopStrings:
    """Watches streamed text for stop strings and lets through only what cannot become one.

    The string that is complete first wins, and of those that end together the longest: so the result does not depend on
    how the text was cut into pushes. Held back is exactly the longest tail that is a proper prefix of a stop string.
    Each character costs a constant number of steps per stop string (Knuth-Morris-Pratt).

    Attributes:
        matched: the stop string that was hit, or None.
    """

    def __init__(self, stops: Sequence[str], *, include_stop_str_in_output: bool = False):
        if not all(isinstance(s, str) and s for s in stops):
            raise RequestError(f"stop strings must be non-empty strings, got {list(stops)!r}", param="stop")
        self._watch = [(s, _failure(s)) for s in sorted(set(stops), key=len, reverse=True)]
        self._state = [0] * len(self._watch)  # characters of each stop string that the text now ends with
        self._held = ""
        self._include = include_stop_str_in_output
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was hit). After a hit there is no more text."""
        if self.matched is not None:
            return "", True
        if not self._watch:
            return text, False
        whole = self._held + text
        for at in range(len(self._held), len(whole)):
            if self._advance(whole[at]):
                self._held = ""
                end = at + 1
                return whole[: end if self._include else end - len(self.matched)], True
        keep = len(whole) - max(self._state)
        self._held = whole[keep:]
        return whole[:keep], False

    def flush(self) -> str:
        """The tail held back, once no more text can come."""
        held, self._held = self._held, ""
        self._state = [0] * len(self._watch)
        return held

    def _advance(self, char: str) -> bool:
        for n, (stop, failure) in enumerate(self._watch):
            k = self._state[n]
            while k and stop[k] != char:
                k = failure[k - 1]
            k += stop[k] == char
            self._state[n] = k
            if k == len(stop):  # the longest come first, so a shorter one that ends here too does not win
                self.matched = stop
                return True
        return False


def _failure(stop: str) -> list[int]:
    """For each prefix the length of its longest proper suffix that is again a prefix."""
    table, k = [0] * len(stop), 0
    for i in range(1, len(stop)):
        while k and stop[k] != stop[i]:
            k = table[k - 1]
        k += stop[k] == stop[i]
        table[i] = k
    return table
