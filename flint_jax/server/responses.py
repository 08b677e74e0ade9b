"""POST /v1/responses: OpenAI's newer protocol."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from flint_jax.server import sse
from flint_jax.server.body import Fields
from flint_jax.server.chat_run import Ask, Run, Writer, respond
from flint_jax.server.choices import Piece
from flint_jax.server.errors import ApiError
from flint_jax.server.forced import read_structured
from flint_jax.server.jobs import Job
from flint_jax.server.memory import ItemMemory
from flint_jax.server.models import reply_name
from flint_jax.server.responses_input import Input, ToolName, read_conversation, read_format, read_input
from flint_jax.server.responses_items import Items
from flint_jax.server.sampling_fields import read_sampling
from flint_jax.server.state import ServerState
from flint_jax.server.thinking import read_budget

_STATELESS = "this server keeps no conversations; send previous_response_id, or all of it as input"
_SUMMARIES = ("auto", "concise", "detailed")
_LOGPROBS = "what only /v1/chat/completions and /v1/completions have"


async def responses(request: Request) -> Response:
    """Answer in items."""
    return await respond(request, ResponsesWriter)


@dataclasses.dataclass(frozen=True)
class _Options:
    """What only this protocol has. echo: fields of the request that the reply repeats. keep: where the
    response is kept for later requests, None for nowhere.
    """

    names: dict[str, ToolName]
    echo: dict[str, Any]
    seals_thoughts: bool
    summarises: bool
    given: Input
    keep: ItemMemory | None


class ResponsesWriter(Writer):
    """Builds a response of items, whole or as events."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "client_metadata",
            "context_management",
            "max_tool_calls",
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "stream_options",
            "truncation",
            "user",
        }
    )
    PREFIX: ClassVar[str] = "resp_"
    CALL_PREFIX: ClassVar[str] = "call_"

    @classmethod
    def read(cls, fields: Fields, state: ServerState) -> tuple[Ask, _Options]:
        """The request. Raises ApiError."""
        fields.unsupported("conversation", hint=_STATELESS)
        fields.unsupported("background", hint="replies are not kept; read them as they come")
        fields.unsupported("prompt", hint="there are no stored prompts here; send instructions and input")
        fields.unsupported("top_logprobs", allowed=(0,), hint=f"log-probabilities are {_LOGPROBS}")
        include = fields.strings("include")
        if "message.output_text.logprobs" in include:
            raise fields.error("include", f"asks for log-probabilities, {_LOGPROBS}", "unsupported_parameter")
        given = read_input(fields, state.memory)
        conversation, names = read_conversation(fields, given)
        keeps = fields.boolean("store", True)
        limit = fields.integer("max_output_tokens", None, 1)
        ask = Ask(
            name=reply_name(fields, state),
            conversation=conversation,
            sampling=read_sampling(fields, state.served, max_tokens=limit, one=True),
            stream=fields.boolean("stream"),
            format=read_format(fields),
            structured=read_structured(fields),
            budget=read_budget(fields, "reasoning"),
        )
        echo = {
            "instructions": fields.string("instructions"),
            "max_output_tokens": limit,
            "metadata": fields.object("metadata") or {},
            "parallel_tool_calls": conversation.parallel,
            "reasoning": {"effort": None, "summary": None} | (fields.object("reasoning") or {}),
            "previous_response_id": given.previous,
            "store": keeps,
            "temperature": ask.sampling.params.temperature,
            "text": {"format": {"type": "text"}} | (fields.object("text") or {}),
            "tool_choice": fields.raw("tool_choice") or "auto",
            "tools": fields.array("tools") or [],
            "top_p": ask.sampling.params.top_p,
            "truncation": "disabled",
        }
        return ask, _Options(
            names,
            echo,
            seals_thoughts="reasoning.encrypted_content" in include,
            summarises=_summarises(fields),
            given=given,
            keep=state.memory if keeps else None,
        )

    def __init__(self, run: Run, options: _Options):
        super().__init__(run, options)
        self._choice = run.choices[0]
        self._created = int(time.time())
        self._items = Items(options.names, seal=options.seals_thoughts, summary=options.summarises)

    async def whole(self, job: Job) -> dict[str, Any]:
        """The reply in one object."""
        (total,) = await self.run.whole(job)
        for delta in total.deltas:
            self._items.push(delta)
        self._items.close()
        return self._finished(total)

    async def frames(self, job: Job) -> AsyncIterator[bytes]:
        """The reply as events, numbered from 0."""
        items, begun = self._items, False
        async for piece in self.run.pieces(job):
            frame = []
            if not begun:
                begun = True
                for name in ("response.created", "response.in_progress"):
                    frame.append(items.event(name, response=self._response("in_progress")))
            if piece is None:
                frame.append(sse.KEEP_ALIVE.decode())
            else:
                frame += [text for delta in piece.deltas for text in items.push(delta)]
                if piece.finish_reason:
                    frame += items.close()
                    response = self._finished(piece)
                    frame.append(items.event(f"response.{response['status']}", response=response))
            if frame:
                yield "".join(frame).encode()

    def error(self, error: ApiError) -> bytes:
        """The event that ends a stream which fails after its beginning."""
        problem = {"code": error.code or "server_error", "message": error.message}
        response = self._response("failed") | {"error": problem}
        return self._items.event("response.failed", response=response).encode()

    def _finished(self, piece: Piece) -> dict[str, Any]:
        if self.options.keep is not None:
            given = self.options.given
            self.options.keep.keep(self.run.id, given.previous, [i for i, _ in given.given], self._items.done)
        end: dict[str, Any] = {"usage": self._usage()}
        if piece.finish_reason == "length":
            return self._response("incomplete") | end | {"incomplete_details": {"reason": "max_output_tokens"}}
        return self._response("completed") | end | {"completed_at": int(time.time())}

    def _response(self, status: str) -> dict[str, Any]:
        head = {"id": self.run.id, "object": "response", "created_at": self._created, "status": status}
        rest = {"model": self.run.ask.name, "output": list(self._items.done), "usage": None}
        nothing = dict.fromkeys(("error", "incomplete_details"))
        return head | {"background": False} | nothing | self.options.echo | rest

    def _usage(self) -> dict[str, Any]:
        prompt, choice = len(self.run.prompt.ids), self._choice
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": choice.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": prompt + choice.completion_tokens,
        }


def _summarises(fields: Fields) -> bool:
    """Whether a summary of the thoughts is asked for, under its new or its old name. Raises ApiError."""
    options = Fields(fields.object("reasoning") or {}, prefix="reasoning.")
    wanted = False
    for name in ("summary", "generate_summary"):
        word = options.string(name, "none")
        if word not in ("none", *_SUMMARIES):
            raise options.error(name, f"is {word!r:.40}; need one of {', '.join(_SUMMARIES)}, or none")
        wanted = wanted or word != "none"
    return wanted
