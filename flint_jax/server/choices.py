"""One choice of a reply: from the engine's tokens to pieces of text, the same for streaming and not."""

from __future__ import annotations

import dataclasses
from typing import Any

from flint_jax.server.thinking import ANSWER, THOUGHT, ThoughtSplitter
from flint_jax.text import Detokenizer, StopStrings


@dataclasses.dataclass
class Token:
    """One generated token with its log-probability, for ``logprobs``.

    offset: characters of output before this token. top: the alternatives as (token id, log-probability).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclasses.dataclass
class Piece:
    """A step of one choice: text that is certain, the tokens it took, and at the end the reason."""

    index: int
    content: str = ""
    reasoning: str = ""
    tokens: list[Token] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """How text is made from tokens: stop strings, from which token on they count, and what stays visible.

    stop_token_ids: ids that the client asked to stop at; only these are told as ``stop_reason``, as vLLM does.
    """

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True


class Choice:
    """Turns engine events into pieces.

    thoughts: whether the prompt opens a thought, or None when thinking is not looked for (plain completions).
    A choice can end before the engine does, at a stop string: look at ``done`` after each push.
    """

    def __init__(self, index: int, tokenizer: Any, options: TextOptions, *, thoughts: bool | None):
        def detokenizer():
            return Detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens)

        self.index = index
        self._options = options
        self._splitter = None if thoughts is None else ThoughtSplitter(tokenizer, detokenizer, in_thought=thoughts)
        self._detokenizer = detokenizer() if thoughts is None else None
        self._stops = self._new_stops()
        self._part = ANSWER
        self._characters = 0
        self._thought_gap = ""  # white space at the end of a thought, dropped unless more thought follows
        self.completion_tokens = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.finish_reason: str | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens spent on thinking, tags included."""
        return self._splitter.thought_tokens if self._splitter else 0

    @property
    def done(self) -> bool:
        """Whether the last piece is out."""
        return self.finish_reason is not None

    def push(self, event: Any) -> Piece:
        """The piece for one engine event."""
        piece = Piece(self.index)
        self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
        for n, token_id in enumerate(event.token_ids):
            self.completion_tokens += 1
            if event.logprobs is not None:
                lp = event.logprobs[n]
                piece.tokens.append(Token(token_id, lp.logprob, lp.top, self._characters))
            if self._add(piece, self._texts(token_id), stoppable=self.completion_tokens > self._options.min_tokens):
                return self._finish(piece, "stop", self._stops.matched)
        if event.finish_reason is None:
            return piece
        if self._add(piece, self._rest(), stoppable=self.completion_tokens > self._options.min_tokens):
            return self._finish(piece, "stop", self._stops.matched)
        self._emit(piece, self._part, self._stops.flush())
        asked = event.stop_token in self._options.stop_token_ids
        return self._finish(piece, event.finish_reason, event.stop_token if asked else None)

    def _texts(self, token_id: int) -> list[tuple[str, str]]:
        if self._splitter:
            return self._splitter.push(token_id)
        return [(ANSWER, self._detokenizer.push(token_id))]

    def _rest(self) -> list[tuple[str, str]]:
        return self._splitter.flush() if self._splitter else [(ANSWER, self._detokenizer.flush())]

    def _add(self, piece: Piece, texts: list[tuple[str, str]], *, stoppable: bool) -> bool:
        """Put texts through the stop strings into the piece. True when one of them is hit."""
        for part, text in texts:
            if part != self._part:  # a stop string never reaches across a tag
                self._emit(piece, self._part, self._stops.flush())
                self._stops, self._part = self._new_stops(), part
            self._characters += len(text)
            if not stoppable:
                self._emit(piece, part, text)
                continue
            safe, hit = self._stops.push(text)
            self._emit(piece, part, safe)
            if hit:
                return True
        return False

    def _emit(self, piece: Piece, part: str, text: str) -> None:
        if not text:
            return
        if part != THOUGHT:
            self._thought_gap = ""
            piece.content += text
            return
        text = self._thought_gap + text
        kept = text.rstrip()
        self._thought_gap = text[len(kept) :]
        piece.reasoning += kept

    def _finish(self, piece: Piece, reason: str, stop_reason: int | str | None) -> Piece:
        self.finish_reason = piece.finish_reason = reason
        piece.stop_reason = stop_reason
        return piece

    def _new_stops(self) -> StopStrings:
        return StopStrings(list(self._options.stop), include_stop_str_in_output=self._options.include_stop)
