"""What ``generate`` gives back: replies and streams of them; and what its keywords mean."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import itertools
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flint_jax import grammar
from flint_jax.engine import Engine, Event, TokenLogprob
from flint_jax.errors import RequestError
from flint_jax.grammar import Call, CallArguments, CallStart, Content, Lexer, Problem, Reasoning
from flint_jax.sampling_params import MODEL_DEFAULTS, SamplingParams
from flint_jax.text import Detokenizer, StopStrings

FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
TEMPLATE = (
    "tools",
    "documents",
    "enable_thinking",
    "add_generation_prompt",
    "continue_final_message",
    "parse_special_in_content",
    "chat_template_kwargs",
)
_ids = itertools.count()


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of a reply. reasoning_tokens are part of completion_tokens, cached_tokens of prompt_tokens."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call that the model wants made. arguments: typed as the tool's schema says."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True, repr=False)
class Generation:
    """A reply of ``LanguageModel.generate`` or ``chat``; ``str(reply)`` is its text.

    text: the answer; of a prompt that is no chat, all that was written. None without a tokenizer.
    finish_reason: "stop", "length", or "tool_calls" when the reply ended with calls.
    logprobs: one a token, if asked for. reasoning, tool_calls: of chats only, apart from the text.
    problems: where the output broke the grammar of calls, in words. raw_text: all that was written, thoughts and the
    mark-up of calls included.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_token_ids: tuple[int, ...]
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage(0, 0)
    problems: tuple[str, ...] = ()
    raw_text: str | None = None

    def __str__(self) -> str:
        return self.text or ""

    def __repr__(self) -> str:
        shown = repr(self.text)
        if self.text is not None and len(self.text) > 200:
            shown = repr(self.text[:197] + "...")
        parts = [shown]
        if self.reasoning:
            parts.append(f"reasoning of {len(self.reasoning)} characters")
        parts += [
            f"call {c.name}({', '.join(f'{k}={v!r:.40}' for k, v in c.arguments.items())})" for c in self.tool_calls
        ]
        return f"<{'; '.join(parts)}; {self.finish_reason}, {len(self.token_ids)} tokens>"

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message, to be put at the end of the conversation."""
        out: dict[str, Any] = {"role": "assistant", "content": self.text or ""}
        if self.reasoning:
            out["reasoning"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                for c in self.tool_calls
            ]
        return out


@dataclasses.dataclass(frozen=True)
class Piece:
    """A step of a stream: what became certain with it. ``str(piece)`` is its text."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.text


# -- keywords ----------------------------------------------------------------------------------------------------------


def read_keywords(params: SamplingParams | None, given: Mapping[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    """(sampling, options of the template) of ``generate``'s keywords, which win over the fields of ``params``.

    What nobody names has the checkpoint's default. Raises RequestError for a keyword that does not exist.
    """
    for name in given:
        if name not in FIELDS and name not in TEMPLATE:
            near = difflib.get_close_matches(name, (*FIELDS, *TEMPLATE), n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"need one of {', '.join((*FIELDS, *TEMPLATE))}"
            raise RequestError(
                f"there is no {name!r}; {hint} Variables of the chat template go into chat_template_kwargs", param=name
            )
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(
            f"params is {type(params).__name__}; need a SamplingParams, or keywords such as temperature=0",
            param="params",
        )
    params = params or SamplingParams(**dict.fromkeys(MODEL_DEFAULTS))
    values = {name: value for name, value in given.items() if name in FIELDS}
    options = {name: value for name, value in given.items() if name in TEMPLATE and value is not None}
    return params.replace(**values) if values else params, options


# -- reading the output ------------------------------------------------------------------------------------------------


class Reader:
    """From the engine's events to pieces and a Generation. lexer: reads thoughts and calls; None: all is text.

    Stop strings belong to the answer: a thought or a call may hold them.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt: Sequence[int], lexer: Lexer | None = None):
        self._text = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(list(stops))
        self._lexer, self._prompt = lexer, tuple(prompt)
        self._tags = grammar.Tags.of(tokenizer.added_tokens).block if lexer is not None else {}
        self._ids: list[int] = []
        self._scores: list[TokenLogprob] = []
        self._deltas: list[grammar.Delta] = []
        self._answer: list[str] = []
        self._raw: list[str] = []
        self._open: list[grammar.Delta] = []  # of the call that is being written
        self.cached = 0
        self.hit = self.done = False
        self.reason: str | None = None
        self.error: str | None = None

    def push(self, event: Event) -> Piece | None:
        """What an event adds; None for nothing."""
        said: list[str] = []
        deltas: list[grammar.Delta] = []
        new: tuple[int, ...] = ()
        self.cached = event.cached_tokens
        if not self.hit:
            for n, token in enumerate(event.token_ids):
                new += (token,)
                if event.logprobs:
                    self._scores.append(event.logprobs[n])
                self._take(token, said, deltas)
                if self.hit:
                    break
            if event.finish_reason is not None and not self.hit:
                self._end(event.finish_reason, said, deltas)
        self._ids.extend(new)
        if event.finish_reason is not None:
            self.done = True
            self.reason, self.error = "stop" if self.hit else event.finish_reason, event.error
        self._deltas += deltas
        self._answer += said
        thought = "".join(d.text for d in deltas if type(d) is Reasoning)
        piece = Piece("".join(said), thought, self._calls(deltas), new)
        return piece if piece != Piece() else None

    def _take(self, token: int, said: list[str], deltas: list) -> None:
        if self._text is None:
            return
        before = self._text.flush() if token in self._tags else ""
        text = before + self._text.push(token)
        self._raw.append(text)
        if self._lexer is None:
            self._say(text, said)
        else:
            self._sort(self._lexer.push(token, text), said, deltas)

    def _end(self, reason: str, said: list[str], deltas: list) -> None:
        if self._text is None:
            return
        text = self._text.flush()
        self._raw.append(text)
        if self._lexer is None:
            self._say(text, said)
        else:
            self._sort(self._lexer.push(None, text) if text else [], said, deltas)
            if not self.hit:
                self._sort(self._lexer.finish(reason), said, deltas)
        if not self.hit:
            said.append(self._stops.flush())

    def _sort(self, new: Sequence[grammar.Delta], said: list[str], deltas: list) -> None:
        for delta in new:
            if type(delta) is Content:
                self._say(delta.text, said)
                if self.hit:
                    return
            else:
                deltas.append(delta)

    def _say(self, text: str, said: list[str]) -> None:
        safe, self.hit = self._stops.push(text)
        said.append(safe)

    def _calls(self, deltas: Sequence[grammar.Delta]) -> tuple[ToolCall, ...]:
        """Calls that these deltas complete."""
        found = []
        for delta in deltas:
            if type(delta) is CallStart:
                self._open = []
            if type(delta) in (CallStart, CallArguments):
                self._open.append(delta)
            elif type(delta) is grammar.CallEnd:
                start, *rest = self._open
                found.append(_typed(Call(start.id, start.name, "".join(d.json for d in rest))))
        return tuple(found)

    def result(self) -> Generation:
        """The reply. Raises RuntimeError when the engine failed."""
        if self.reason == "error":
            raise RuntimeError(f"generation failed: {self.error}")
        if self.reason == "abort":
            raise RuntimeError("generation was stopped before its end")
        message = grammar.collect(self._deltas)
        calls = tuple(_typed(c) for c in message.calls)
        thoughts = 0 if self._lexer is None else self._lexer.reasoning_tokens
        return Generation(
            tuple(self._ids),
            None if self._text is None else "".join(self._answer),
            grammar.finish_reason(self.reason, calls=bool(calls)),
            tuple(self._scores) or None,
            self._prompt,
            message.reasoning,
            calls,
            Usage(len(self._prompt), len(self._ids), thoughts, self.cached),
            tuple(f"{p.kind}: {p.message}" for p in self._deltas if type(p) is Problem),
            self._written(),
        )

    def _written(self) -> str | None:
        return None if self._text is None else "".join(self._raw if self._lexer is not None else self._answer)


def _typed(call: Call) -> ToolCall:
    return ToolCall(call.id, call.name, json.loads(call.arguments or "{}"))


# -- running -----------------------------------------------------------------------------------------------------------


class Stream:
    """One reply as it is written: iterate over it for pieces; ``generation`` is the whole reply once it has ended.

    Nothing is left behind: ``close``, the end of a ``with`` block, an exception (Ctrl-C, too) and letting it go all end
    the request. Streams of one model may be read in turns and from several threads.
    """

    def __init__(
        self,
        engine: Engine,
        lock: threading.RLock,
        reader: Reader,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        word: Word | None = None,
        broken: Callable[[Engine], None] = lambda engine: None,
    ):
        self._engine, self._lock, self._reader = engine, lock, reader
        self._word, self._broken = word, broken
        self._pieces: collections.deque[Piece] = collections.deque()
        self._told = 0
        self._id = f"generate-{next(_ids)}"
        self._over = True  # until it is submitted there is nothing to end
        engine.submit(prompt, params, on_event=_weakly(self), request_id=self._id)
        self._over = False

    @property
    def generation(self) -> Generation:
        """The whole reply; reads what is left of the stream."""
        while not self._over:
            self._advance()
        return self._reader.result()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        while not self._pieces:
            if self._over:
                self._reader.result()  # raises what went wrong
                raise StopIteration
            self._advance()
        return self._pieces.popleft()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_over", True) and not sys.is_finalizing():
            self._engine.abort(self._id)  # whoever uses the engine next does the rest

    def close(self) -> None:
        """End the request if it has not ended; its slot is free afterwards."""
        if self._over:
            return
        with self._lock:
            self._engine.abort(self._id)
            try:
                while not self._over:
                    self._engine.step()
            except Exception:
                self._over = True
                self._engine.stop()
                self._broken(self._engine)
                return
            if not intact(self._engine):
                self._engine.stop()
                self._broken(self._engine)

    def _advance(self) -> None:
        try:
            with self._lock, self._word or contextlib.nullcontext():
                if not self._over:
                    self._engine.step()
        except BaseException:
            self.close()
            raise

    def _hear(self, event: Event) -> None:
        piece = self._reader.push(event)
        if piece is not None:
            self._pieces.append(piece)
        self._told += len(event.token_ids)
        if self._told > 1 or event.finish_reason is not None:
            self._word = None  # prefill and decode have run: nothing more to wait for
        if event.finish_reason is not None:
            self._over = True
        elif self._reader.hit:
            self._engine.abort(self._id)


def _weakly(stream: Stream) -> Callable[[Event], None]:
    """Its ``_hear`` for an engine, which must not keep a stream alive that nobody reads any more."""
    found = weakref.ref(stream)

    def hear(event: Event) -> None:
        if (alive := found()) is not None:
            alive._hear(event)

    return hear


def intact(engine: Engine) -> bool:
    """Whether an engine that nobody uses has all its buffers, slots and pages: an interruption may lose some."""
    import jax

    leaves = jax.tree.leaves((engine.steps.state, engine.steps.tables))
    if any(leaf.is_deleted() for leaf in leaves):
        return False
    stats = engine.stats()
    busy = stats["running"] + stats["waiting"]
    return bool(busy) or (stats["free_slots"], stats["free_pages"]) == (stats["slots"], stats["pages"])


class Word:
    """Says on standard error that steps are being compiled, when that takes longer than a moment."""

    def __init__(self, text: str, after: float = 1.5):
        self._text, self._after = text, after
        self._timer: threading.Timer | None = None
        self._began: float | None = None
        self._said = False

    def __enter__(self) -> Word:
        if not self._said:
            self._began = self._began or time.monotonic()
            self._timer = threading.Timer(self._after, self._say)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _say(self) -> None:
        self._said = True
        with contextlib.suppress(OSError, ValueError):
            print(self._text, file=sys.stderr, flush=True)
