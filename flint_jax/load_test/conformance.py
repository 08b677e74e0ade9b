"""What a stream of an OpenAI-compatible server must look like, checked chunk by chunk."""

from __future__ import annotations

import json
from typing import Any

FINISHES = {"chat": {"stop", "length", "tool_calls", "content_filter"}, "completions": {"stop", "length"}}
OBJECTS = {"chat": "chat.completion.chunk", "completions": "text_completion"}


class Checker:
    """Reads the blocks of one stream, in order; ``warnings`` says what is wrong with it.

    kind: "chat" or "completions". wanted: tokens asked for; exact: whether every reply must have just as many.
    """

    def __init__(self, kind: str, *, wanted: int, exact: bool, choices: int = 1):
        self._kind, self._wanted, self._exact, self._choices = kind, wanted, exact, choices
        self._head: tuple | None = None
        self._begun: set[int] = set()
        self._finished: dict[int, str] = {}
        self._texts = 0
        self._done = False
        self.usage: dict[str, Any] | None = None
        self.warnings: list[str] = []

    def block(self, block: str) -> bool:
        """Read one block; whether it carries generated text."""
        if block.startswith(":"):
            return False  # a comment: keep-alive
        if self._done:
            self._warn("something comes after [DONE]")
        if not block.startswith("data: ") or "\n" in block:
            self._warn(f"not one data line: {block[:80]!r}")
            return False
        data = block.removeprefix("data: ")
        if data == "[DONE]":
            self._done = True
            return False
        try:
            chunk = json.loads(data)
        except ValueError:
            self._warn(f"not JSON: {data[:80]!r}")
            return False
        if "error" in chunk:
            self._warn(f"an error event: {json.dumps(chunk['error'])[:200]}")
            return False
        return self._chunk(chunk)

    def end(self) -> list[str]:
        """The stream is over: check what only its end tells; returns all warnings."""
        if not self._done:
            self._warn("no [DONE]")
        for index in range(self._choices):
            if index not in self._begun:
                self._warn(f"choice {index} never began")
            elif index not in self._finished:
                self._warn(f"choice {index} has no finish_reason")
        if self.usage is None:
            self._warn("usage was asked for and did not come")
        else:
            self._check_usage(self.usage)
        return self.warnings

    def _chunk(self, chunk: dict[str, Any]) -> bool:
        head = tuple(chunk.get(k) for k in ("id", "object", "created", "model"))
        if self._head is None:
            self._head = head
            if head[1] != OBJECTS[self._kind]:
                self._warn(f"object is {head[1]!r}")
            if not all(head):
                self._warn(f"id, object, created, model: {head}")
        elif head != self._head:
            self._warn(f"id, object, created or model changes: {head}")
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            self._warn("choices is no array")
            return False
        if self.usage is not None:
            self._warn("a chunk comes after the usage chunk")
        if chunk.get("usage") is not None:
            if choices:
                self._warn("usage on a chunk with choices, which nobody asked for")
            else:
                self.usage = chunk["usage"]
        elif not choices:
            self._warn("a chunk with neither choices nor usage")
        return any([self._choice(choice) for choice in choices])

    def _choice(self, choice: dict[str, Any]) -> bool:
        index = choice.get("index")
        if not isinstance(index, int) or not 0 <= index < self._choices:
            self._warn(f"choice index {index!r}")
            return False
        if index in self._finished:
            self._warn(f"choice {index} goes on after its finish_reason")
        said = self._delta(index, choice) if self._kind == "chat" else bool(choice.get("text"))
        self._begun.add(index)
        reason = choice.get("finish_reason", "absent")
        if reason == "absent":
            self._warn("finish_reason is absent")
        elif reason is not None:
            self._finished[index] = reason
            if reason not in FINISHES[self._kind]:
                self._warn(f"finish_reason {reason!r}")
        self._texts += said
        return said

    def _delta(self, index: int, choice: dict[str, Any]) -> bool:
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            self._warn("delta is no object")
            return False
        first = index not in self._begun
        if first and delta.get("role") != "assistant":
            self._warn("the first delta has no role")
        if not first and "role" in delta:
            self._warn("a later delta has a role")
        for name in ("tool_calls", "function_call"):
            if name in delta and delta[name] is None:
                self._warn(f"{name} is null; it should be absent")
        return any(bool(delta.get(name)) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))

    def _check_usage(self, usage: dict[str, Any]) -> None:
        counts = [usage.get(k) for k in ("prompt_tokens", "completion_tokens", "total_tokens")]
        if not all(isinstance(c, int) for c in counts):
            self._warn(f"usage without counts: {usage}")
            return
        prompt, completion, total = counts
        if total != prompt + completion:
            self._warn(f"total_tokens {total} is not {prompt} + {completion}")
        if completion < self._texts:
            self._warn(f"{completion} completion_tokens in {self._texts} pieces of text")
        if completion > self._wanted * self._choices:
            self._warn(f"{completion} completion_tokens, {self._wanted} asked for")
        if self._exact and completion != self._wanted * self._choices:
            self._warn(f"{completion} completion_tokens with ignore_eos, {self._wanted} asked for")
        if self._exact and any(reason != "length" for reason in self._finished.values()):
            self._warn(f"finish_reason {sorted(set(self._finished.values()))} with ignore_eos; need length")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        if cached is not None and not 0 <= cached <= prompt:
            self._warn(f"{cached} cached_tokens of {prompt}")

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
