"""An engine without a model: it says what a script tells it to, when it tells it to, and fails on demand.

Same interface as flint_jax.engine.Engine, so that every wire test runs without weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence

from flint_jax.engine import Event, TokenLogprob
from flint_jax.errors import RequestError
from flint_jax.jobs import Progress

EOS = 487  # <|user|> of the T2 vocabulary


@dataclasses.dataclass
class Script:
    """What one request does.

    tokens: generated ids, an end token is added. burst: tokens per event. prefill_s, token_s: delays.
    gate: nothing is generated until it is set. fail_after: an error instead of the token with this index, of the
    request's own making when refused.
    """

    tokens: Sequence[int]
    burst: int = 1
    prefill_s: float = 0.0
    token_s: float = 0.0
    gate: threading.Event | None = None
    fail_after: int | None = None
    refused: bool = False


@dataclasses.dataclass
class _Request:
    id: str
    prompt: tuple[int, ...]
    params: object
    on_event: Callable
    script: Script
    constraint: object = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    generate: bool = True
    due: float = 0.0
    admitted_at: float | None = None
    started: bool = False
    sent: int = 0
    progress: list[Progress] = dataclasses.field(default_factory=list)  # to tell before the first token


class FakeEngine:
    """Runs scripts in a thread, at most ``slots`` at a time. ``script`` may be replaced at any moment."""

    def __init__(self, *, max_model_len: int = 256, slots: int = 4, vocab_size: int = 512):
        self.max_model_len, self.slots, self.vocab_size = max_model_len, slots, vocab_size
        self.config = None
        self.failed: Exception | None = None
        self.ready = False
        self.script: Callable[[Sequence[int], object], Script] = lambda prompt, params: Script([65, 66, 67])
        self.submitted: list[_Request] = []
        self.aborted = 0
        self.cached_tokens = 0
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._aborts: set[str] = set()
        self._lock = threading.Condition()
        self._names = itertools.count()
        self._stopping = False
        self._break: Exception | None = None

    # -- the engine's interface --------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids,
        params,
        *,
        on_event,
        request_id=None,
        constraint=None,
        cache_salt=None,
        prompt_logprobs=None,
        generate=True,
        report_progress=False,
    ) -> str:
        if self.failed is not None or self._stopping:
            raise RuntimeError("the engine has stopped")
        prompt = tuple(prompt_ids)
        if not prompt:
            raise RequestError("the prompt has no tokens", param="prompt", code="invalid_value")
        if len(prompt) + generate > self.max_model_len:
            raise RequestError("too long for the fake engine", param="prompt", code="context_length_exceeded")
        if not all(0 <= t < self.vocab_size for t in prompt):
            raise RequestError("token ids outside the vocabulary", param="prompt", code="invalid_value")
        params.check_vocabulary(self.vocab_size)
        params.stop_set((EOS,))
        name = request_id or f"request-{next(self._names)}"
        request = _Request(name, prompt, params, on_event, self.script(prompt, params), constraint, cache_salt)
        request.prompt_logprobs, request.generate = prompt_logprobs, generate
        if report_progress:
            request.progress = [Progress(len(prompt), 1, n, 0.0125) for n in (len(prompt) // 2, len(prompt))]
        with self._lock:
            self.submitted.append(request)
            self._waiting.append(request)
            self._lock.notify()
        return name

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._aborts.add(request_id)
            self._lock.notify()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()
        self.ready = True

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join()

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "running": len(self._running),
                "waiting": len(self._waiting),
                "free_slots": self.slots - len(self._running),
                "slots": self.slots,
            }

    def progress(self) -> dict[str, Progress]:
        """Those that wait for their gate, at half."""
        with self._lock:
            gated = [r for r in self._running if r.script.gate is not None and not r.script.gate.is_set()]
            return {r.id: Progress(len(r.prompt), 0, len(r.prompt) // 2, 1.5) for r in gated}

    # -- for tests ---------------------------------------------------------------------------------------------------

    def break_down(self, error: Exception) -> None:
        """Die as an engine does whose step raises."""
        with self._lock:
            self._break = error
            self._lock.notify()

    def idle(self) -> bool:
        """Whether every slot and the queue are empty."""
        stats = self.stats()
        return stats["running"] == stats["waiting"] == 0

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                if not (self._running or self._waiting or self._stopping or self._break):
                    self._lock.wait()
                if self._stopping or self._break:
                    break
                self._drop_aborted()
                while self._waiting and len(self._running) < self.slots:
                    request = self._waiting.pop(0)
                    request.admitted_at = time.monotonic()
                    request.due = request.admitted_at + request.script.prefill_s
                    self._running.append(request)
                running = list(self._running)
            progress = [self._advance(r) for r in running]
            if running and not any(progress):
                time.sleep(0.0005)
        with self._lock:
            left, self._running, self._waiting = self._running + self._waiting, [], []
        if self._break:
            self.failed, self.ready = self._break, False
        for r in left:
            self._tell(r, finish_reason="error" if self._break else "abort", error=str(self._break or ""))

    def _drop_aborted(self) -> None:
        for queue in (self._running, self._waiting):
            for r in [r for r in queue if r.id in self._aborts]:
                queue.remove(r)
                self.aborted += 1
                self._tell(r, finish_reason="abort")
        self._aborts.clear()

    def _advance(self, r: _Request) -> bool:
        script = r.script
        if time.monotonic() < r.due or (script.gate is not None and not script.gate.is_set()):
            return False
        r.due = time.monotonic() + script.token_s
        if r.progress:
            self._tell_progress(r)
            return True
        if not r.generate:
            self._end(r, finish_reason="length")
            return True
        stops = r.params.stop_set((EOS,))
        tokens: list[int] = []
        for _ in range(script.burst):
            if script.fail_after == r.sent:
                self._end(r, finish_reason="error", error="scripted failure", refused=script.refused)
                return True
            token = script.tokens[r.sent] if r.sent < len(script.tokens) else EOS
            r.sent += 1
            if token in stops and r.sent >= r.params.min_tokens:
                self._end(r, tokens, finish_reason="stop", stop_token=token)
                return True
            tokens.append(token)
            if r.sent >= (r.params.max_tokens or math.inf) or len(r.prompt) + r.sent >= self.max_model_len:
                self._end(r, tokens, finish_reason="length")
                return True
        self._tell(r, tokens)
        return True

    def _end(self, r: _Request, tokens: Sequence[int] = (), **how) -> None:
        with self._lock:
            if r in self._running:
                self._running.remove(r)
        self._tell(r, tokens, **how)

    def _tell(self, r: _Request, tokens: Sequence[int] = (), **how) -> None:
        logprobs = None
        if r.params.logprobs is not None:
            logprobs = tuple(self._logprob(t, r.params.logprobs) for t in tokens)
        told = None
        if r.prompt_logprobs is not None and not r.started:
            told = (None, *(self._logprob(t, r.prompt_logprobs) for t in r.prompt[1:]))
        r.started = True
        r.on_event(
            Event(
                r.id,
                tuple(tokens),
                logprobs,
                told,
                prompt_tokens=len(r.prompt),
                cached_tokens=self.cached_tokens,
                admitted_at=r.admitted_at,
                **how,
            )
        )

    def _tell_progress(self, r: _Request) -> None:
        progress = r.progress.pop(0)
        r.on_event(Event(r.id, prompt_tokens=len(r.prompt), admitted_at=r.admitted_at, progress=progress))

    @staticmethod
    def _logprob(token: int, top: int) -> TokenLogprob:
        """The token itself is likeliest, the others are masked out."""
        others = [(i, -math.inf) for i in range(top) if i != token]
        return TokenLogprob(token, -0.25, 1, tuple([(token, -0.25), *others][:top]))
