"""Log-probabilities on their way from the device to whoever asked: of drawn tokens, and of a prompt's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token from the raw logits, its rank (1 = likeliest), the likeliest others."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprob(token: int, details: Sequence[np.ndarray], row: int, wanted: int) -> TokenLogprob:
    """What row ``row`` of ``sampling.logprobs``' four arrays says of a token, with ``wanted`` alternatives."""
    chosen, ids, values, rank = (d[row] for d in details)
    top = tuple((int(i), float(v)) for i, v in zip(ids[:wanted], values[:wanted], strict=True))
    return TokenLogprob(token, float(chosen), int(rank), top)


class PromptLogprobs:
    """Gathers the log-probabilities of one prompt's tokens while its chunks are prefilled.

    prompt: all of its tokens. wanted: alternatives a token. told: whether they were handed out already.
    """

    def __init__(self, prompt: Sequence[int], wanted: int):
        self._prompt, self._wanted = prompt, wanted
        self._chunks: dict[int, tuple] = {}  # first position -> device arrays
        self.told = False

    def begin(self) -> None:
        """The prompt is prefilled from its first token, maybe not for the first time."""
        self._chunks.clear()

    def following(self, start: int, count: int) -> Sequence[int]:
        """The prompt's tokens that follow positions start to start + count; empty when there are none."""
        return self._prompt[start + 1 : start + 1 + count]

    def take(self, start: int, details: Sequence, offset: int = 0) -> None:
        """Four device arrays of a chunk that begins at ``start``, from place ``offset`` of them on; they are on their
        way to the host from here on."""
        for array in details:
            array.copy_to_host_async()
        self._chunks[start] = tuple(details), offset

    def tell(self) -> tuple[TokenLogprob | None, ...]:
        """One entry a token, None for the first, which nothing comes before. Waits for the device."""
        found: list[TokenLogprob | None] = [None] * len(self._prompt)
        for start, (details, offset) in sorted(self._chunks.items()):
            arrays = [np.asarray(d) for d in details]
            for i, token in enumerate(self.following(start, len(arrays[0]) - offset)):
                found[start + 1 + i] = token_logprob(token, arrays, offset + i, self._wanted)
        self._chunks.clear()
        self.told = True
        return tuple(found)
