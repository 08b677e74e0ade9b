"""A limit to the tokens of a thought: once they are used, ``</think>`` is the only token that may come."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from flint_jax.grammar import State
from flint_jax.grammar.tags import CALL, END_CALL, END_THINK, THINK

_FOREVER = sys.maxsize


class Budget:
    """Holds one request's thoughts to ``limit`` tokens, all of them together, tags not counted. Shared by its choices.

    tags: token id -> tag, as ``Tags.block``; ``</think>`` must be there. start: where the output begins. inner: what
    else the output is held to (flint_jax.guided), which sees every token, too.
    ends: whether something decides where the output may end; a budget alone does not.
    """

    def __init__(self, limit: int, tags: Mapping[int, str], start: State, inner: Any = None):
        self.limit, self.tags, self.start, self.inner = limit, tags, start, inner
        (self.end_id,) = (i for i, tag in tags.items() if tag == END_THINK)
        self.ends = inner is not None and inner.ends

    def begin(self) -> Tracker:
        """The state before the first token."""
        return Tracker(self)


class Tracker:
    """Where one output is in its budget. left: tokens that its thoughts may still have."""

    def __init__(self, budget: Budget):
        self._tags, self._end_id = budget.tags, budget.end_id
        self._inner = None if budget.inner is None else budget.inner.begin()
        self._state = budget.start  # REASONING, CONTENT, or NAME for all of a call, in which a tag opens nothing
        self._begun = False
        self.left = budget.limit

    @property
    def done(self) -> bool:
        """Whether no token may come any more."""
        return self._inner is not None and self._inner.done

    @property
    def free(self) -> int:
        """Tokens that may be drawn without a look at the ones before them.

        Outside of a thought that is all of them, so that an answer costs nothing. A thought that begins anew when
        nothing is left is therefore noticed late, by the token that is on its way. Not so in the first place, where
        most thoughts begin.
        """
        if self._inner is not None:
            return self._inner.free
        if self._state is State.REASONING:
            return self.left
        return _FOREVER if self._begun else self.left + 1

    def push(self, token_id: int) -> None:
        """Take the next token. Raises what the inner tracker raises."""
        tag = self._tags.get(token_id)
        thought = self._state is State.REASONING
        if tag == CALL:  # ends a thought, as the lexer has it
            self._state = State.CALL
        elif (tag == END_THINK and thought) or (tag == END_CALL and self._state is State.CALL):
            self._state = State.CONTENT
        elif tag == THINK and self._state is State.CONTENT:
            self._state = State.REASONING
        elif thought:
            self.left = max(self.left - 1, 0)
        self._begun = True
        if self._inner is not None:
            self._inner.push(token_id)

    def fill(self, row: Any) -> None:
        """Write the mask of the next token, as ``flint_jax.guided.Tracker.fill``. Raises what that raises."""
        if self._inner is None:
            row[:] = -1
        else:
            self._inner.fill(row)
        if self._state is State.REASONING and not self.left:
            words = row.view("uint32")
            word, bit = self._end_id // 32, 1 << self._end_id % 32
            if int(words[word]) & bit:  # else a character lacks bytes, and the grammar waits
                words[:] = 0
                words[word] = bit
