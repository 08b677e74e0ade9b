"""A compiled grammar, and how far one output has come in it."""

from __future__ import annotations

from typing import Any

import llguidance

from flint_jax.errors import FlintError


class ConstraintError(FlintError):
    """A grammar met its limits in the middle of an output: that output ends, no other."""


class Constraint:
    """What one request's output is held to. Shared by its choices; ``begin`` gives each its own state.

    ends: the grammar decides where the output may end.
    """

    ends = True

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def begin(self) -> Tracker:
        """The state before the first token."""
        return Tracker(self._matcher.deep_copy())


class Tracker:
    """Where one output is in its grammar. Not thread-safe: the engine's thread drives it.

    done: no token may come any more, so the output is complete without an end token. free: see flint_jax.masks.
    """

    free = 0

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher
        self.done = False

    def push(self, token_id: int) -> None:
        """Take the next token. Raises ConstraintError for one that the mask did not allow."""
        if not self._matcher.consume_token(token_id):
            raise ConstraintError(f"token {token_id} does not fit the grammar: {_reason(self._matcher)}")
        self.done = self._matcher.is_stopped()

    def fill(self, row: Any) -> None:
        """Write the mask of the next token to ``row``, a contiguous numpy int32 [ceil(V / 32)]: bit i % 32 of word
        i // 32 says whether token i may come. Takes about 30 µs for 150,000 tokens, without Python's lock.

        Raises ConstraintError when the grammar has become too complex to go on.
        """
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise ConstraintError(f"the grammar cannot go on: {_reason(self._matcher)}")


def _reason(matcher: llguidance.LLMatcher) -> str:
    return " ".join(matcher.get_error().split("<state>")[0].split())[:300]
