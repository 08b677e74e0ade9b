"""What a request is to the scheduler, and what a plan asks of the device. Pure data, no JAX."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterable, Sequence

from flint_jax.errors import RequestError
from flint_jax.prefix_cache import Node, Snapshot


def pack(ids: Sequence[int]) -> bytes:
    """Token ids as bytes, four each."""
    return array.array("i", ids).tobytes()


class Prompt(tuple):
    """Token ids 0 to ``rows`` - 1, checked and packed: who submits it need not look at each of them again.

    packed: the ids as bytes, four each.
    """

    rows: int
    packed: bytes

    @classmethod
    def of(cls, ids: Iterable[int], rows: int) -> Prompt:
        """Raises RequestError for an id outside [0, rows)."""
        ids = tuple(ids)
        if set(map(type, ids)) - {int}:
            ids = tuple(map(int, ids))
        if ids and not (max(ids) < rows and min(ids) >= 0):
            raise RequestError(
                f"the prompt holds token ids outside the vocabulary, 0 to {rows - 1}",
                param="prompt",
                code="invalid_value",
            )
        made = cls(ids)
        made.rows, made.packed = rows, pack(ids)
        return made


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence: a prompt, then what was generated and seen by the host.

    salt: requests share prefixes only with those of the same salt. reuse: whether it may take up cached prefixes.
    """

    id: str
    prompt: tuple[int, ...]
    limit: int  # most tokens in all, prompt included
    salt: str = ""
    reuse: bool = True
    output: list[int] = dataclasses.field(default_factory=list)
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0  # tokens in the cache or handed to prefill since the last admission
    target: int = 0  # tokens to prefill: all that were known at admission
    dispatched: int = 0  # tokens drawn or being drawn, as far as steps were dispatched
    ended: bool = False
    epoch: int = 0  # counts admissions: results of an earlier one are stale
    taken: int = 0  # tokens taken up from the cache at the last admission
    cached: int | None = None  # prompt tokens found in the cache at the first admission
    marks: list[int] = dataclasses.field(default_factory=list)  # where prefill is cut for a snapshot, last first
    branch: int = 0  # the mark at which its prompt leaves a known path
    leader: tuple[Request, int] | None = None  # what it waited for: another's prefill to reach this position
    lineage: list[Snapshot] = dataclasses.field(default_factory=list)  # snapshots it came from or left behind
    stale: int = 0  # its rings may hold tokens of another sequence up to this position
    trail: Node | None = None  # where its path in the prefix cache was last seen

    def __post_init__(self) -> None:
        self._prompt_bytes = self.prompt.packed if isinstance(self.prompt, Prompt) else pack(self.prompt)

    @property
    def known(self) -> int:
        """How many tokens there are."""
        return len(self.prompt) + len(self.output)

    @property
    def decoding(self) -> bool:
        """Prefill is fully dispatched."""
        return self.slot is not None and self.prefilled == self.target

    @property
    def pause(self) -> int:
        """Where its next piece of prefill ends at the latest: the next mark, else the end."""
        return self.marks[-1] if self.marks else self.target

    @property
    def exhausted(self) -> bool:
        """Every token it may have is dispatched."""
        return len(self.prompt) + self.dispatched >= self.limit

    def slice(self, start: int, stop: int) -> Sequence[int]:
        """Tokens of positions [start, stop)."""
        edge = len(self.prompt)
        return (*self.prompt[start:stop], *self.output[max(start - edge, 0) : max(stop - edge, 0)])

    def span(self, start: int, stop: int) -> bytes:
        """The same, four bytes each."""
        edge = len(self.prompt)
        head = self._prompt_bytes[4 * start : 4 * min(stop, edge)] if start < edge else b""
        if stop <= edge:
            return head
        return head + array.array("i", self.output[max(start - edge, 0) : stop - edge]).tobytes()


@dataclasses.dataclass(frozen=True)
class Admit:
    """The request gets its slot."""

    request: Request


@dataclasses.dataclass(frozen=True)
class Restore:
    """Copy snapshot ``index`` into the rings of ``slot``."""

    index: int
    slot: int


@dataclasses.dataclass(frozen=True)
class CopyPage:
    """Copy a page, before its copy is written to."""

    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens [start, start + count) of a request; final when it is the last piece of its prefill."""

    request: Request
    start: int
    count: int
    final: bool


@dataclasses.dataclass(frozen=True)
class Prefill:
    """One prefill step: pieces of different requests, those that are final first."""

    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Save:
    """Copy the rings of ``slot`` to snapshot ``index``."""

    slot: int
    index: int


Op = Admit | Restore | CopyPage | Prefill | Save


@dataclasses.dataclass(frozen=True)
class Plan:
    """One iteration: ``ops`` in order, at most one prefill step among them, then one decode step of the requests in
    ``decode``.

    moved: running requests whose pages changed, so that their block tables are to be sent before anything else.
    """

    ops: tuple[Op, ...]
    decode: tuple[Request, ...]
    preempted: tuple[Request, ...]
    moved: tuple[Request, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Its pieces of prefill."""
        return tuple(piece for op in self.ops if isinstance(op, Prefill) for piece in op.pieces)

    @property
    def admitted(self) -> tuple[Request, ...]:
        """Requests that got a slot."""
        return tuple(op.request for op in self.ops if isinstance(op, Admit))

    @property
    def empty(self) -> bool:
        """No step will come of it."""
        return not (self.decode or any(isinstance(op, Prefill) for op in self.ops))
