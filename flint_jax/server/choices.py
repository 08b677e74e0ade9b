"""One choice of a reply: from the engine's tokens to pieces, the same for streaming and not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from flint_jax.grammar import Delta, Lexer, State
from flint_jax.text import Detokenizer, StopStrings

_AFTER_TAG = re.compile("(?<=>)")


@dataclasses.dataclass
class Token:
    """One token with its log-probability, for ``logprobs``; generated, or of the prompt.

    logprob: None for a prompt's first token. offset: characters of output before this token. top: the alternatives as
    (token id, log-probability). thought: whether it was spent on thinking.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int
    thought: bool = False


@dataclasses.dataclass
class Piece:
    """A step of one choice: what is certain, the tokens it took, and at the end the engine's reason.

    content: text of a plain completion. deltas: what the grammar says of a chat's output, in order. progress: how far
    the prompt is, as the engine tells it, for requests that asked.
    """

    index: int
    content: str = ""
    deltas: list[Delta] = dataclasses.field(default_factory=list)
    tokens: list[Token] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    progress: Any = None

    def join(self, later: Piece) -> None:
        """The next piece of the same choice, which arrived together with this one."""
        self.content += later.content
        self.deltas += later.deltas
        self.tokens += later.tokens
        self.progress = later.progress or self.progress
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


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

    lexer: reads thoughts and tool calls out of the text; None for plain completions, whose pieces have ``content``.
    begun: bytes of a character that the prompt ends within: the output says it whole, when it completes it. echoed:
    else as U+FFFD (the prompt's text goes before), or not at all.
    tags: the token ids that the lexer takes for tags. Text before one is complete: a stop string never reaches across.
    A choice can end before the engine does, at a stop string: look at ``done`` after each push.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Any,
        options: TextOptions,
        *,
        lexer: Lexer | None = None,
        tags: dict[int, str] | None = None,
        begun: bytes = b"",
        echoed: bool = False,
    ):
        self.index = index
        self._options = options
        self._lexer, self._tags = lexer, tags or {}
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens, begun=begun)
        self._drop = bool(begun) and not echoed
        self._stops = self._new_stops()
        self._characters = 0
        self.completion_tokens = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.prompt_logprobs: Sequence[Any] | None = None  # one a prompt token, None for the first
        self.finish_reason: str | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens spent on thinking, tags included."""
        return self._lexer.reasoning_tokens if self._lexer else 0

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return self._lexer.calls if self._lexer else 0

    @property
    def done(self) -> bool:
        """Whether the last piece is out."""
        return self.finish_reason is not None

    def push(self, event: Any) -> Piece:
        """The piece for one engine event."""
        piece = Piece(self.index, progress=event.progress)
        self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        for n, token_id in enumerate(event.token_ids):
            self.completion_tokens += 1
            at = self._characters
            thought = event.logprobs is not None and self._thinks()
            hit = self._token(piece, token_id)
            if event.logprobs is not None:
                lp = event.logprobs[n]
                piece.tokens.append(Token(token_id, lp.logprob, lp.top, at, thought or self._thinks()))
            if hit:
                return self._finish(piece, "stop", self._stops.matched)
            if self._lexer is not None and self._lexer.full:
                return self._finish(piece, "stop", None)
        if event.finish_reason is None:
            return piece
        if self._read(piece, None, self._detokenizer.flush()):
            return self._finish(piece, "stop", self._stops.matched)
        self._say(piece, None, self._stops.flush())
        asked = event.stop_token in self._options.stop_token_ids
        return self._finish(piece, event.finish_reason, event.stop_token if asked else None)

    def _token(self, piece: Piece, token_id: int) -> bool:
        """Put one token's text into the piece. True when a stop string is hit."""
        tag = self._tags.get(token_id)
        if tag is None:
            return self._read(piece, token_id, self._detokenizer.push(token_id))
        if self._read(piece, None, self._detokenizer.flush()):  # of a character that the tag cuts off
            return True
        self._say(piece, None, self._stops.flush())
        self._stops = self._new_stops()
        if tag in self._options.stop:  # the whole of it: others do not look into tags
            safe, hit = self._watched(tag)
            if hit:
                self._say(piece, None, safe)
                return True
            self._stops = self._new_stops()
        self._say(piece, token_id, "")
        return False

    def _read(self, piece: Piece, token_id: int | None, text: str) -> bool:
        """Put text into the piece. True when a stop string is hit.

        A tag that acts by its characters ends a thought within the text: so the text is taken up to each ``>``.
        """
        parts = _AFTER_TAG.split(text) if self._lexer is not None and self._options.stop else [text]
        for part in parts:
            safe, hit = self._watched(part)
            self._say(piece, token_id, safe)
            if hit:
                return True
            token_id = None  # counted once
        return False

    def _watched(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was hit). Thoughts may hold stop strings."""
        if self._drop and text:
            self._drop = False
            text = text.removeprefix("\ufffd")  # the prompt's own, which nothing completed
        self._characters += len(text)
        if not self._options.stop or self.completion_tokens <= self._options.min_tokens or self._thinks():
            return text, False
        return self._stops.push(text)

    def _say(self, piece: Piece, token_id: int | None, text: str) -> None:
        if self._lexer is None:
            piece.content += text
        elif text or token_id is not None:
            piece.deltas += self._lexer.push(token_id, text)

    def _finish(self, piece: Piece, reason: str, stop_reason: int | str | None) -> Piece:
        if self._lexer is not None:
            piece.deltas += self._lexer.finish(reason)
        self.finish_reason = piece.finish_reason = reason
        piece.stop_reason = stop_reason
        return piece

    def _thinks(self) -> bool:
        return self._lexer is not None and self._lexer.state is State.REASONING

    def _new_stops(self) -> StopStrings:
        return StopStrings(self._options.stop, include_stop_str_in_output=self._options.include_stop)
