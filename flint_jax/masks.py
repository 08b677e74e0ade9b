"""Forced output in the engine: trackers of running requests, and the masks of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from flint_jax.errors import FlintError
from flint_jax.redraw import words
from flint_jax.sampling_params import SamplingParams


class Tracker(Protocol):
    """Where one output is in what it is held to; see flint_jax.guided.Tracker and flint_jax.budget.

    free: how many tokens, from the next one on, need no mask whatever they are. While it is more than what is on its
    way the row costs nothing: no mask, no second draw, and nobody waits for its last token.
    """

    @property
    def done(self) -> bool: ...
    @property
    def free(self) -> int: ...
    def push(self, token_id: int) -> None: ...
    def fill(self, row: np.ndarray) -> None: ...


class Constraint(Protocol):
    """What ``Engine.submit`` takes as ``constraint``; see flint_jax.guided.Constraint.

    ends: whether it decides where the output may end; then the request's settings give way, see ``held``.
    """

    ends: bool

    def begin(self) -> Tracker: ...


def held(params: SamplingParams) -> SamplingParams:
    """Settings of a request that is held to something: nothing that would keep it from ending where it may end."""
    return params.replace(min_tokens=0, ignore_eos=False)


def of_step(trackers: Sequence[Tracker | None], batch: int, vocab: int) -> tuple[Any, Any, dict[int, FlintError]]:
    """(masks int32 [batch, words], rows that have one bool [batch], rows whose tracker failed) for a step's rows.

    Each tracker has seen all tokens before the step's. One that is still free gets no mask: all bits are set.
    """
    masks = np.full((batch, words(vocab)), -1, np.int32)
    chosen = np.zeros(batch, bool)
    failed: dict[int, FlintError] = {}
    for i, tracker in enumerate(trackers):
        if tracker is None or tracker.free:
            continue
        try:
            tracker.fill(masks[i])
            chosen[i] = True
        except FlintError as error:
            failed[i], masks[i] = error, -1
    return masks, chosen, failed
