"""What to run, in what order, and in which pages: a tree of the sequences' shared beginnings. No model, no JAX.

Every sequence is cut at page boundaries, and at the end of its context when other continuations follow the same
context (of 16 tokens or more). Equal pieces behind equal pieces are one node and run once. A node lies inside one page;
one that begins in the middle of a page writes on in its parent's page, or, when the parent has several such children,
in a copy of it.

Where a token is run depends on its position alone (page, place, row of its tile), never on its company.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from flint_jax.errors import RequestError

SHORTEST = 16  # a tile: running a shorter context again with each continuation costs no place that was not padding


@dataclasses.dataclass(eq=False)
class Task:
    """One distinct sequence. tokens: int32 [n]. first: index (>= 1) of the first token whose score is wanted."""

    tokens: np.ndarray
    first: int
    path: list[Node] = dataclasses.field(default_factory=list)

    @property
    def run(self) -> int:
        """Tokens that must pass through the model: nothing is predicted from the last one."""
        return len(self.tokens) - 1


@dataclasses.dataclass(eq=False)
class Node:
    """Tokens at positions start .. start + len(tokens) - 1, inside one page, run once for all who share them.

    users: sequences through this node that have not ended. wants: (sequence, low, high), positions low .. high - 1
    whose next token that sequence wants scored. enders: sequences whose last run token is here. table: pages of a
    sequence through it; right before the node's own page, which is ``page``.
    """

    parent: Node | None
    start: int
    tokens: np.ndarray
    depth: int = 0
    users: int = 0
    page: int | None = None
    table: np.ndarray | None = None
    owns: bool = False
    done: bool = False
    children: dict[bytes, Node] = dataclasses.field(default_factory=dict)
    wants: list[tuple[Task, int, int]] = dataclasses.field(default_factory=list)
    enders: list[Task] = dataclasses.field(default_factory=list)

    def copies(self, page: int) -> bool:
        """Whether it needs a copy of its parent's page: siblings would write on in the same place."""
        return bool(self.start % page) and len(self.parent.children) > 1

    def rows(self, page: int, width: int) -> range:
        """Tiles of ``width`` positions (numbers within the page) that hold its tokens."""
        begin = self.start % page
        return range(begin // width, (begin + len(self.tokens) - 1) // width + 1)


@dataclasses.dataclass(frozen=True)
class Row:
    """One tile to run: positions start .. start + width - 1, of which low .. high - 1 (offsets) are real."""

    node: Node
    start: int
    low: int
    high: int

    @property
    def tokens(self) -> np.ndarray:
        """Its real tokens, int32 [high - low]."""
        begin = self.start + self.low - self.node.start
        return self.node.tokens[begin : begin + self.high - self.low]


class Tree:
    """The nodes of all sequences, and the order to run them in: depth first, longest first."""

    def __init__(self, sequences: Sequence[Task], page: int, shortest: int = SHORTEST):
        """shortest: tokens of a context that is worth a cut of its own."""
        self.page, self.shortest = page, shortest
        self.root = Node(None, 0, np.zeros(0, np.int32), done=True)
        self.nodes = 0
        shared = _shared_contexts(sequences)
        for sequence in sequences:
            self._insert(sequence, shared)

    def _insert(self, sequence: Task, shared: set[bytes]) -> None:
        tokens, first, run = sequence.tokens, sequence.first, sequence.run
        cuts = {*range(self.page, run, self.page), run}
        if self.shortest <= first < run and tokens[:first].tobytes() in shared:
            cuts.add(first)
        node, begin = self.root, 0
        for end in sorted(cuts):
            piece = tokens[begin:end]
            key = piece.tobytes()
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, begin, piece)
                self.nodes += 1
            child.users += 1
            low = max(begin, first - 1)
            if low < end:
                child.wants.append((sequence, low, end))
            sequence.path.append(child)
            node, begin = child, end
        node.enders.append(sequence)

    def ordered(self) -> list[Task]:
        """Sequences depth first; of two branches the one with the longer sequence first."""
        order = list(self._depth_first())
        for node in reversed(order):  # children before parents
            own = max((s.run for s in node.enders), default=0)
            node.depth = max([own, *(c.depth for c in node.children.values())])
        out: list[Task] = []
        stack = [self.root]
        while stack:
            node = stack.pop()
            out += node.enders
            stack += sorted(node.children.values(), key=lambda c: c.depth)  # the last one is popped first
        return out

    def _depth_first(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


def _shared_contexts(sequences: Sequence[Task]) -> set[bytes]:
    """Contexts that more than one sequence continues."""
    seen: set[bytes] = set()
    shared: set[bytes] = set()
    for sequence in sequences:
        key = sequence.tokens[: sequence.first].tobytes()
        (shared if key in seen else seen).add(key)
    return shared


def pages_needed(length: int, page: int) -> int:
    """Most pages that a sequence of ``length`` run tokens can hold: its own and one copied at the end of a context."""
    return -(-length // page) + 1


class Schedule:
    """Hands out steps: rows whose earlier tokens have run, or run in the same step.

    pages: size of the pool. A sequence is admitted when all pages of its path are free, in depth-first order. So the
    pool can never be full of half-run sequences: when all admitted ones have ended, what remains in use lies on the
    path of the next one.
    """

    def __init__(self, tree: Tree, pages: int, rows: dict[int, int]):
        """rows: tile width -> rows of a step. Raises RequestError when a sequence cannot fit into the pool."""
        self.page, self.pages, self.rows = tree.page, pages, rows
        self.waiting = deque(tree.ordered())
        longest = max((s.run for s in self.waiting), default=0)
        if pages_needed(longest, self.page) > pages:
            raise RequestError(
                f"a sequence of {longest} tokens needs {pages_needed(longest, self.page)} pages of {self.page} tokens, "
                f"and there are {pages}; give the scorer a larger max_length"
            )
        self.free = list(range(pages - 1, -1, -1))
        self.queue: list[Node] = []
        self.context_tokens = self.tokens = 0

    def step(self) -> tuple[int, list[Row], list[tuple[int, int]]] | None:
        """Next step: (tile width, rows, page copies (from, to) to make before it), or None at the end."""
        self._admit()
        if not self.queue:
            return None
        widest = max(self.rows)
        width, taken = widest, self._fill(widest)
        for narrow in sorted(self.rows, reverse=True)[1:]:
            other = self._fill(narrow)
            # Narrow tiles fetch their keys more often; they must hold clearly more tokens.
            if _tokens(other) > 1.25 * _tokens(taken):
                width, taken = narrow, other
        rows, copies = [], []
        for node in taken:
            begin, end = node.start % self.page, node.start % self.page + len(node.tokens)
            if node.copies(self.page):
                copies.append((node.parent.page, node.page))
            for i in node.rows(self.page, width):
                low, high = max(begin - i * width, 0), min(end - i * width, width)
                rows.append(Row(node, node.start - begin + i * width, low, high))
        self._leave(taken)
        return width, rows, copies

    def _admit(self) -> None:
        most = 2 * max(self.rows.values())
        while self.waiting and len(self.queue) < most:
            fresh = [n for n in self.waiting[0].path if n.page is None]
            takes = [n for n in fresh if n.start % self.page == 0 or n.copies(self.page)]
            if len(takes) > len(self.free):
                if not self.queue:
                    raise AssertionError("the page pool is full of sequences that wait for each other")
                return
            task = self.waiting.popleft()
            for node in takes:
                node.page, node.owns = self.free.pop(), True
            table = np.zeros(self.pages, np.int32)
            for node in task.path:
                if node.page is None:
                    node.page = node.parent.page
                table[node.start // self.page] = node.page
            for node in fresh:
                node.table = table
            self.queue += fresh

    def _fill(self, width: int) -> list[Node]:
        """Nodes for one step of this tile width, in order."""
        room, taken, now = self.rows[width], [], set()
        for node in self.queue:
            need = len(node.rows(self.page, width))
            if need > room:
                break
            parent = node.parent
            if not (parent.done or (parent in now and not node.copies(self.page))):
                continue
            room -= need
            now.add(node)
            taken.append(node)
            if not room:
                break
        return taken

    def _leave(self, taken: list[Node]) -> None:
        gone = set(taken)
        self.queue = [n for n in self.queue if n not in gone]
        for node in taken:
            node.done = True
            self.tokens += len(node.tokens)
            self.context_tokens += _before_scores(node)
            for sequence in node.enders:
                self._end(sequence)

    def _end(self, sequence: Task) -> None:
        for node in sequence.path:
            node.users -= 1
            if not node.users and node.owns:
                # Later programs run after this step's, so the page may be handed out at once.
                self.free.append(node.page)
                node.owns = False


def _tokens(nodes: list[Node]) -> int:
    return sum(len(n.tokens) for n in nodes)


def _before_scores(node: Node) -> int:
    """How many of its tokens are context for everyone: no sequence has its first scored token there or earlier."""
    firsts = [s.first for s, _, _ in node.wants]
    return len(node.tokens) if not firsts else min(max(min(firsts) - node.start, 0), len(node.tokens))
