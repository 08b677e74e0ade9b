"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from flint_jax.grammar import CallArguments, CallEnd, CallStart, Content, Delta, Reasoning
from flint_jax.server import sse
from flint_jax.server.body import Fields, log_unknown, read_object
from flint_jax.server.chat_prompt import render
from flint_jax.server.chat_run import Ask, Run, Writer, respond
from flint_jax.server.choices import Piece
from flint_jax.server.errors import ApiError
from flint_jax.server.forced import read_structured
from flint_jax.server.jobs import Job
from flint_jax.server.messages_input import omits_thoughts, read_conversation, read_format, refuse_thread
from flint_jax.server.models import reply_name
from flint_jax.server.records import arrival
from flint_jax.server.replies import JsonReply, quoted
from flint_jax.server.sampling_fields import read_sampling
from flint_jax.server.sealing import sealed
from flint_jax.server.state import ServerState
from flint_jax.server.thinking import read_budget

_IGNORED = frozenset(
    {
        "betas",
        "cache_control",
        "compaction",  # this, max_tokens and thread: of count_tokens
        "inference_geo",
        "max_tokens",
        "metadata",
        "service_tier",
        "speed",
        "stream",
        "thread",
    }
)
_SIGNATURE = "unsigned"  # clients drop a thought that has none; it is taken back whatever it is


async def messages(request: Request) -> Response:
    """Answer a message."""
    return await respond(request, MessagesWriter)


async def count_tokens(request: Request) -> Response:
    """How many tokens the same body would be as a prompt."""
    state: ServerState = request.app.state.server
    fields = await read_object(request, state)
    reply_name(fields, state)
    conversation = read_conversation(fields)
    log_unknown(fields, _IGNORED)
    prompt = await state.preparing.run(render(conversation, state.served, state.settings), request.receive)
    return JsonReply({"input_tokens": len(prompt.ids)})


class MessagesWriter(Writer):
    """Builds messages of content blocks, whole or as events."""

    IGNORED: ClassVar[frozenset[str]] = _IGNORED
    PREFIX: ClassVar[str] = "msg_"
    CALL_PREFIX: ClassVar[str] = "toolu_"

    @classmethod
    def read(cls, fields: Fields, state: ServerState) -> tuple[Ask, bool]:
        """The request. Raises ApiError."""
        refuse_thread(fields)
        fields.unsupported("compaction", hint="ask for a summary in a message")
        ask = Ask(
            name=reply_name(fields, state),
            conversation=read_conversation(fields),
            sampling=read_sampling(
                fields,
                state.served,
                max_tokens=fields.integer("max_tokens", None, 1),
                stop="stop_sequences",
                one=True,
            ),
            stream=fields.boolean("stream"),
            format=read_format(fields),
            structured=read_structured(fields),
            budget=read_budget(fields, "thinking"),
        )
        return ask, omits_thoughts(fields)

    def __init__(self, run: Run, options: bool):
        """options: whether thoughts come without their text."""
        super().__init__(run, options)
        self._choice = run.choices[0]

    async def whole(self, job: Job) -> dict[str, Any]:
        """The reply in one object."""
        (total,) = await self.run.whole(job)
        blocks = _Blocks(omit=self.options)
        for delta in total.deltas:
            blocks.push(delta)
        blocks.close()
        return self._message(blocks.done) | self._end(total) | {"usage": self._usage()}

    async def frames(self, job: Job) -> AsyncIterator[bytes]:
        """The reply as events. A ping keeps a silent stream alive, and clients see the start before the first one."""
        blocks, begun = _Blocks(omit=self.options), False
        async for piece in self.run.pieces(job):
            frame = []
            if not begun:
                begun = True
                frame.append(self._start())
            if piece is None:
                yield "".join([*frame, _PING]).encode()
                continue
            frame += [text for delta in piece.deltas for text in blocks.push(delta)]
            if piece.finish_reason:
                frame += [*blocks.close(), *self._finish(piece)]
            if frame:
                yield "".join(frame).encode()

    def error(self, error: ApiError) -> bytes:
        """The event that ends a stream which fails after its beginning."""
        return sse.named_event(error.anthropic_body(arrival.get().request_id))

    def _start(self) -> str:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return _event({"type": "message_start", "message": message}) + _PING

    def _finish(self, piece: Piece) -> list[str]:
        delta = {"type": "message_delta", "delta": self._end(piece), "usage": self._usage()}
        return [_event(delta), _event({"type": "message_stop"})]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.run.id,
            "type": "message",
            "role": "assistant",
            "model": self.run.ask.name,
            "content": content,
        }

    def _end(self, piece: Piece) -> dict[str, Any]:
        reason, sequence = "end_turn", None
        if piece.finish_reason == "length":
            reason = "max_tokens"
        elif self._choice.calls:
            reason = "tool_use"
        elif isinstance(piece.stop_reason, str):
            reason, sequence = "stop_sequence", piece.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, int]:
        cached = self._choice.cached_tokens
        return {
            "input_tokens": len(self.run.prompt.ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._choice.completion_tokens,
        }


class _Blocks:
    """From deltas to content blocks and to the events that tell them; the same blocks either way.

    omit: thoughts come without their text, which the signature then holds, so that it comes back all the same.
    done: the blocks that are complete.
    """

    def __init__(self, *, omit: bool):
        self._omit = omit
        self.done: list[dict[str, Any]] = []
        self._block: dict[str, Any] | None = None  # the open one
        self._parts: list[str] = []
        self._head = ""

    def push(self, delta: Delta) -> list[str]:
        """Events for one delta."""
        match delta:
            case Content(text):
                return [*self._open({"type": "text", "text": ""}, '"text_delta","text":'), self._more(text)]
            case Reasoning(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                events = self._open(block, '"thinking_delta","thinking":')
                if self._omit:
                    self._parts.append(text)
                    return events
                return [*events, self._more(text)]
            case CallStart(_, call_id, name):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self._open(block, '"input_json_delta","partial_json":')
            case CallArguments(_, text):
                return [self._more(text)]
            case CallEnd():
                return self.close()
        return []

    def close(self) -> list[str]:
        """End the open block, if any."""
        block, self._block = self._block, None
        if block is None:
            return []
        text, self._parts = "".join(self._parts), []
        index, events = len(self.done), []
        if block["type"] == "tool_use":
            block = block | {"input": json.loads(text)}
        elif block["type"] == "thinking":
            signature = sealed(text) if self._omit else _SIGNATURE
            block = block | {"thinking": "" if self._omit else text, "signature": signature}
            signed = {"type": "signature_delta", "signature": signature}
            events.append(_event({"type": "content_block_delta", "index": index, "delta": signed}))
        else:
            block = block | {"text": text}
        self.done.append(block)
        return [*events, _event({"type": "content_block_stop", "index": index})]

    def _open(self, block: dict[str, Any], delta: str) -> list[str]:
        if self._block is not None and self._block["type"] == block["type"]:
            return []
        events, self._block, index = self.close(), block, len(self.done)
        head = f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{index},"delta":{{"type":'
        self._head = head + delta
        return [*events, _event({"type": "content_block_start", "index": index, "content_block": block})]

    def _more(self, text: str) -> str:
        self._parts.append(text)
        return f"{self._head}{quoted(text)}}}}}\n\n"


def _event(value: dict[str, Any]) -> str:
    return sse.named_event(value).decode()


_PING = _event({"type": "ping"})
