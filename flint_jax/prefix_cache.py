"""What is known of prefixes already computed: pages counted by owner, a tree of page contents, ring snapshots. No JAX.

A window layer keeps only its last tokens, so pages alone cannot continue a sequence: a prefix can be taken up where a
*snapshot* of the slot's rings was kept. A snapshot is therefore the unit of everything here: it holds the pages of its
prefix, a look-up finds snapshots, and eviction removes the one used longest ago together with the pages that nothing
else needs.

Pages are found by a chain of look-ups, each by the page before and the bytes of the page's token ids. That is a hash
chain whose every link is compared in full: no two prefixes can be taken for each other. Chains start at a root of their
``cache_salt``, so requests of different salts never meet.

A snapshot taken with ``end`` tokens in the ring serves more than the position ``end``: the ring is longer than the
window (576 places for 513), so the last 64 positions (all of them, while nothing was overwritten) still have their
whole window in it. A turn that differs in its last tokens from what was generated can thus still be taken up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

ID_BYTES = 4  # a token id in a span
Span = Callable[[int, int], bytes]  # (start, stop) -> token ids of those positions, ID_BYTES each


class PagePool:
    """Pages and who needs them: ``uses[page]`` requests, ``keeps[page]`` holds of the prefix cache."""

    def __init__(self, pages: int):
        self.pages = pages
        self.free = list(range(pages - 1, -1, -1))
        self.uses = [0] * pages
        self.keeps = [0] * pages
        self.used = 0  # pages that a request uses
        self.changes = 0  # rises whenever a page comes to be available

    @property
    def available(self) -> int:
        """Pages that no request uses: free ones, and cached ones that can be evicted."""
        return self.pages - self.used

    def take(self) -> int:
        """A free page, for a request."""
        page = self.free.pop()
        self.use(page)
        return page

    def use(self, page: int) -> None:
        """One more request reads the page."""
        self.used += self.uses[page] == 0
        self.uses[page] += 1

    def drop(self, page: int) -> None:
        """One request less."""
        self.uses[page] -= 1
        if not self.uses[page]:
            self.used -= 1
            self.changes += 1
            self._free_if_unneeded(page)

    def keep(self, page: int) -> None:
        """The prefix cache wants the page's contents."""
        self.keeps[page] += 1

    def forget(self, page: int) -> None:
        """The prefix cache wants it once less."""
        self.keeps[page] -= 1
        self._free_if_unneeded(page)

    def _free_if_unneeded(self, page: int) -> None:
        if not self.uses[page] and not self.keeps[page]:
            self.free.append(page)


@dataclasses.dataclass(eq=False)
class Node:
    """A full page of tokens behind its parent's. A root stands for the empty prefix of one salt and has no page."""

    parent: Node | None
    key: bytes | str
    page: int | None
    depth: int
    children: dict[bytes, Node] = dataclasses.field(default_factory=dict)
    ends: int = 0  # snapshots whose last full page this is
    snapshots: list[Snapshot] = dataclasses.field(default_factory=list)  # those that are looked up from here
    alive: bool = True


@dataclasses.dataclass(eq=False)
class Snapshot:
    """Rings of a slot, kept at ``index``; they serve every position from ``low`` to ``high``.

    end: tokens that went through the rings, at most; those after ``high`` may be of another sequence.
    node: its last full page. tail: the page of the tokens after that, or None. base: the node it is looked up from, at
    or above ``low``; suffix: token ids from there to ``high``.
    """

    index: int
    low: int
    high: int
    end: int
    node: Node
    tail: int | None
    base: Node
    suffix: bytes
    passing: bool  # taken inside a prompt, and nothing has come back to it yet
    used: int = 0

    def pages(self) -> list[int]:
        """Pages of its prefix, in order."""
        pages = [] if self.tail is None else [self.tail]
        node = self.node
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]


@dataclasses.dataclass(frozen=True)
class Hit:
    """The longest prefix that can be taken up. position: its tokens, 0 for none. seen: tokens whose pages are known."""

    snapshot: Snapshot | None
    position: int
    seen: int


class PrefixCache:
    """At most ``count`` snapshots over the pages of ``pool``. page: tokens in one. window, ring: as in cache.py."""

    def __init__(self, pool: PagePool, page: int, window: int, ring: int, count: int):
        self.pool, self.page = pool, page
        self.window, self.ring, self.count = window, ring, count
        self.roots: dict[str, Node] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.free = list(range(count - 1, -1, -1))
        self.evictions = 0
        self.clock = 0

    # -- looking up ------------------------------------------------------------------------------------------------

    def find(self, salt: str, span: Span, limit: int) -> Hit:
        """The best snapshot for a sequence of which at most ``limit`` tokens may be reused."""
        best, position, depth = None, 0, 0
        node = self.roots.get(salt)
        seen = 0
        while node is not None:
            start = depth * self.page
            seen = start
            for snapshot in node.snapshots:
                reach = min(snapshot.high, limit)
                if reach <= position:
                    continue
                same = start + common(snapshot.suffix, span(start, reach)) // ID_BYTES
                if same > position and same >= snapshot.low:
                    best, position = snapshot, same
            if start + self.page > limit:
                break
            node = node.children.get(span(start, start + self.page))
            depth += 1
        return Hit(best, position, seen)

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether it has not been evicted."""
        return self.snapshots.get(snapshot.index) is snapshot

    def touch(self, hit: Hit) -> None:
        """Note that the hit is used. One that shares little with its snapshot does not keep the snapshot young."""
        if hit.snapshot is not None and 2 * hit.position >= hit.snapshot.high:
            hit.snapshot.passing = False
            self._age(hit.snapshot)

    # -- keeping ---------------------------------------------------------------------------------------------------

    def lowest(self, end: int) -> int:
        """First position whose whole window is in a ring that ``end`` tokens went through."""
        return 0 if end <= self.ring else end - self.ring + self.window - 1

    def insert(
        self,
        salt: str,
        span: Span,
        pages: list[int],
        high: int,
        end: int,
        *,
        trail: Node | None = None,
        passing: bool = False,
    ) -> Snapshot | None:
        """Note that ``high`` tokens lie in ``pages`` and that the slot's rings, after ``end`` tokens, can be kept.

        end: at least high, as further tokens may be on their way. trail: a node known to lie on this sequence's path.
        Returns the snapshot to be saved at its index, or None when it is not wanted: known already, or no room.
        """
        low = self.lowest(end)
        if not self.count or high < 1 or low > high:
            return None
        last = self._path(salt, span, pages, high // self.page, trail)
        base = last
        while base.depth > low // self.page:
            base = base.parent
        suffix = span(base.depth * self.page, high)
        for known in base.snapshots:
            if known.high == high and known.low <= low and known.suffix == suffix:
                known.passing = known.passing and passing
                self._age(known)
                return None
        tail = pages[high // self.page] if high % self.page else None
        snapshot = Snapshot(-1, low, high, end, last, tail, base, suffix, passing)
        last.ends += 1
        base.snapshots.append(snapshot)
        if tail is not None:
            self.pool.keep(tail)
        if not self.free:
            self._evict(min(self.snapshots.values(), key=_order))
        snapshot.index = self.free.pop()
        self.snapshots[snapshot.index] = snapshot
        self._age(snapshot)
        return snapshot

    def _path(self, salt: str, span: Span, pages: list[int], depth: int, trail: Node | None) -> Node:
        node = trail if trail is not None and trail.alive and trail.depth <= depth else None
        if node is None:
            node = self.roots.setdefault(salt, Node(None, salt, None, 0))
        while node.depth < depth:
            start = node.depth * self.page
            key = span(start, start + self.page)
            child = node.children.get(key)
            if child is None:
                child = Node(node, key, pages[node.depth], node.depth + 1)
                node.children[key] = child
                self.pool.keep(child.page)
            node = child
        return node

    def _age(self, snapshot: Snapshot) -> None:
        self.clock += 1
        snapshot.used = self.clock

    # -- giving up -------------------------------------------------------------------------------------------------

    def reclaim(self) -> bool:
        """Free at least one page, by evicting what was used longest ago; False when every page is in use."""
        if self.pool.free:
            return True
        aged = sorted(self.snapshots.values(), key=_order)
        for snapshot in aged:  # first those whose end is in nobody's use: inner ones free nothing
            if self._frees(snapshot):
                self._evict(snapshot)
                return True
        for snapshot in aged:
            self._evict(snapshot)
            if self.pool.free:
                return True
        return False

    def _frees(self, snapshot: Snapshot) -> bool:
        pool, node = self.pool, snapshot.node
        tail = snapshot.tail
        if tail is not None and pool.keeps[tail] == 1 and not pool.uses[tail]:
            return True
        if node.parent is None or node.ends > 1 or node.children:
            return False
        return pool.keeps[node.page] == 1 and not pool.uses[node.page]

    def distrust(self, pages: Iterable[int], lineage: Iterable[Snapshot]) -> None:
        """Forget every snapshot that has one of the pages, or a page of those in ``lineage``, in its prefix."""
        bad = set(pages)
        for snapshot in lineage:
            bad.update(snapshot.pages())
        for snapshot in tuple(self.snapshots.values()):
            if not bad.isdisjoint(snapshot.pages()):
                self._detach(snapshot)

    def clear(self) -> None:
        """Forget everything."""
        for snapshot in list(self.snapshots.values()):
            self._detach(snapshot)

    def _evict(self, snapshot: Snapshot) -> None:
        self.evictions += 1
        self._detach(snapshot)

    def _detach(self, snapshot: Snapshot) -> None:
        del self.snapshots[snapshot.index]
        self.free.append(snapshot.index)
        snapshot.base.snapshots.remove(snapshot)
        if snapshot.tail is not None:
            self.pool.forget(snapshot.tail)
        node = snapshot.node
        node.ends -= 1
        while not node.ends and not node.children:
            node.alive = False
            if node.parent is None:
                del self.roots[node.key]
                break
            self.pool.forget(node.page)
            del node.parent.children[node.key]
            node = node.parent

    def nodes(self) -> Iterator[Node]:
        """Every page of the tree."""
        queue = list(self.roots.values())
        while queue:
            node = queue.pop()
            queue.extend(node.children.values())
            if node.parent is not None:
                yield node


def _order(snapshot: Snapshot) -> tuple[bool, int]:
    """What goes first: snapshots inside prompts that nothing came back to, then those used longest ago."""
    return (not snapshot.passing, snapshot.used)


def common(a: bytes, b: bytes) -> int:
    """Length of the common prefix, a multiple of ID_BYTES."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    low, high = 0, most // ID_BYTES  # in ids: [0, low] agree, [0, high) do not
    while low + 1 < high:
        middle = (low + high) // 2
        if a[: middle * ID_BYTES] == b[: middle * ID_BYTES]:
            low = middle
        else:
            high = middle
    return low * ID_BYTES
