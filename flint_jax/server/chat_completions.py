"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from flint_jax.grammar import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
    collect,
    finish_reason,
)
from flint_jax.server import sse
from flint_jax.server.body import Fields, kind_of
from flint_jax.server.chat_prompt import read_conversation
from flint_jax.server.chat_run import Ask, Run, Writer, respond
from flint_jax.server.choices import Piece, Token
from flint_jax.server.forced import read_format, read_structured
from flint_jax.server.jobs import Job
from flint_jax.server.logprobs import chat_logprobs, prompt_logprobs
from flint_jax.server.models import reply_name
from flint_jax.server.replies import quoted, to_text
from flint_jax.server.sampling_fields import read_prompt_logprobs, read_sampling, read_stream_options
from flint_jax.server.state import ServerState
from flint_jax.server.thinking import read_budget
from flint_jax.server.usage import prompt_progress, usage


async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    return await respond(request, ChatWriter)


@dataclasses.dataclass(frozen=True)
class _Options:
    """What only this protocol has. top_logprobs: None for no log-probabilities."""

    top_logprobs: int | None
    show_thoughts: bool
    usage_chunk: bool
    usage_every: bool


class ChatWriter(Writer):
    """Builds OpenAI's chat completions, whole or in chunks."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "store",
            "metadata",
            "service_tier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "verbosity",
        }
    )
    PREFIX: ClassVar[str] = "chatcmpl-"
    CALL_PREFIX: ClassVar[str] = "call_"

    def __init__(self, run: Run, options: _Options):
        super().__init__(run, options)
        self._created = int(time.time())
        head = {"id": run.id, "object": "chat.completion.chunk", "created": self._created, "model": run.ask.name}
        self._chunk_head = "data: " + to_text(head)[:-1]

    @classmethod
    def read(cls, fields: Fields, state: ServerState) -> tuple[Ask, _Options]:
        """The request. Raises ApiError."""
        name = reply_name(fields, state)
        stream, usage_chunk, usage_every = read_stream_options(fields, force_usage=state.settings.force_usage)
        top = _top_logprobs(fields, state)
        sampling = read_sampling(
            fields,
            state.served,
            max_tokens=_max_tokens(fields),
            logprobs=top,
            prompt_logprobs=read_prompt_logprobs(fields, state.settings.max_logprobs, stream=stream),
        )
        fields.unsupported("functions", hint="use tools")
        fields.unsupported("function_call", allowed=("auto", "none"), hint="use tool_choice")
        fields.unsupported("modalities", allowed=(["text"],), hint="this model writes text only")
        fields.unsupported("audio", hint="this model writes text only")
        fields.unsupported("prediction")
        fields.unsupported("web_search_options")
        fields.unsupported("echo")
        reasoning = Fields(fields.object("reasoning") or {}, prefix="reasoning.")
        show = fields.boolean("include_reasoning", True) and not reasoning.boolean("exclude")
        ask = Ask(
            name=name,
            conversation=read_conversation(fields),
            sampling=sampling,
            stream=stream,
            format=read_format(fields),
            structured=read_structured(fields),
            budget=read_budget(fields, "thinking", "reasoning"),
            progress=fields.boolean("return_progress") and stream,
        )
        return ask, _Options(top, show, usage_chunk, usage_every)

    async def whole(self, job: Job) -> dict[str, Any]:
        """The reply in one object."""
        choices = [
            {"index": t.index, "message": self._message(t), "logprobs": self._logprobs(t.tokens)} | self._end(t)
            for t in await self.run.whole(job)
        ]
        head = {"id": self.run.id, "object": "chat.completion", "created": self._created, "model": self.run.ask.name}
        reply = head | {"choices": choices, "usage": self._usage()}
        if self.run.ask.sampling.prompt_logprobs is not None:
            entries = self.run.choices[0].prompt_logprobs or ()
            reply["prompt_logprobs"] = prompt_logprobs(self.run.served.tokenizer, entries)
        return reply

    async def frames(self, job: Job) -> AsyncIterator[bytes]:
        """The reply as server-sent events."""
        begun = set()
        async for piece in self.run.pieces(job):
            if piece is None:
                yield sse.KEEP_ALIVE
                continue
            index, frame = piece.index, []
            if index not in begun:
                begun.add(index)
                frame.append(self._chunk(index, '{"role":"assistant","content":""}'))
            if piece.progress is not None:
                frame.append(self._chunk(index, "{}", progress=piece.progress))
            tokens = piece.tokens
            for delta in piece.deltas:
                text = self._delta(delta)
                if text:
                    frame.append(self._chunk(index, text, tokens))
                    tokens = []
            if tokens and self.options.top_logprobs is not None:
                frame.append(self._chunk(index, '{"content":""}', tokens))
            if piece.finish_reason:
                frame.append(self._chunk(index, "{}", end=self._end(piece)))
            if frame:
                yield "".join(frame).encode()
        if self.options.usage_chunk:
            yield f'{self._chunk_head},"choices":[],"usage":{to_text(self._usage())}}}\n\n'.encode()
        yield sse.DONE

    def _delta(self, delta: Delta) -> str:
        """JSON of ``delta`` in a chunk; "" for what is not told."""
        match delta:
            case Content(text):
                return f'{{"content":{quoted(text)}}}'
            case Reasoning(text) if self.options.show_thoughts:
                thought = quoted(text)
                return f'{{"reasoning":{thought},"reasoning_content":{thought}}}'
            case CallStart(index, call_id, name):
                function = f'{{"name":{quoted(name)},"arguments":""}}'
                return (
                    f'{{"tool_calls":[{{"index":{index},"id":"{call_id}","type":"function","function":{function}}}]}}'
                )
            case CallArguments(index, text):
                return f'{{"tool_calls":[{{"index":{index},"function":{{"arguments":{quoted(text)}}}}}]}}'
        return ""

    def _chunk(
        self,
        index: int,
        delta: str,
        tokens: list[Token] = (),
        end: dict[str, Any] | None = None,
        progress: Any = None,
    ) -> str:
        logprobs = self._logprobs(tokens) if tokens else None
        rest = "" if logprobs is None else f',"logprobs":{to_text(logprobs)}'
        rest += ',"finish_reason":null' if end is None else "," + to_text(end)[1:-1]
        usage = ""
        if self.options.usage_every:
            usage = f',"usage":{to_text(self._usage())}'
        elif self.options.usage_chunk:
            usage = ',"usage":null'
        if progress is not None:
            usage += f',"prompt_progress":{to_text(prompt_progress(progress))}'
        return f'{self._chunk_head},"choices":[{{"index":{index},"delta":{delta}{rest}}}]{usage}}}\n\n'

    def _message(self, total: Piece) -> dict[str, Any]:
        said = collect(total.deltas)
        # no answer at all after a thought is null, as clients know it from models that only thought
        empty = None if said.reasoning or said.calls else ""
        if self.run.ask.conversation.choice.forces:
            empty = ""
        message: dict[str, Any] = {"role": "assistant", "content": said.content or empty}
        if said.reasoning and self.options.show_thoughts:
            message |= {"reasoning": said.reasoning, "reasoning_content": said.reasoning}
        if said.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in said.calls
            ]
        return message

    def _end(self, piece: Piece) -> dict[str, Any]:
        has_calls = self.run.choices[piece.index].calls > 0
        end: dict[str, Any] = {
            "finish_reason": finish_reason(piece.finish_reason, calls=has_calls, named=self.run.named)
        }
        if piece.stop_reason is not None:
            end["stop_reason"] = piece.stop_reason
        return end

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        """Those of a hidden thought would tell it."""
        if self.options.top_logprobs is None:
            return None
        shown = tokens if self.options.show_thoughts else [t for t in tokens if not t.thought]
        return chat_logprobs(self.run.served.tokenizer, shown)

    def _usage(self) -> dict[str, Any]:
        return usage([len(self.run.prompt.ids)], self.run.choices, self.run.ask.sampling.n, thoughts=True)


def _max_tokens(fields: Fields) -> int | None:
    """The limit under its new or its old name; none means the rest of the context."""
    new = fields.integer("max_completion_tokens", None, 1)
    old = fields.integer("max_tokens", None, 1)
    return old if new is None else new


def _top_logprobs(fields: Fields, state: ServerState) -> int | None:
    wanted = fields.raw("logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        hint = "; the number goes into top_logprobs" if isinstance(wanted, int) else ""
        raise fields.error("logprobs", f"is {kind_of(wanted)}; need true or false{hint}", "invalid_type")
    top = fields.integer("top_logprobs", None, 0, state.settings.max_logprobs)
    if top and not wanted:
        raise fields.error("top_logprobs", "needs logprobs: true")
    return (top or 0) if wanted else None
