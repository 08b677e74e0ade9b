"""POST /v1/completions: text in, text out; prompts as text or token ids, one or many."""

from __future__ import annotations

import dataclasses
import functools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from flint_jax.server import sse
from flint_jax.server.body import Fields, log_unknown, read_object
from flint_jax.server.choices import Choice, Piece, Token
from flint_jax.server.errors import bad_request
from flint_jax.server.forced import Forced, constraint, read_format, read_structured
from flint_jax.server.jobs import Job
from flint_jax.server.lengths import check_length, check_text
from flint_jax.server.logprobs import completion_logprobs, prompt_logprobs, prompt_tokens
from flint_jax.server.models import reply_name
from flint_jax.server.replies import JsonReply
from flint_jax.server.running import COMPILES, encode_text, finished, look, off_loop, pieces
from flint_jax.server.sampling_fields import (
    Sampling,
    check_token_ids,
    read_prompt_logprobs,
    read_sampling,
    read_stream_options,
)
from flint_jax.server.state import ServedModel, ServerState
from flint_jax.server.usage import usage
from flint_jax.text import unfinished

DEFAULT_MAX_TOKENS = 16  # OpenAI's, and only for this route
_MAX_CHOICES = 4096  # prompts times n in one request
_IGNORED = frozenset({"user", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier"})


@dataclasses.dataclass
class _Plan:
    """A checked request.

    echoes: the text put before each prompt's output, None unless echo. generate: False for max_tokens 0. held: what
    the output is held to. scores: alternatives to ask the engine for, for each token of the prompts; None for no
    log-probabilities of the prompts.
    """

    name: str
    prompts: list[Sequence[int]]
    echoes: list[str] | None
    sampling: Sampling
    generate: bool
    held: Any
    logprobs: int | None
    scores: int | None
    stream: bool
    usage_chunk: bool
    usage_every: bool

    @property
    def n(self) -> int:
        return self.sampling.n

    @property
    def runs(self) -> bool:
        """Whether the engine has anything to do."""
        return self.generate or self.scores is not None


async def completions(request: Request) -> Response:
    """Answer a text completion."""
    state: ServerState = request.app.state.server
    served = state.served
    fields = await read_object(request, state)
    plan = await state.preparing.run(_read(fields, state, served), request.receive)
    log_unknown(fields, _IGNORED)
    reply = _Reply(served, plan)
    job = state.open_job(len(plan.prompts) * plan.n if plan.runs else 0)
    try:
        if plan.runs:
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
    echo = fields.boolean("echo")
    max_tokens = fields.integer("max_tokens", DEFAULT_MAX_TOKENS, 0)
    logprobs = fields.integer("logprobs", None, 0, state.settings.max_logprobs)
    fields.unsupported("suffix")
    fields.unsupported("prompt_embeds")
    sampling = read_sampling(
        fields,
        served,
        max_tokens=max_tokens or None,
        logprobs=logprobs,
        prompt_logprobs=read_prompt_logprobs(fields, state.settings.max_logprobs, stream=stream),
    )
    wanted = (sampling.prompt_logprobs, logprobs if echo else None)
    scores = max((n for n in wanted if n is not None), default=None)
    forced = Forced(format=read_format(fields), structured=read_structured(fields), thinking=False)
    held = await off_loop(COMPILES if forced.must else 0, constraint, served, forced)
    value = fields.raw("prompt")
    given = await off_loop(len(value) if isinstance(value, list) else 0, _prompts, fields, served)
    if len(given) * sampling.n > _MAX_CHOICES:
        raise fields.error("prompt", f"has {len(given)} prompts of {sampling.n} choices; at most {_MAX_CHOICES} in all")
    if max_tokens or scores is not None:
        state.refuse_when_full(len(given) * sampling.n, prepared=1)
    special = fields.boolean("add_special_tokens", True)
    wanted_tokens = 1 if max_tokens else 0
    fits = functools.partial(check_text, served, wanted=wanted_tokens, param="prompt", look=look)
    for ids in given:
        if not isinstance(ids, str):
            check_length(served, len(ids), wanted=wanted_tokens, param="prompt")
    prompts = [await encode_text(served, p, special, fits) if isinstance(p, str) else p for p in given]
    for ids in prompts:
        if not ids and (max_tokens or scores is not None):
            raise fields.error("prompt", "is empty: there is no token to continue from")
        check_length(served, len(ids), wanted=wanted_tokens, param="prompt")
    if max_tokens or scores is not None:
        prompts = [await off_loop(len(ids), served.checked, ids) for ids in prompts]
    echoes = None
    if echo:
        echoes = [p if isinstance(p, str) else served.tokenizer.decode(p) for p in given]
        if max_tokens:  # a character that a prompt ends within comes with the output
            echoes = [
                text.removesuffix("\ufffd") if unfinished(served.tokenizer, ids) else text
                for text, ids in zip(echoes, prompts, strict=True)
            ]
    return _Plan(
        name=name,
        prompts=prompts,
        echoes=echoes,
        sampling=sampling,
        generate=max_tokens > 0,
        held=held,
        logprobs=logprobs,
        scores=scores,
        stream=stream,
        usage_chunk=usage_chunk,
        usage_every=usage_every,
    )


def _prompts(fields: Fields, served: ServedModel) -> list[str | list[int]]:
    """The prompts: a string, token ids, or a list of either kind."""
    value = fields.raw("prompt")
    if value is None:
        raise bad_request("prompt is missing", "prompt", "missing_required_parameter")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise fields.error("prompt", "must be a string, an array of token ids, or a non-empty array of these")
    if all(isinstance(p, int) and not isinstance(p, bool) for p in value):
        value = [value]
    for prompt in value:
        if isinstance(prompt, list):
            check_token_ids(fields, "prompt", prompt, served.vocab_size)
        elif not isinstance(prompt, str):
            raise fields.error("prompt", "must be a string, an array of token ids, or an array of these")
    return value


class _Reply:
    """Builds the wire format. Choice i belongs to prompt i // n."""

    def __init__(self, served: ServedModel, plan: _Plan):
        self._served, self._plan = served, plan
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": plan.name,
        }
        begun = [unfinished(served.tokenizer, ids) for ids in plan.prompts]
        self._choices = [
            Choice(i, served.tokenizer, plan.sampling.text, begun=begun[i // plan.n], echoed=plan.echoes is not None)
            for i in range(len(plan.prompts) * plan.n)
        ]

    def submit(self, job: Job) -> None:
        """Hand every prompt to the engine, n times."""
        plan = self._plan
        extras = {
            "cache_salt": plan.sampling.salt,
            "constraint": plan.held,
            "prompt_logprobs": plan.scores,
            "generate": None if plan.generate else False,
        }
        for ids in plan.prompts:
            for params in plan.sampling.for_prompt(self._served, ids, param="prompt", generate=plan.generate):
                job.submit(ids, params, self._head["id"], **extras)

    async def whole(self, job: Job) -> dict[str, Any]:
        """The reply in one object."""
        texts = [self._echo(c.index) for c in self._choices]
        tokens: list[list[Token]] = [[] for _ in self._choices]  # generated ones
        ends: list[Piece] = [Piece(c.index, finish_reason="length") for c in self._choices]
        async for piece in finished(self._pieces(job)):
            texts[piece.index] += piece.content
            tokens[piece.index] += piece.tokens
            if piece.finish_reason:
                ends[piece.index] = piece
        choices = [
            self._choice(end, text, self._prompt_tokens(end.index) + toks)
            for end, text, toks in zip(ends, texts, tokens, strict=True)
        ]
        if self._plan.sampling.prompt_logprobs is not None:
            for choice, made in zip(choices, self._choices, strict=True):
                choice["prompt_logprobs"] = prompt_logprobs(self._served.tokenizer, made.prompt_logprobs or ())
        return self._head | {"choices": choices, "usage": self._usage()}

    async def frames(self, job: Job) -> AsyncIterator[bytes]:
        """The reply as server-sent events."""
        begun = set()
        async for piece in self._pieces(job):
            if piece is None:
                yield sse.KEEP_ALIVE
                continue
            text, tokens = piece.content, piece.tokens
            if piece.index not in begun:
                begun.add(piece.index)
                text = self._echo(piece.index) + text
                tokens = self._prompt_tokens(piece.index) + tokens
            if text or tokens or piece.finish_reason:
                yield self._chunk([self._choice(piece, text, tokens)])
        if self._plan.usage_chunk:
            yield sse.event(self._head | {"choices": [], "usage": self._usage()})
        yield sse.DONE

    def _pieces(self, job: Job) -> AsyncIterator[Piece | None]:
        if self._plan.runs:
            return pieces(job, self._choices)
        return _no_output(self._choices)

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        chunk = self._head | {"choices": choices}
        if self._plan.usage_every:
            chunk["usage"] = self._usage()
        elif self._plan.usage_chunk:
            chunk["usage"] = None
        return sse.event(chunk)

    def _choice(self, piece: Piece, text: str, tokens: list[Token]) -> dict[str, Any]:
        logprobs = None
        if self._plan.logprobs is not None:
            shift = len(self._echo(piece.index))
            logprobs = completion_logprobs(self._served.tokenizer, tokens, top=self._plan.logprobs > 0, shift=shift)
        choice = {"index": piece.index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        if piece.stop_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        return choice

    def _echo(self, index: int) -> str:
        return "" if self._plan.echoes is None else self._plan.echoes[index // self._plan.n]

    def _prompt_tokens(self, index: int) -> list[Token]:
        """Those of the echoed prompt, once its log-probabilities are there."""
        plan = self._plan
        if plan.echoes is None or plan.logprobs is None:
            return []
        entries = [
            e and dataclasses.replace(e, top=e.top[: plan.logprobs]) for e in self._choices[index].prompt_logprobs
        ]
        ids = plan.prompts[index // plan.n]
        return prompt_tokens(self._served.tokenizer, ids, entries, self._echo(index), whole=not plan.generate)

    def _usage(self) -> dict[str, Any]:
        return usage([len(p) for p in self._plan.prompts], self._choices, self._plan.n, thoughts=False)


async def _no_output(choices: list[Choice]) -> AsyncIterator[Piece | None]:
    """max_tokens 0: every choice ends at once, and the engine is not asked."""
    for choice in choices:
        yield Piece(choice.index, finish_reason="length")
