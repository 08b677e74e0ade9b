"""The eight tags of the output grammar, and which of them a vocabulary has as one token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"

BLOCK_TAGS = (THINK, END_THINK, CALL, END_CALL)
ARGUMENT_TAGS = (KEY, END_KEY, VALUE, END_VALUE)
LONGEST = max(map(len, BLOCK_TAGS + ARGUMENT_TAGS))


@dataclasses.dataclass(frozen=True)
class Tags:
    """Which token ids are tags.

    A block tag that the vocabulary has as one token acts only as that token: the same characters from ordinary tokens
    are text about the tag. A block tag that it lacks acts by its characters, and argument tags always do.

    block: token id -> ``<think>``, ``</think>``, ``<tool_call>`` or ``</tool_call>``.
    argument: token id -> one of the four ``arg_`` tags; needed only when the detokeniser leaves these out.
    """

    block: Mapping[int, str] = dataclasses.field(default_factory=dict)
    argument: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, added_tokens: Mapping[str, int]) -> Tags:
        """From spelling -> id of a tokenizer's added tokens."""
        return cls(
            block={added_tokens[tag]: tag for tag in BLOCK_TAGS if tag in added_tokens},
            argument={added_tokens[tag]: tag for tag in ARGUMENT_TAGS if tag in added_tokens},
        )

    @property
    def by_text(self) -> frozenset[str]:
        """The tags that act by their characters."""
        return frozenset(BLOCK_TAGS + ARGUMENT_TAGS).difference(self.block.values())
