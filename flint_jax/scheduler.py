"""Who is prefilled, who decodes, who waits, who ends: pure Python over slots and pages, no JAX.

The scheduler owns every slot and page. A request waits until a slot and the pages of its tokens are free, takes up what
the prefix cache has of its tokens, is prefilled in pieces, then takes part in every decode step until it ends. Pages
grow with the request. When none is left, cached prefixes are evicted; when there are none of those, the youngest
running request gives everything back and returns to the head of the queue with what it generated so far as part of its
tokens, so nothing is lost.

A plan lists what the device has to do in the order of the decisions, and the device does it in that order. So every
decision may rely on all before it: a page given up is still intact for the copy that was decided earlier.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from flint_jax.plan import Admit, CopyPage, Op, Piece, Plan, Prefill, Request, Restore, Save
from flint_jax.prefill_cost import Allowance, PrefillCost
from flint_jax.prefix_cache import ID_BYTES, Hit, Node, PagePool, PrefixCache, common

# Tokens that may be in flight when a step is planned: the host reads one step late.
LOOKAHEAD = 2
INTERVAL = 8192  # tokens between snapshots inside a long prompt
SHARE = 4  # the snapshots inside one prompt take at most this fraction of all: 1 / SHARE
WORTH = 2  # pages of prefill that are worth a snapshot of their own, or waiting for somebody else's
ROWS = 8  # most pieces of one prefill step


def grain(budget: int) -> int:
    """What pieces are a multiple of: whole tiles of the kernels where steps are long, less where they are short."""
    return 64 if budget >= 1024 else 16 if budget >= 64 else 1


class Scheduler:
    """slots, pages: how many there are. chunks: lengths of prefill steps that are compiled, ascending.

    budget: most tokens of one prefill step, default and at most the longest. rows: most pieces of one. max_ms: what a
    prefill step may take by ``cost`` while something decodes, in milliseconds; None for any time. tile: a piece takes a
    multiple of so many places of a step. snapshots, window, ring: size of the prefix cache and of a slot's rings;
    without snapshots nothing is shared.
    """

    def __init__(
        self,
        slots: int,
        pages: int,
        page_size: int,
        chunks: Sequence[int],
        budget: int | None = None,
        *,
        snapshots: int = 0,
        window: int = 1,
        ring: int = 1,
        interval: int = INTERVAL,
        rows: int = ROWS,
        max_ms: float | None = None,
        cost: PrefillCost | None = None,
        tile: int = 1,
    ):
        self.slots, self.page_size, self.chunks = slots, page_size, tuple(chunks)
        budget = min(budget or self.chunks[-1], self.chunks[-1])
        self.budget, self.tile = max(budget - budget % tile, tile), tile
        self.grain = grain(self.budget)
        self.rows, self.max_ms, self.cost = rows, max_ms, cost or PrefillCost()
        self.interval = interval
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool, page_size, window, ring, snapshots)
        self.free_slots = list(range(slots - 1, -1, -1))
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []  # oldest first
        self.preemptions = 0
        self.queries = self.hits = 0  # prompt tokens looked up in the prefix cache, and found there
        self.prefilled = 0  # tokens handed to prefill
        self._oldest_first = False
        self._refused: tuple | None = None  # who could not be admitted, and the state of pool and cache then

    @property
    def pages(self) -> int:
        """How many there are."""
        return self.pool.pages

    def capacity(self) -> int:
        """Most tokens one request can ever hold."""
        return self.pages * self.page_size

    def add(self, request: Request) -> None:
        """Queue a request. It must fit the pool alone: ``request.limit <= capacity()``."""
        if request.limit > self.capacity():
            raise ValueError(f"request of {request.limit} tokens, the pool holds {self.capacity()}")
        self.waiting.append(request)

    def end(self, request: Request, *, keep: bool = True) -> list[Op]:
        """Give back whatever the request holds, wherever it is; returns what the device has to do first. Idempotent.

        keep: leave its prefix to the cache. False when its results cannot be trusted: the cache then forgets all that
        shares a page with it.
        """
        if request.ended:
            return []
        request.ended = True
        ops: list[Op] = []
        if not keep:
            self.cache.distrust(request.pages, [s for s in request.lineage if self.cache.holds(s)])
        if request in self.running:
            self.running.remove(request)
            if keep:
                self._save(request, ops)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._strip(request)
        request.lineage = []
        return ops

    def retry(self, request: Request) -> bool:
        """Have a running request whose results cannot be trusted computed again, without the cache. False when it took
        nothing from the cache: it would fail again."""
        if not request.taken:
            return False
        self.cache.distrust(request.pages, [s for s in request.lineage if self.cache.holds(s)])
        request.lineage = []
        request.reuse = False
        self._to_queue(request)
        return True

    def plan(self) -> Plan:
        """Decide one iteration and take the pages it needs."""
        ops: list[Op] = []
        preempted: list[Request] = []
        moved: list[Request] = []
        decode = []
        for request in list(self.running):
            if request.slot is None or not request.decoding or request.exhausted:
                continue
            if self._grow(request, ops, preempted, moved):
                decode.append(request)
        decode = [r for r in decode if r.slot is not None]
        for request in decode:
            request.dispatched += 1
        for request in tuple(self.waiting) if self.free_slots and not preempted else ():
            if self._follows(request):
                continue
            if not self.free_slots or not self._admit(request, ops):
                break
            self.waiting.remove(request)
            moved.append(request)
        self._prefill(ops, self.max_ms if decode else None)
        moved = [r for r in moved if r.slot is not None]
        return Plan(tuple(ops), tuple(decode), tuple(preempted), tuple(moved))

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self, ops: list[Op], ms: float | None) -> None:
        """One step of pieces, and the snapshots that are due after it."""
        counts = self._share(ms)
        if not counts:
            return
        pieces = [Piece(r, r.prefilled, n, r.prefilled + n == r.target) for r, n in counts.items()]
        pieces.sort(key=lambda piece: not piece.final)
        ops.append(Prefill(tuple(pieces)))
        for piece in pieces:
            self._passed(piece, ops)

    def _share(self, ms: float | None) -> dict[Request, int]:
        """Tokens of each request in the next step. Those with the fewest left come first, but half of the step is for
        the oldest: no long prompt holds up a short one, and no stream of short ones starves a long one."""
        order = [r for r in self.running if not r.decoding]
        if not order:
            return {}
        room = Allowance(self.cost, self.budget, self.rows, self.grain, ms, self.tile)
        oldest = order[0]
        order.sort(key=lambda r: r.target - r.prefilled)
        self._oldest_first = not self._oldest_first
        if room.divisible(oldest):
            for request in order:
                if request is not oldest:
                    room.give(request, kept=0.5)
            room.give(oldest)
        elif self._oldest_first:  # too little to divide: they take turns
            order.remove(oldest)
            order.insert(0, oldest)
        for request in order:
            room.give(request)
        if not room.counts:
            room.give_least(order[0])
        return room.counts

    def _passed(self, piece: Piece, ops: list[Op]) -> None:
        """Count a piece as prefilled, and save what is to be kept behind it."""
        request = piece.request
        request.prefilled += piece.count
        self.prefilled += piece.count
        if piece.final:
            request.dispatched += 1  # the final piece draws a token
        if request.marks and request.marks[-1] == request.prefilled:
            request.marks.pop()
            self._save(request, ops, passing=request.prefilled != request.branch)
        elif piece.final:
            self._save(request, ops)

    # -- pages and slots -------------------------------------------------------------------------------------------

    def _need(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _admit(self, request: Request, ops: list[Op]) -> bool:
        """Slot, pages and what the cache has. The running requests are left a page each: they may need it next."""
        now = (request, self.pool.changes, self.cache.clock)
        if self._refused == now:
            return False
        need = self._need(min(request.known + LOOKAHEAD, request.limit))
        hit = self._find(request)
        shared = hit.snapshot.pages() if hit.position else []
        copied = shared[hit.position // self.page_size] if hit.position % self.page_size else None
        shared = shared[: hit.position // self.page_size]
        for page in shared:
            self.pool.use(page)
        if need - len(shared) + len(self.running) > self.pool.available:
            for page in shared:
                self.pool.drop(page)
            self._refused = (request, self.pool.changes, self.cache.clock)
            return False
        self._refused = None
        self.cache.touch(hit)
        request.slot = self.free_slots.pop()
        request.pages = shared
        request.trail = self._trail(hit)
        ops.append(Admit(request))
        if hit.position:
            request.lineage.append(hit.snapshot)
            request.stale = hit.snapshot.end
            ops.append(Restore(hit.snapshot.index, request.slot))
        while len(request.pages) < need:
            request.pages.append(self._take())
        if copied is not None:
            # The source may just have been evicted, even taken for this request; nothing was written to it since.
            ops.append(CopyPage(copied, request.pages[hit.position // self.page_size]))
        request.prefilled = request.taken = hit.position
        request.target = request.known
        request.dispatched = len(request.output)
        request.marks = self._marks(request, hit)
        request.epoch += 1
        if request.cached is None:
            request.cached = hit.position
            if request.reuse and self.cache.count:
                self.queries += len(request.prompt)
                self.hits += hit.position
        self.running.append(request)
        return True

    def _find(self, request: Request) -> Hit:
        if not request.reuse:
            return Hit(None, 0, 0)
        # One token at least is computed, so that there are logits.
        return self.cache.find(request.salt, request.span, request.known - 1)

    def _trail(self, hit: Hit) -> Node | None:
        """The cache's node of the last full page that is taken up."""
        if not hit.position:
            return None
        node = hit.snapshot.node
        while node.depth > hit.position // self.page_size:
            node = node.parent
        return node

    def _marks(self, request: Request, hit: Hit) -> list[int]:
        """Where to keep snapshots inside the prompt, last first: where it leaves a known path (others will leave it
        there, too), and every interval of a long prompt."""
        if not self.cache.count:
            return []
        inside = range(hit.position + 1, request.target)
        most = max(self.cache.count // SHARE, 1)
        step = max(self.interval, self._need(-(-request.target // (most + 1))) * self.page_size)
        marks = {p for p in range(step, request.target, step) if p in inside}
        request.branch = 0
        if hit.seen in inside and hit.seen - hit.position >= WORTH * self.page_size:
            request.branch = hit.seen
            marks.add(hit.seen)
        return sorted(marks, reverse=True)

    def _follows(self, request: Request) -> bool:
        """Whether to wait for another's prefill of the same beginning, which is quicker than doing it again.

        It waits once, for one leader, and no longer than that prefill takes; others pass it meanwhile.
        """
        if request.leader is None and request.reuse and self.cache.count:
            request.leader = self._leader(request)
        if request.leader is None:
            return False
        other, position = request.leader
        return other.slot is not None and other.prefilled < position

    def _leader(self, request: Request) -> tuple[Request, int] | None:
        """Whom to wait for, and until it has come how far."""
        for other in self.running:
            most = min(request.known - 1, other.target)
            first = min(self.page_size, most)
            if other.decoding or other.salt != request.salt or request.span(0, first) != other.span(0, first):
                continue
            same = common(request.span(0, most), other.span(0, most)) // ID_BYTES
            until = other.target
            if same < self.cache.lowest(other.target):  # its last snapshot will not do
                same = until = same // self.page_size * self.page_size
            if until <= other.prefilled or same - self._find(request).position < WORTH * self.page_size:
                continue
            if until < other.target and until not in other.marks:
                other.marks = sorted([*other.marks, until], reverse=True)
                other.branch = until
            return other, until
        return None

    def _take(self) -> int:
        if not self.cache.reclaim():
            raise AssertionError("a page was promised, and there is none")
        return self.pool.take()

    def _grow(self, request: Request, ops: list[Op], preempted: list[Request], moved: list[Request]) -> bool:
        """Pages for the token about to be written; False when the request itself had to give way."""
        need = self._need(min(len(request.prompt) + request.dispatched + LOOKAHEAD, request.limit))
        if len(request.pages) < need:
            moved.append(request)
        while len(request.pages) < need:
            if self.pool.available:
                request.pages.append(self._take())
                continue
            victim = self.running[-1]
            self._preempt(victim, ops)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, ops: list[Op]) -> None:
        # Up to a whole page: the rest of its last page is what the others need first, or the snapshot would go at once.
        self._save(request, ops, whole_pages=True)
        self._to_queue(request)
        self.preemptions += 1

    def _to_queue(self, request: Request) -> None:
        """From running to the head of the queue."""
        self.running.remove(request)
        self._strip(request)
        self.waiting.appendleft(request)

    def _save(self, request: Request, ops: list[Op], *, passing: bool = False, whole_pages: bool = False) -> None:
        """Leave what the request has in its pages and rings to the prefix cache."""
        if request.decoding:
            # The last token read is not in the cache for sure, those being drawn may be in it already.
            high = max(request.target, request.known - 1)
            end = max(request.target, len(request.prompt) + request.dispatched - 1)
        else:
            high = end = request.prefilled
        end = max(end, request.stale)
        if whole_pages:
            high -= high % self.page_size
        snapshot = self.cache.insert(
            request.salt, request.span, request.pages, high, end, trail=request.trail, passing=passing
        )
        if snapshot is not None:
            request.trail = snapshot.node
            request.lineage.append(snapshot)
            ops.append(Save(request.slot, snapshot.index))

    def _strip(self, request: Request) -> None:
        if request.slot is not None:
            self.free_slots.append(request.slot)
            request.slot = None
        for page in request.pages:
            self.pool.drop(page)
        request.pages = []
        request.prefilled = request.target = 0
        request.marks = []
        request.stale = 0
        request.trail = None

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless every slot, page and snapshot is accounted for exactly (for tests)."""
        requests = list(requests)
        pool, cache = self.pool, self.cache
        taken = [r.slot for r in requests if r.slot is not None]
        assert sorted(taken + self.free_slots) == list(range(self.slots)), "a slot is lost or owned twice"
        uses = collections.Counter(p for r in requests for p in r.pages)
        keeps = collections.Counter(node.page for node in cache.nodes())
        keeps.update(s.tail for s in cache.snapshots.values() if s.tail is not None)
        assert pool.uses == [uses[p] for p in range(self.pages)], "a page's users are miscounted"
        assert pool.keeps == [keeps[p] for p in range(self.pages)], "a page's holds are miscounted"
        idle = [p for p in range(self.pages) if not uses[p] and not keeps[p]]
        assert sorted(pool.free) == idle, "a page is lost or free while needed"
        assert pool.used == len(uses), "pages in use are miscounted"
        assert sorted([*cache.snapshots, *cache.free]) == list(range(cache.count)), "a snapshot is lost or owned twice"
