"""Which part of the output is thought and which is answer.

The state at the start comes from the prompt: does it end inside an open ``<think>``? After that the tags decide. A tag
that is one token of the vocabulary acts only as that token, so the same characters written with ordinary tokens stay
text; a tag that the vocabulary lacks acts by its characters. Inside a tool call no tag of thinking acts; the call
itself is passed on as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
TAGS = (THINK, END_THINK, CALL, END_CALL)

THOUGHT, ANSWER = "thought", "answer"


def prompt_opens_thought(tokenizer: Any, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt's last turn ends inside an open ``<think>``.

    The last turn begins after the last control token, so nothing that a user or an earlier turn wrote can open one.
    """
    tags = {tokenizer.added_tokens[tag] for tag in TAGS if tag in tokenizer.added_tokens}
    turn_marks = tokenizer.special_ids - tags
    start = next((i + 1 for i in reversed(range(len(prompt_ids))) if prompt_ids[i] in turn_marks), None)
    if start is None:  # no turn marks at all: only an opening at the very end can be trusted
        return tokenizer.decode(prompt_ids[-16:]).rstrip().endswith(THINK)
    turn = tokenizer.decode(prompt_ids[start:])
    return turn.rfind(THINK) > turn.rfind(END_THINK)


class ThoughtSplitter:
    """Tokens in, (part, text) pieces out.

    detokenizer: makes a fresh flint_jax.text.Detokenizer; one is used for each stretch between two tag tokens.
    """

    def __init__(self, tokenizer: Any, detokenizer: Callable[[], Any], *, in_thought: bool):
        self._make = detokenizer
        self._detokenizer = detokenizer()
        self._tag_of = {tokenizer.added_tokens[tag]: tag for tag in TAGS if tag in tokenizer.added_tokens}
        self._text_tags = tuple(tag for tag in TAGS if tag not in tokenizer.added_tokens)
        self._held = ""  # the end of the text that may turn out to begin a tag
        self._part = THOUGHT if in_thought else ANSWER
        self._in_call = False
        self.thought_tokens = 0

    def push(self, token_id: int) -> list[tuple[str, str]]:
        """Pieces that are certain after this token; text may be empty."""
        tag = self._tag_of.get(token_id)
        if tag is None:
            self.thought_tokens += self._part == THOUGHT
            return self._scan(self._detokenizer.push(token_id))
        pieces = self._end_stretch()
        self.thought_tokens += self._part == THOUGHT or tag == THINK
        return [*pieces, *self._act(tag)]

    def flush(self) -> list[tuple[str, str]]:
        """What was held back, at the end of the output."""
        return self._end_stretch()

    def _end_stretch(self) -> list[tuple[str, str]]:
        pieces = self._scan(self._detokenizer.flush())
        if self._held:
            pieces.append((self._part, self._held))
            self._held = ""
        self._detokenizer = self._make()
        return pieces

    def _act(self, tag: str) -> list[tuple[str, str]]:
        if self._in_call:
            self._in_call = tag != END_CALL
            return [(self._part, tag)]
        if tag == CALL:  # a call ends a thought that was left open
            self._part, self._in_call = ANSWER, True
            return [(ANSWER, tag)]
        if tag == END_CALL:
            return [(self._part, tag)]
        self._part = THOUGHT if tag == THINK else ANSWER
        return []

    def _scan(self, text: str) -> list[tuple[str, str]]:
        if not self._text_tags:
            return [(self._part, text)] if text else []
        return list(self._scan_tags(self._held + text))

    def _scan_tags(self, text: str) -> Iterator[tuple[str, str]]:
        while True:
            found = min(((text.find(tag), tag) for tag in self._text_tags if tag in text), default=None)
            if found is None:
                break
            at, tag = found
            yield self._part, text[:at]
            yield from self._act(tag)
            text = text[at + len(tag) :]
        keep = max(
            (n for tag in self._text_tags for n in range(1, len(tag)) if text.endswith(tag[:n])),
            default=0,
        )
        self._held = text[len(text) - keep :]
        yield self._part, text[: len(text) - keep]
