"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from flint_jax.server import sse
from flint_jax.server.body import Fields, kind_of, log_unknown, read_object
from flint_jax.server.chat_prompt import ChatPrompt, read_prompt
from flint_jax.server.choices import Choice, Piece
from flint_jax.server.jobs import Job
from flint_jax.server.logprobs import chat_logprobs
from flint_jax.server.models import reply_name
from flint_jax.server.replies import JsonReply
from flint_jax.server.running import finished, pieces
from flint_jax.server.sampling_fields import Sampling, read_sampling, read_stream_options
from flint_jax.server.state import ServedModel, ServerState
from flint_jax.server.usage import usage

_IGNORED = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
        "parallel_tool_calls",
    }
)


@dataclasses.dataclass
class _Plan:
    """A checked request."""

    name: str
    prompt: ChatPrompt
    sampling: Sampling
    top_logprobs: int | None  # None: no logprobs
    show_thoughts: bool
    stream: bool
    usage_chunk: bool
    usage_every: bool


async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    state: ServerState = request.app.state.server
    served = state.served
    fields = await read_object(request, state.settings.max_request_bytes)
    plan = await _read(fields, state, served)
    log_unknown(fields, _IGNORED)
    reply = _Reply(served, plan)
    job = state.open_job(plan.sampling.n)
    try:
        reply.submit(job)
    except BaseException:
        job.close()
        raise
    if plan.stream:
        return sse.EventStream(job, reply.frames(job), request.state.request_id)
    with job:
        job.watch_client(request.receive)
        return JsonReply(await reply.whole(job))


async def _read(fields: Fields, state: ServerState, served: ServedModel) -> _Plan:
    name = reply_name(fields, state)
    stream, usage_chunk, usage_every = read_stream_options(fields, force_usage=state.settings.force_usage)
    sampling = read_sampling(
        fields, served, max_tokens=_max_tokens(fields), logprobs=(top := _top_logprobs(fields, state))
    )
    fields.unsupported("functions", hint="use tools")
    fields.unsupported("function_call", allowed=("auto", "none"), hint="use tool_choice")
    fields.unsupported("response_format", allowed=({"type": "text"},))
    fields.unsupported("modalities", allowed=(["text"],), hint="this model writes text only")
    fields.unsupported("audio", hint="this model writes text only")
    fields.unsupported("prediction")
    fields.unsupported("web_search_options")
    fields.unsupported("echo")
    show = fields.boolean("include_reasoning", True)
    prompt = await read_prompt(fields, served, state.settings.template_kwargs)
    return _Plan(
        name=name,
        prompt=prompt,
        sampling=sampling,
        top_logprobs=top,
        show_thoughts=show,
        stream=stream,
        usage_chunk=usage_chunk,
        usage_every=usage_every,
    )


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


class _Reply:
    """Builds the wire format, whole or in chunks, from the same pieces."""

    def __init__(self, served: ServedModel, plan: _Plan):
        self._served, self._plan = served, plan
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices = [
            Choice(i, served.tokenizer, plan.sampling.text, thoughts=plan.prompt.opens_thought)
            for i in range(plan.sampling.n)
        ]

    def submit(self, job: Job) -> None:
        """Hand the prompt to the engine, n times."""
        for params in self._plan.sampling.for_prompt(self._served, self._plan.prompt.ids, param="messages"):
            job.submit(self._plan.prompt.ids, params, self._id)

    async def whole(self, job: Job) -> dict[str, Any]:
        """The reply in one object."""
        totals = [Piece(c.index) for c in self._choices]
        async for piece in finished(pieces(job, self._choices)):
            total = totals[piece.index]
            total.content += piece.content
            total.reasoning += piece.reasoning
            total.tokens += piece.tokens
            total.finish_reason, total.stop_reason = piece.finish_reason, piece.stop_reason
        choices = [
            {"index": t.index, "message": self._message(t), "logprobs": self._logprobs(t)} | _end(t) for t in totals
        ]
        return self._head("chat.completion") | {"choices": choices, "usage": self._usage()}

    async def frames(self, job: Job) -> AsyncIterator[bytes]:
        """The reply as server-sent events."""
        head = self._head("chat.completion.chunk")
        begun = set()
        async for piece in pieces(job, self._choices):
            if piece is None:
                yield sse.KEEP_ALIVE
                continue
            frame = b""
            if piece.index not in begun:
                begun.add(piece.index)
                frame += self._chunk(head, piece.index, {"role": "assistant", "content": ""})
            delta = self._thoughts(piece)
            if piece.content:
                delta["content"] = piece.content
            if delta or piece.tokens:
                frame += self._chunk(head, piece.index, delta or {"content": ""}, logprobs=self._logprobs(piece))
            if piece.finish_reason:
                frame += self._chunk(head, piece.index, {}, end=_end(piece))
            if frame:
                yield frame
        if self._plan.usage_chunk:
            yield sse.event(head | {"choices": [], "usage": self._usage()})
        yield sse.DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._plan.name}

    def _chunk(self, head: dict, index: int, delta: dict, *, logprobs: dict | None = None, end: dict | None = None):
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        chunk = head | {"choices": [choice | (end or {})]}
        if self._plan.usage_every:
            chunk["usage"] = self._usage()
        elif self._plan.usage_chunk:
            chunk["usage"] = None
        return sse.event(chunk)

    def _message(self, total: Piece) -> dict[str, Any]:
        # no answer at all after a thought is null, as clients know it from models that only thought
        content = total.content if total.content or not total.reasoning else None
        return {"role": "assistant", "content": content} | self._thoughts(total)

    def _thoughts(self, piece: Piece) -> dict[str, str]:
        """Thoughts under both names in use; absent when there are none."""
        if not piece.reasoning or not self._plan.show_thoughts:
            return {}
        return {"reasoning": piece.reasoning, "reasoning_content": piece.reasoning}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._plan.top_logprobs is None:
            return None
        return chat_logprobs(self._served.tokenizer, piece.tokens)

    def _usage(self) -> dict[str, Any]:
        return usage([len(self._plan.prompt.ids)], self._choices, self._plan.sampling.n, thoughts=True)


def _end(piece: Piece) -> dict[str, Any]:
    end = {"finish_reason": piece.finish_reason}
    if piece.stop_reason is not None:
        end["stop_reason"] = piece.stop_reason
    return end
