"""What the server is doing now, shared by all requests: loading, ready, failed or stopping, and the work in flight."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flint_jax.server.errors import ApiError
from flint_jax.server.jobs import Job
from flint_jax.server.memory import ItemMemory
from flint_jax.server.preparing import Preparations
from flint_jax.server.records import Timings
from flint_jax.server.settings import ServerSettings
from flint_jax.server.watchdog import Watchdog

log = logging.getLogger("flint_jax.server")

LOADING, READY, FAILED, STOPPING = "loading", "ready", "failed", "stopping"
_WATCH_S = 0.25  # how soon a dead engine is noticed


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A loaded model, as the endpoints see it. No array and no jax type is in it.

    names: the names under which it is served, the main one first.
    engine: submit/abort/stats, see flint_jax.engine.
    template: flint_jax.chat.ChatTemplate, or None when the checkpoint has none.
    generation: the checkpoint's sampling defaults ({} switches them off).
    params, resolve: flint_jax.sampling_params' SamplingParams and resolve, handed in so that the server imports no jax.
    vocab_size: number of rows of the model's head.
    constrain: from a flint_jax.server.forced.Forced to what ``engine.submit`` takes as ``constraint``, None for output
        that is free; None when this server cannot hold output to anything. May take time: call it off the loop.
    compilations: flint_jax.compilations.Compilations of the engine's process, or None when nobody counts.
    """

    names: tuple[str, ...]
    engine: Any
    tokenizer: Any
    template: Any
    generation: Mapping[str, Any]
    params: Callable[..., Any]
    resolve: Callable[[Any, Mapping[str, Any]], Any]
    vocab_size: int
    max_num_seqs: int
    constrain: Callable[[Any], Any] | None = None
    compilations: Any = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def checked(self, ids: Sequence[int]) -> Sequence[int]:
        """A prompt in the form that ``engine.submit`` takes without looking at each token again: once for all choices,
        and off the loop. Raises RequestError.
        """
        check = getattr(self.engine, "checked", None)
        return ids if check is None else check(ids)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.engine.max_model_len


class ServerState:
    """Phase, model and running jobs. Belongs to the event loop; ``progress`` may be called from any thread."""

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.phase = LOADING
        self.detail = "starting"
        self.served: ServedModel | None = None
        self.jobs: set[Job] = set()
        self.preparing = Preparations()
        self.watchdog = Watchdog(settings.stall_timeout_s)
        self.timings = Timings()
        self.memory = ItemMemory()

    def progress(self, detail: str) -> None:
        """Say how far loading is; shown by /health."""
        self.detail = detail

    def set_ready(self, served: ServedModel) -> None:
        """Answer requests from now on."""
        self.served, self.phase, self.detail = served, READY, ""

    def set_failed(self, error: BaseException) -> None:
        """Answer no more requests, fail those in flight."""
        self.phase, self.detail = FAILED, f"{type(error).__name__}: {error}"
        self._fail_jobs(engine_failed())

    def set_stopping(self) -> None:
        """Refuse new requests; those in flight go on."""
        self.phase, self.detail = STOPPING, "shutting down"

    def close_jobs(self) -> None:
        """End what is still running with an error, for a shutdown that has waited long enough."""
        error = ApiError(503, "the server is shutting down", code="shutting_down")
        self.preparing.close(error)
        self._fail_jobs(error)

    def refusal(self) -> ApiError | None:
        """Why no request can be served now, or None."""
        if self.phase == LOADING:
            return ApiError(503, f"the model is still loading ({self.detail}); try again soon", code="model_loading")
        if self.phase == STOPPING:
            return ApiError(503, "the server is shutting down", code="shutting_down")
        if self.phase == FAILED:
            return engine_failed()
        return None

    def refuse_when_full(self, choices: int, *, prepared: int = 0) -> None:
        """Raise ApiError 429 when a request of so many choices would find the queue full: before its text is encoded.
        Requests that are being prepared count, too; prepared: 1 when this one is among them.
        """
        self._check_room(choices, sum(len(job) for job in self.jobs) + len(self.preparing) - prepared)

    def _check_room(self, choices: int, active: int) -> None:
        limit = self.settings.max_queued
        # a request of more choices than the queue holds is let in when it is alone
        if limit is not None and active and active + choices > self.served.max_num_seqs + limit:
            self.timings.rejected += 1
            raise ApiError(
                429,
                f"{active} requests are running or waiting, the limit is {self.served.max_num_seqs} running and "
                f"{limit} waiting (--max-num-queued-reqs)",
                code="queue_full",
            )

    @property
    def healthy(self) -> bool:
        """Whether requests are answered: there is a model, and its engine moves."""
        return self.phase == READY and not self.watchdog.stalled_s

    def open_job(self, choices: int) -> Job:
        """A job for one HTTP request that will submit ``choices`` requests to the engine. Close it.

        Raises ApiError 429 when the queue is full.
        """
        assert self.served is not None
        self._check_room(choices, sum(len(job) for job in self.jobs))
        job = Job(
            self.served.engine,
            choices,
            tick_s=self.settings.keep_alive_s,
            timings=self.timings,
            on_close=self._closed,
        )
        self.jobs.add(job)
        return job

    def _closed(self, job: Job) -> None:
        self.jobs.discard(job)
        if self.settings.log_requests:
            log_request(job)

    async def watch(self) -> None:
        """Notice an engine that died or stands still, so that nobody waits for it. Runs as long as the server."""
        while True:
            await asyncio.sleep(_WATCH_S)
            failed = self.served and getattr(self.served.engine, "failed", None)
            if failed is not None and self.phase != FAILED:
                self.set_failed(failed)
            if self.served is not None:
                self.watchdog.look(self.served.engine.stats(), time.monotonic())

    def _fail_jobs(self, error: ApiError) -> None:
        for job in list(self.jobs):
            job.fail(error)


def log_request(job: Job) -> None:
    """One line for a request that is over: counts and times, nothing of what was said."""
    records, came = job.records, job.arrival
    first = min((r.first for r in records if r.first), default=0.0)
    log.info(
        "request %s: %s, %d prompt tokens (%d cached), %d generated, %s, first token after %s, all after %.3f s",
        came.request_id,
        came.route,
        max((r.prompt_tokens for r in records), default=0),
        max((r.cached_tokens for r in records), default=0),
        sum(r.tokens for r in records),
        "+".join(r.reason or "abort" for r in records) or "not run",
        f"{first - came.at:.3f} s" if first else "never",
        time.monotonic() - came.at,
    )


def engine_failed() -> ApiError:
    """The answer once the engine is dead; what killed it is in the log, not on the wire."""
    return ApiError(500, "the engine has failed and must be restarted; see the server's log", code="engine_failed")
