"""One chat request of any protocol: from the checked request through the engine to deltas.

A protocol brings a Writer: it reads the request into an Ask and writes the deltas in its own words. All that is between
the two is here, and is the same for every protocol, streaming and not.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from flint_jax.grammar import Calls, Lexer, Problem, Tags, Tool, merged
from flint_jax.server import sse
from flint_jax.server.body import Fields, log_unknown, read_object
from flint_jax.server.chat_prompt import Conversation, Prompt, render
from flint_jax.server.choices import Choice, Piece
from flint_jax.server.errors import ApiError
from flint_jax.server.forced import NAMED, Forced, Structured, check_end_of_thought, constraint
from flint_jax.server.jobs import Job
from flint_jax.server.lengths import check_length
from flint_jax.server.replies import JsonReply
from flint_jax.server.running import COMPILES, finished, off_loop, pieces
from flint_jax.server.sampling_fields import Sampling
from flint_jax.server.state import ServedModel, ServerState

log = logging.getLogger("flint_jax.server")


@dataclasses.dataclass(frozen=True)
class Ask:
    """A chat request, read and checked.

    name: the model's name for the reply. format, structured, budget: see ``Forced``. progress: have the pieces of the
    first choice tell how far the prompt is.
    """

    name: str
    conversation: Conversation
    sampling: Sampling
    stream: bool = False
    format: dict[str, Any] | None = None
    structured: Structured | None = None
    budget: int | None = None
    progress: bool = False


class Run:
    """A request on its way through the engine. ``choices`` know the counts so far."""

    def __init__(self, served: ServedModel, ask: Ask, prompt: Prompt, held: Any, reply_id: str, call_prefix: str):
        self.served, self.ask, self.prompt, self.id = served, ask, prompt, reply_id
        self._held = held
        choice = ask.conversation.choice
        self.named = choice.mode == NAMED
        callable_tools = choice.callable(ask.conversation.tools)
        tools = [Tool.of(t) for t in callable_tools]
        calls = (Calls.ALL if ask.conversation.parallel else Calls.FIRST) if tools else Calls.NONE
        tags = Tags.of(served.tokenizer.added_tokens)
        tag_ids = {**tags.block, **tags.argument}

        def lexer() -> Lexer:
            def new_id() -> str:
                return f"{call_prefix}{uuid.uuid4().hex[:24]}"

            return Lexer(prompt.start, tags, tools, thinking=prompt.thinking, calls=calls, new_id=new_id)

        self.choices = [
            Choice(i, served.tokenizer, ask.sampling.text, lexer=lexer(), tags=tag_ids) for i in range(ask.sampling.n)
        ]

    def submit(self, job: Job) -> None:
        """Hand the prompt to the engine, n times. Raises ApiError when it does not fit the context."""
        sampling, ids = self.ask.sampling, self.prompt.ids
        # Of the first choice only: they are the same for all.
        scores, progress = sampling.prompt_logprobs, self.ask.progress or None
        for params in sampling.for_prompt(self.served, ids, param=self.ask.conversation.param):
            job.submit(
                ids,
                params,
                self.id,
                constraint=self._held,
                cache_salt=sampling.salt,
                prompt_logprobs=scores,
                report_progress=progress,
            )
            scores = progress = None

    async def pieces(self, job: Job) -> AsyncIterator[Piece | None]:
        """What the choices say, as it comes; None means silence. Problems are logged here and not passed on."""
        async for piece in pieces(job, self.choices):
            if piece is not None and len(piece.deltas) > 1:
                piece.deltas = merged(piece.deltas)
            if piece is not None and piece.deltas and any(type(d) is Problem for d in piece.deltas):
                self._log_problems(piece)
            yield piece

    async def whole(self, job: Job) -> list[Piece]:
        """All that each choice said, in one piece each."""
        totals = [Piece(c.index) for c in self.choices]
        async for piece in finished(self.pieces(job)):
            totals[piece.index].join(piece)
        for total in totals:
            total.deltas = merged(total.deltas)
        return totals

    def _log_problems(self, piece: Piece) -> None:
        for problem in piece.deltas:
            if type(problem) is Problem:
                log.warning("%s, choice %d: %s: %s", self.id, piece.index, problem.kind, problem.message)
        piece.deltas = [d for d in piece.deltas if type(d) is not Problem]


class Writer(abc.ABC):
    """One protocol's words for a reply.

    IGNORED: fields that are known and change nothing. PREFIX, CALL_PREFIX: what ids of replies and of calls begin with.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    PREFIX: ClassVar[str]
    CALL_PREFIX: ClassVar[str]

    def __init__(self, run: Run, options: Any):
        self.run, self.options = run, options

    @classmethod
    @abc.abstractmethod
    def read(cls, fields: Fields, state: ServerState) -> tuple[Ask, Any]:
        """The request, and what the writer itself has to know of it. Raises ApiError."""

    @abc.abstractmethod
    async def whole(self, job: Job) -> dict[str, Any]:
        """The reply in one object."""

    @abc.abstractmethod
    def frames(self, job: Job) -> AsyncIterator[bytes]:
        """The reply as server-sent events."""

    def error(self, error: ApiError) -> bytes:
        """The event that ends a stream which fails after its beginning."""
        return sse.event(error.body)


async def respond(request: Request, kind: type[Writer]) -> Response:
    """Answer a request in one protocol."""
    state: ServerState = request.app.state.server
    fields = await read_object(request, state)
    ask, options = kind.read(fields, state)
    log_unknown(fields, kind.IGNORED)
    state.refuse_when_full(ask.sampling.n)
    run = await state.preparing.run(_prepare(ask, state, kind), request.receive)
    writer = kind(run, options)
    job = state.open_job(ask.sampling.n)
    try:
        run.submit(job)
    except BaseException:
        job.close()
        raise
    if ask.stream:
        return sse.EventStream(job, writer.frames(job), request.state.request_id, writer.error)
    with job:
        job.watch_client(request.receive)
        return JsonReply(await writer.whole(job))


async def _prepare(ask: Ask, state: ServerState, kind: type[Writer]) -> Run:
    served, conversation = state.served, ask.conversation
    prompt = await render(conversation, served, state.settings, wanted=1)
    check_length(served, len(prompt.ids), wanted=1, param=conversation.param)
    prompt = dataclasses.replace(prompt, ids=await off_loop(len(prompt.ids), served.checked, prompt.ids))
    forced = Forced(
        tools=conversation.choice.callable(conversation.tools),
        choice=conversation.choice,
        parallel=conversation.parallel,
        format=ask.format,
        structured=ask.structured,
        start=prompt.start,
        thinking=prompt.thinking,
        budget=ask.budget,
    )
    held = await off_loop(COMPILES if forced.must or forced.tools else 0, constraint, served, forced)
    check_end_of_thought(held, ask.sampling.params)
    return Run(served, ask, prompt, held, f"{kind.PREFIX}{uuid.uuid4().hex}", kind.CALL_PREFIX)
