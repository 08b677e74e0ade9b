"""The host loop: admit, prefill, decode, read one step late, finish. Token ids only; text belongs to the layers above.

One thread drives it (``start``), or a caller does (``step``); ``submit`` and ``abort`` may come from any thread.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from flint_jax import masks, sampling, sampling_params
from flint_jax.cache import PAGE, ring_size
from flint_jax.errors import FlintError, RequestError
from flint_jax.jobs import Event, Job, Progress, Result, token_limit
from flint_jax.logprobs import PromptLogprobs, TokenLogprob, token_logprob
from flint_jax.plan import Admit, CopyPage, Op, Piece, Plan, Prefill, Prompt, Request, Restore, Save
from flint_jax.prefill_cost import PrefillCost
from flint_jax.sampling_params import SamplingParams
from flint_jax.scheduler import Scheduler
from flint_jax.step import Steps

__all__ = ["Engine", "Event", "TokenLogprob"]

log = logging.getLogger("flint_jax.engine")


class Engine:
    """Continuous batching over ``steps``.

    eos_ids: the model's end tokens. seed: where seeds of requests that name none come from. budget: most tokens of one
    prefill step (``--max-num-batched-tokens``), default and at most what ``steps`` has compiled. max_prefill_ms: what
    one may take while something decodes (``--max-prefill-ms``), by what was measured; None for any time.
    prefix_caching: use the snapshots that ``steps`` has.
    """

    def __init__(
        self,
        steps: Steps,
        *,
        eos_ids: Sequence[int] = (),
        seed: int = 0,
        budget: int | None = None,
        max_prefill_ms: float | None = None,
        prefix_caching: bool = True,
    ):
        self.steps, self.config = steps, steps.config
        self.max_model_len = steps.sizes.max_context
        self.eos_ids = tuple(eos_ids)
        self.failed: BaseException | None = None
        window = self.config.sliding_window
        self.scheduler = Scheduler(
            steps.sizes.slots,
            steps.sizes.pages,
            PAGE,
            steps.sizes.chunks,
            budget,
            snapshots=steps.sizes.snapshots if prefix_caching else 0,
            window=window,
            ring=ring_size(window),
            rows=steps.sizes.rows_per_prefill,
            max_ms=max_prefill_ms,
            cost=PrefillCost(packed=steps.packed),
            tile=steps.tile,
        )
        self._clock = time.monotonic
        self._max_prefill_ms, self._decode_ms = max_prefill_ms, 0.0
        self._read_at = 0.0  # when the results of the last step were there
        self._tables = np.zeros(steps.tables.shape, np.int32)
        self._jobs: dict[str, Job] = {}
        self._inbox: collections.deque[tuple[str, object]] = collections.deque()
        self._wake = threading.Condition()
        self._inflight: collections.deque[Result] = collections.deque()
        self._dispatching = False
        self._late: collections.deque[Op] = collections.deque()
        self._seeds = np.random.SeedSequence(seed)
        self._names = itertools.count()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.ready = False
        self.generated_tokens = self.prompt_tokens = self.computed_tokens = 0

    # -- for callers, any thread -----------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_event: Callable[[Event], None],
        request_id: str | None = None,
        cache_salt: str | None = None,
        reuse_prefix: bool = True,
        constraint: masks.Constraint | None = None,
        prompt_logprobs: int | None = None,
        generate: bool = True,
        report_progress: bool = False,
    ) -> str:
        """Queue a request (``params`` resolved, n ignored); returns its id. ``on_event`` runs on the engine's thread.

        cache_salt: cached prefixes are shared only between requests of the same salt. reuse_prefix: False has every
        token of the prompt computed (what it leaves behind may still be reused by others).
        constraint: only tokens that it allows are drawn (see flint_jax.guided and flint_jax.budget). It wins over all
        settings: logit_bias cannot bring back a token, and if it ``ends`` min_tokens and ignore_eos have no effect.
        prompt_logprobs: alternatives to report for each token of the prompt, 0 to 20; nothing cached is used then.
        generate: False ends with the prompt, which may then fill the whole context: no token is drawn.
        report_progress: have events tell how far a prompt of several steps is (``Event.progress``).

        Raises RequestError when the prompt is empty, too long or outside the vocabulary, or params do not fit the
        model; RuntimeError when the engine has failed or stopped.
        """
        self._refuse_when_stopped()
        rows = self.config.vocab_size
        known = isinstance(prompt_ids, Prompt) and prompt_ids.rows <= rows
        prompt = prompt_ids if known else tuple(prompt_ids)
        limit = token_limit(prompt, params, generate, min(self.max_model_len, self.scheduler.capacity()))
        if constraint is not None and constraint.ends:
            params = masks.held(params)
        params.check_vocabulary(self.config.vocab_size)
        prompt = prompt if known else Prompt.of(prompt, rows)
        with self._wake:
            self._refuse_when_stopped()  # it may have stopped since; from here on it would end this request, too
            name = request_id or f"request-{next(self._names)}"
            if name in self._jobs:
                raise RequestError(f"request id {name!r} is in use; choose another", param="request_id")
            stops = frozenset(params.stop_set(self.eos_ids))
            seed = (
                params.seed if params.seed is not None else int(self._seeds.spawn(1)[0].generate_state(1, np.uint64)[0])
            )
            scores = None if prompt_logprobs is None else PromptLogprobs(prompt, prompt_logprobs)
            request = Request(name, prompt, limit, cache_salt or "", reuse_prefix and scores is None)
            tracker = None if constraint is None else constraint.begin()
            job = Job(request, params, stops, seed, on_event, tracker, scores, generate, wants_progress=report_progress)
            self._jobs[name] = job
            self._inbox.append(("submit", job))
            self._wake.notify()
        return name

    def checked(self, prompt_ids: Sequence[int]) -> Prompt:
        """A prompt that ``submit`` takes at no cost for its length, as often as it is given. Any thread.

        Raises RequestError for ids outside the vocabulary.
        """
        return Prompt.of(prompt_ids, self.config.vocab_size)

    def _refuse_when_stopped(self) -> None:
        if self.failed is not None or self._stopping:
            raise RuntimeError(f"the engine has stopped: {self.failed or 'shutting down'}")

    def abort(self, request_id: str) -> None:
        """End a request early, whatever its stage. Unknown and finished ids are ignored."""
        with self._wake:
            if request_id in self._jobs:
                self._inbox.append(("abort", request_id))
                self._wake.notify()

    def set_weights(self, model) -> None:
        """Go on with the present weights of ``model`` (not while a thread of its own runs): from the next step on, for
        running requests, too. The prefix cache forgets what other weights computed. Raises ConfigError, see ``Steps``.
        """
        if self._thread is not None:
            raise RuntimeError("the engine runs in a thread of its own; stop it first")
        if self.scheduler.cache.count and self._jobs:
            raise RuntimeError("requests are running, and would leave what old weights computed to the prefix cache")
        before = self.steps.weights
        self.steps.set_weights(model)
        if any(a is not b for a, b in zip(before, self.steps.weights, strict=True)):
            self.scheduler.cache.clear()

    def start(self) -> None:
        """Run in a thread of its own until ``stop``."""
        self._thread = threading.Thread(target=self._run, name="flint-engine", daemon=True)
        self.ready = True  # before it runs, as it may fail at once
        self._thread.start()

    def stop(self) -> None:
        """End every request (finish_reason "abort") and join the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        else:
            self._drop_all("abort", None)
        self.ready = False

    def stats(self) -> dict[str, int]:
        """Counters and gauges."""
        s = self.scheduler
        return {
            "running": len(s.running),
            "waiting": len(s.waiting) + sum(1 for kind, _ in tuple(self._inbox) if kind == "submit"),
            "free_slots": len(s.free_slots),
            "free_pages": s.pool.available,  # cached prefixes count as free: they go when pages are needed
            "cached_pages": s.pool.available - len(s.pool.free),
            "pages": s.pages,
            "snapshots": s.cache.count,
            "cached_snapshots": len(s.cache.snapshots),
            "prefix_evictions": s.cache.evictions,
            "prefix_queries": s.queries,  # prompt tokens looked up, and found
            "prefix_hits": s.hits,
            "cached_tokens": s.hits,
            "prefilled_tokens": s.prefilled,
            "computed_prompt_tokens": self.computed_tokens,  # prefilled and known to have ended
            "prefilling": len(self.progress()),
            "slots": s.slots,
            "preemptions": s.preemptions,
            "generated_tokens": self.generated_tokens,
            "prompt_tokens": self.prompt_tokens,
        }

    def progress(self) -> dict[str, Progress]:
        """How far the prompts are that are being read now, by request id, oldest first. Any thread."""
        now = self._clock()
        jobs = [self._jobs.get(r.id) for r in tuple(self.scheduler.running)]
        return {
            job.request.id: job.progress(now) for job in jobs if job is not None and job.processed < job.request.target
        }

    # -- the loop --------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One iteration; whether anything is left to do.

        Of the steps it dispatches, all but the last have ended when it returns, and so has every step before them.
        """
        self._take_inbox()
        plan = self.scheduler.plan()
        dispatched = self._dispatch(plan)
        # One step late: what was dispatched just now runs while the results before it are read.
        while len(self._inflight) > (1 if dispatched else 0):
            self._read(self._inflight.popleft())
        return bool(self._inflight or self._inbox or self.scheduler.running or self.scheduler.waiting)

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._stopping or self._inbox or self._busy()):
                        self._wake.wait()
                    if self._stopping:
                        break
                self.step()
        except BaseException as error:
            log.exception("the engine failed; every request ends with an error")
            self.failed = error
            self.ready = False
            self._drop_all("error", f"{type(error).__name__}: {error}")
        else:
            self._drop_all("abort", None)

    def _busy(self) -> bool:
        return bool(self._inflight or self.scheduler.running or self.scheduler.waiting)

    def _take_inbox(self) -> None:
        while self._inbox:
            kind, what = self._inbox.popleft()
            if kind == "submit":
                self.scheduler.add(what.request)
                self.prompt_tokens += len(what.request.prompt)
            elif (job := self._jobs.get(what)) is not None:
                self._finish(job, job.event(finish_reason="abort"))

    def _dispatch(self, plan: Plan) -> bool:
        for request in plan.preempted:
            log.info("request %s gives its pages to older ones and waits", request.id)
        self._sync_tables(plan.moved)
        self._dispatching = True
        for op in plan.ops:
            self._do(op)
        if plan.decode:
            jobs = [self._jobs[r.id] for r in plan.decode]
            fast = sampling_params.fast_path(job.params for job in jobs)
            slots, held = [r.slot for r in plan.decode], self._held(jobs)
            tokens, logits = self.steps.decode(slots, fast, peek=False) if held else self.steps.decode(slots, fast)
            self._expect(jobs, tokens, logits, held)
        self._dispatching = False
        while self._late:
            self._do(self._late.popleft())
        return not plan.empty

    def _do(self, op: Op) -> None:
        match op:
            case Admit(request):
                self._admit(request)
            case Prefill(pieces):
                self._prefill(pieces)
            case Restore(index, slot):
                self.steps.restore(index, slot)
            case CopyPage(source, target):
                self.steps.copy_page(source, target)
            case Save(slot, index):
                self.steps.save(slot, index)

    def _admit(self, request: Request) -> None:
        job = self._jobs[request.id]
        if job.admitted_at is None:
            job.admitted_at = time.monotonic()
        if job.prompt_scores is not None:
            job.prompt_scores.begin()
        job.processed = request.taken
        row = sampling.slot_row(
            job.params.replace(seed=job.seed),
            request.prompt,
            self.config.vocab_size,
            self.eos_ids,
            job.seed,
            output_ids=request.output,
        )
        self.steps.admit(request.slot, row, request.limit - 1)

    def _prefill(self, pieces: Sequence[Piece]) -> None:
        tokens, logits = self.steps.prefill(
            [(p.request.slice(p.start, p.start + p.count), p.request.slot, p.start, p.final) for p in pieces]
        )
        for row, piece in enumerate(pieces):
            scores = self._jobs[piece.request.id].prompt_scores
            if scores is not None and not scores.told:
                following = scores.following(piece.start, piece.count)
                if following:
                    scores.take(piece.start, *self.steps.score_prompt(row, following))
        # Those that are final come first, so the rows of the jobs are the first of the step. Without any there is
        # still something to wait for: no step is dispatched before the last but one has ended.
        jobs = [self._jobs[p.request.id] for p in pieces if p.final]
        held = self._held(jobs)
        told = tuple((self._jobs[p.request.id], p.request.epoch, p.start, p.count) for p in pieces)
        self._expect(jobs, tokens, logits, held, told)

    def _held(self, jobs: Sequence[Job]) -> set[str]:
        """Ids of those whose constraint may have a say in the token of a step that is dispatched now."""
        unread = sum(1 for result in self._inflight if result.rows)  # at most so many tokens of a row are on their way
        return {job.request.id for job in jobs if job.tracker is not None and job.tracker.free <= unread}

    def _expect(self, jobs: Sequence[Job], tokens, logits, held: set[str], pieces: tuple = ()) -> None:
        """Results to come of a step; held: see ``_held``, their tokens are subject to masks (tokens may be None).
        pieces: see ``Result``."""
        dispatched = self._clock()
        rows = [(job, job.request.epoch) for job in jobs]
        if held:
            tokens = self._redraw(rows, held, tokens, logits)
        details = None
        if any(job.params.logprobs is not None for job, _ in rows):
            details = self.steps.logprobs(logits, tokens)
        for array in (tokens, *(details or ())):
            array.copy_to_host_async()
        self._inflight.append(Result(rows, tokens, details, pieces, dispatched))

    def _redraw(self, rows: Sequence[tuple[Job, int]], held: set[str], tokens, logits):
        """While the device works on the step, learn the tokens before it and make the masks that follow from them.

        held: ids of the requests that may need one. tokens: of the step, or None where nobody has looked yet.
        """
        slots = [job.request.slot for job, _ in rows]
        while any(job.request.id in held for result in self._inflight for job, _ in result.rows):
            self._read(self._inflight.popleft())
        trackers = [job.tracker if job.request.id in held and self._waits(job, epoch) else None for job, epoch in rows]
        allowed, chosen, failed = masks.of_step(trackers, logits.shape[0], self.config.vocab_size)
        for i, error in failed.items():
            self._finish(rows[i][0], rows[i][0].event(finish_reason="error", error=str(error), refused=True))
        if not chosen.any():
            return self.steps.peek(slots) if tokens is None else tokens
        fast = sampling_params.fast_path(job.params for (job, _), masked in zip(rows, chosen, strict=False) if masked)
        return self.steps.redraw(slots, logits, allowed, fast)

    @staticmethod
    def _waits(job: Job, epoch: int) -> bool:
        """Whether the request still wants the token of a step that was dispatched in this epoch of it."""
        request = job.request
        return not request.ended and request.epoch == epoch and request.slot is not None

    def _sync_tables(self, moved: Sequence[Request]) -> None:
        """Send the block tables of requests whose pages changed."""
        for request in moved:
            row = self._tables[request.slot]
            row[: len(request.pages)] = request.pages
            self.steps.set_table(request.slot, row.copy())

    def _read(self, result: Result) -> None:
        begin = self._clock()
        tokens = np.asarray(result.tokens)
        self._measure(result, begin, self._clock())
        details = None if result.details is None else tuple(np.asarray(d) for d in result.details)
        for i, (job, epoch) in enumerate(result.rows):
            if self._waits(job, epoch):  # else it ended, or was preempted, after this step was dispatched
                self._deliver(job, int(tokens[i]), details, i)

    def _measure(self, result: Result, begin: float, end: float) -> None:
        """Learn from a prefill step what the next will take, and tell how far its prompts are.

        begin, end: the time before and after its results were waited for.
        """
        took = end - max(self._read_at, result.dispatched_at)
        self._read_at = end
        if not result.pieces:
            self._decode_ms += 0.2 * (1e3 * took - self._decode_ms)
            if self._max_prefill_ms is not None:
                # Where a decode step takes longer than that, as on a CPU, a prompt gets half of the time.
                self.scheduler.max_ms = max(self._max_prefill_ms, self._decode_ms)
            return
        cost, pieces = self.scheduler.cost, [(start, count) for _, _, start, count in result.pieces]
        milliseconds = 1e3 * took
        # Results that were there already may have been so for a while: then the step took less than it seems.
        if end - begin > 0.1 * took or milliseconds < cost.ms(pieces):
            cost.learn(pieces, milliseconds)
        for job, epoch, start, count in result.pieces:
            self.computed_tokens += count
            if self._waits(job, epoch):
                job.processed = start + count
                if job.wants_progress and not job.request.output:
                    self._tell(job, job.event(progress=job.progress(end)))

    def _deliver(self, job: Job, token: int, details: tuple | None, row: int) -> None:
        request = job.request
        if token < 0:
            if self.scheduler.retry(request):
                # What it took up may be somebody else's NaN. Alone it gets its own chance.
                log.warning("request %s: no token could be drawn; computing it again without the cache", request.id)
                return
            message = "the model's logits held NaN or no token could be drawn"
            self._finish(job, job.event(finish_reason="error", error=message))
            return
        told = None
        if job.prompt_scores is not None and not job.prompt_scores.told:
            told = job.prompt_scores.tell()
        if not job.generates:
            self._finish(job, job.event(prompt_logprobs=told, finish_reason="length"))
            return
        self.generated_tokens += 1
        request.output.append(token)
        wanted = job.params.logprobs
        scores = None if wanted is None or details is None else (token_logprob(token, details, row, wanted),)
        stop = token if token in job.stops and len(request.output) >= job.params.min_tokens else None
        full = len(request.prompt) + len(request.output) >= request.limit
        reason = "stop" if stop is not None else "length" if full else None
        if job.tracker is not None and stop is None:
            try:
                job.tracker.push(token)
            except FlintError as error:
                self._finish(job, job.event(finish_reason="error", error=str(error), refused=True))
                return
            if full and job.tracker.done:
                reason = "stop"  # there was room for all but the token that ends it
        event = job.event(
            token_ids=() if stop is not None else (token,),
            logprobs=None if stop is not None else scores,
            prompt_logprobs=told,
            finish_reason=reason,
            stop_token=stop,
        )
        if event.finish_reason is None:
            self._tell(job, event)
        else:
            self._finish(job, event)

    def _finish(self, job: Job, event: Event) -> None:
        if job.request.slot is not None and event.finish_reason in ("abort", "error"):
            self.steps.release(job.request.slot)
        # What a failed request computed or took up may be what made it fail: nobody is to find it.
        for op in self.scheduler.end(job.request, keep=event.finish_reason != "error"):
            # Decided after the plan, so not before what is left of the plan.
            if self._dispatching:
                self._late.append(op)
            else:
                self._do(op)
        with self._wake:
            self._jobs.pop(job.request.id, None)
        self._tell(job, event)

    def _tell(self, job: Job, event: Event) -> None:
        """A listener that fails loses its own request, and nobody else's."""
        try:
            job.on_event(event)
        except Exception:
            log.exception("the listener of request %s failed; the request is aborted", job.request.id)
            self.abort(job.request.id)

    def _drop_all(self, reason: str, error: str | None) -> None:
        with self._wake:
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._inbox.clear()
        self._inflight.clear()
        for job in jobs:  # whatever one of them raises, the others hear of their end
            try:
                self.scheduler.end(job.request, keep=False)
            except Exception:
                log.exception("request %s could not be taken out of the schedule", job.request.id)
            try:
                job.on_event(job.event(finish_reason=reason, error=error))
            except BaseException:
                log.exception("the listener of request %s failed", job.request.id)
