"""Who is prefilled, who decodes, who waits, who ends: pure Python over slots and pages, no JAX.

The scheduler owns every slot and page. A request waits until a slot and the pages of its tokens are free, is prefilled
in chunks, then takes part in every decode step until it ends. Pages grow with the request; when none is left, the
youngest running request gives everything back and returns to the head of the queue with what it generated so far as
part of its tokens, so nothing is lost.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

# Tokens that may be in flight when a step is planned: the host reads one step late.
LOOKAHEAD = 2


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence. ``tokens``: prompt, then what was generated and seen by the host."""

    id: str
    prompt: tuple[int, ...]
    limit: int  # most tokens in all, prompt included
    output: list[int] = dataclasses.field(default_factory=list)
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0  # tokens handed to prefill since the last admission
    target: int = 0  # tokens to prefill: all that were known at admission
    dispatched: int = 0  # tokens drawn or being drawn, as far as steps were dispatched
    ended: bool = False
    epoch: int = 0  # counts admissions: results of an earlier one are stale

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and output."""
        return (*self.prompt, *self.output)

    @property
    def decoding(self) -> bool:
        """Prefill is fully dispatched."""
        return self.slot is not None and self.prefilled == self.target

    @property
    def exhausted(self) -> bool:
        """Every token it may have is dispatched."""
        return len(self.prompt) + self.dispatched >= self.limit


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of prefill: tokens [start, start + count) of a request; final when it is the last piece."""

    request: Request
    start: int
    count: int
    final: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """One iteration: freshly admitted requests, prefill chunks, then one decode step of these requests."""

    admitted: tuple[Request, ...]
    chunks: tuple[Chunk, ...]
    decode: tuple[Request, ...]
    preempted: tuple[Request, ...]

    @property
    def empty(self) -> bool:
        """Nothing to do."""
        return not (self.chunks or self.decode)


class Scheduler:
    """slots, pages: how many there are. chunk: most prefill tokens of one piece; budget: of one iteration."""

    def __init__(self, slots: int, pages: int, page_size: int, chunk: int, budget: int | None = None):
        self.slots, self.pages, self.page_size = slots, pages, page_size
        self.chunk = chunk
        self.budget = max(budget or chunk, 1)
        self.free_slots = list(range(slots - 1, -1, -1))
        self.free_pages = list(range(pages - 1, -1, -1))
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []  # oldest first
        self.preemptions = 0

    def capacity(self) -> int:
        """Most tokens one request can ever hold."""
        return self.pages * self.page_size

    def add(self, request: Request) -> None:
        """Queue a request. It must fit the pool alone: ``request.limit <= capacity()``."""
        if request.limit > self.capacity():
            raise ValueError(f"request of {request.limit} tokens, the pool holds {self.capacity()}")
        self.waiting.append(request)

    def end(self, request: Request) -> None:
        """Give back whatever the request holds, wherever it is. Idempotent."""
        if request.ended:
            return
        request.ended = True
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._strip(request)

    def plan(self) -> Plan:
        """Decide one iteration and take the pages it needs."""
        preempted: list[Request] = []
        decode = []
        for request in list(self.running):
            if request.slot is None or not request.decoding or request.exhausted:
                continue
            if self._grow(request, preempted):
                decode.append(request)
        decode = [r for r in decode if r.slot is not None]
        for request in decode:
            request.dispatched += 1
        admitted, chunks, left = [], [], self.budget
        for request in self.running:
            if left <= 0:
                break
            if not request.decoding:
                left = self._chunks(request, left, chunks)
        while left > 0 and self.waiting and self.free_slots and not preempted:
            request = self.waiting[0]
            if not self._admit(request):
                break
            self.waiting.popleft()
            admitted.append(request)
            left = self._chunks(request, left, chunks)
        return Plan(tuple(admitted), tuple(chunks), tuple(decode), tuple(preempted))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _chunks(self, request: Request, left: int, chunks: list[Chunk]) -> int:
        while left > 0 and request.prefilled < request.target:
            count = min(self.chunk, left, request.target - request.prefilled)
            final = request.prefilled + count == request.target
            chunks.append(Chunk(request, request.prefilled, count, final))
            request.prefilled += count
            left -= count
            if final:
                request.dispatched += 1  # the final chunk draws a token
        return left

    def _need(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _admit(self, request: Request) -> bool:
        known = len(request.prompt) + len(request.output)
        need = self._need(min(known + LOOKAHEAD, request.limit))
        if need > len(self.free_pages):
            return False
        request.slot = self.free_slots.pop()
        request.pages = [self.free_pages.pop() for _ in range(need)]
        request.prefilled = 0
        request.target = known
        request.dispatched = len(request.output)
        request.epoch += 1
        self.running.append(request)
        return True

    def _grow(self, request: Request, preempted: list[Request]) -> bool:
        """Pages for the token about to be written; False when the request itself had to give way."""
        known = len(request.prompt) + request.dispatched
        need = self._need(min(known + LOOKAHEAD, request.limit))
        while len(request.pages) < need:
            if self.free_pages:
                request.pages.append(self.free_pages.pop())
                continue
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._strip(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _strip(self, request: Request) -> None:
        if request.slot is not None:
            self.free_slots.append(request.slot)
            request.slot = None
        self.free_pages.extend(request.pages)
        request.pages = []
        request.prefilled = request.target = 0

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless every slot and page has exactly one owner (for tests)."""
        held = [p for r in requests for p in r.pages]
        assert sorted(held + self.free_pages) == list(range(self.pages)), "a page is lost or owned twice"
        taken = [r.slot for r in requests if r.slot is not None]
        assert sorted(taken + self.free_slots) == list(range(self.slots)), "a slot is lost or owned twice"
