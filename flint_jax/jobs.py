"""What the engine knows of a request beyond scheduling, and what it says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from flint_jax import masks
from flint_jax.errors import RequestError
from flint_jax.logprobs import PromptLogprobs, TokenLogprob
from flint_jax.plan import Request
from flint_jax.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Event:
    """News of one request. The last one has a finish_reason: "stop", "length", "abort" or "error".

    cached_tokens: how many of the prompt's tokens were taken from the prefix cache. admitted_at: when it left the queue
    for the first time, in seconds of time.monotonic.
    A token that ends the request (an end-of-turn or stop id) is named in ``stop_token`` and not part of ``token_ids``.
    prompt_logprobs: with the first token, if asked for; one entry a prompt token, None for the first.
    refused: the error is what the request asked for (its grammar met its limits), not the engine's.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    error: str | None = None
    refused: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    admitted_at: float | None = None


@dataclasses.dataclass(eq=False)
class Job:
    """What the engine knows of a request beyond scheduling."""

    request: Request
    params: SamplingParams
    stops: frozenset[int]
    seed: int
    on_event: Callable[[Event], None]
    tracker: masks.Tracker | None = None
    prompt_scores: PromptLogprobs | None = None
    generates: bool = True
    admitted_at: float | None = None

    def event(self, **news) -> Event:
        """News of the request."""
        r = self.request
        return Event(
            r.id, prompt_tokens=len(r.prompt), cached_tokens=r.cached or 0, admitted_at=self.admitted_at, **news
        )


@dataclasses.dataclass
class Result:
    """Tokens a dispatched step will yield: one row per (job, admission epoch)."""

    rows: list[tuple[Job, int]]
    tokens: object
    details: tuple | None


def token_limit(prompt: tuple[int, ...], params: SamplingParams, generate: bool, room: int) -> int:
    """Most tokens of prompt and output together, when ``room`` fit.

    Raises RequestError for an empty prompt and for one that leaves no room for an answer that is wanted.
    """
    if not prompt:
        raise RequestError("the prompt has no tokens; send at least one", param="prompt", code="invalid_value")
    if len(prompt) + generate > room:
        raise RequestError(
            f"This model's maximum context length is {room} tokens. However, your prompt has {len(prompt)} tokens"
            f"{' and at least one must be left for the answer' if generate else ''}. Please shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    if not generate:
        return len(prompt)
    wanted = room if params.max_tokens is None else len(prompt) + params.max_tokens
    return min(wanted, room)
