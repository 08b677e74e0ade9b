"""The suite: which held-out items are asked, and the table of what came back."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from flint_jax.evals.item import HELD_OUT, Item
from flint_jax.evals.numbers import arithmetic, lists
from flint_jax.evals.recall import memory, record
from flint_jax.evals.talk import talk
from flint_jax.evals.tools import call, result

# Families by name: what makes an item. "look-up" is special: its length is set by distance.
FAMILIES: dict[str, Callable[[random.Random, str], Item]] = {
    "arithmetic": arithmetic,
    "lists": lists,
    "tools": call,
    "tool results": result,
    "memory": memory,
    "talk": talk,
}
LOOK_UP = "look-up"
NAMES = (*FAMILIES, LOOK_UP)
_LINE = 11.5  # tokens of a record's line, roughly, in a vocabulary that splits invented words


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a model answered. calls: (name, arguments). well_formed: see ``replies.well_formed``. thought: whether there
    was a thought before it."""

    content: str
    calls: list[tuple[str, object]]
    finish_reason: str
    well_formed: bool
    error: str | None = None
    thought: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table. asked_to_think, thought: items with thinking on, and how many of their replies had one."""

    family: str
    detail: str
    items: int
    right: int
    well_formed: int
    asked_to_think: int = 0
    thought: int = 0

    @property
    def accuracy(self) -> float:
        """Share of exact replies."""
        return self.right / self.items

    @property
    def format(self) -> float:
        """Share of well-formed replies."""
        return self.well_formed / self.items


def items(
    families: Sequence[str],
    count: int,
    *,
    seed: int = 0,
    distances: Sequence[int] = (128, 512, 1024, 2048, 3500),
    length: Callable[[Item], int] | None = None,
    split: str = HELD_OUT,
) -> list[Item]:
    """``count`` items of each family (of each distance for look-ups), the same for the same arguments.

    distances: about how many tokens lie between a fact and the question. length: counts an item's prompt tokens; given,
    records are made as long as the distance asks for in this model's own tokens.
    Raises ValueError for an unknown family.
    """
    unknown = sorted(set(families) - set(NAMES))
    if unknown:
        raise ValueError(f"unknown families {', '.join(unknown)}; there are {', '.join(NAMES)}")
    out = []
    for family in families:
        rng = random.Random(f"{seed} {family}")
        if family != LOOK_UP:
            out += [FAMILIES[family](rng, split) for _ in range(count)]
            continue
        for distance in distances:
            out += [_at_distance(rng, distance, length, split) for _ in range(count)]
    return out


def _at_distance(rng: random.Random, distance: int, length, split: str) -> Item:
    """A record whose asked line is one of its first, so that most of it lies between the fact and the question."""
    line = rng.randrange(3)
    lines = max(int(distance / _LINE), 4)
    seed = rng.random()
    item = record(random.Random(seed), split, lines, line=line)
    if length is not None:
        per_line = (length(item) - 40) / lines
        lines = max(int(distance / max(per_line, 1)), 4)
        item = record(random.Random(seed), split, lines, line=line)
    return dataclasses.replace(item, detail=f"{distance} tokens back")


_Marks = tuple[bool, bool, bool, bool]  # right, well-formed, asked to think, and did


def table(asked: Sequence[Item], replies: Sequence[Reply]) -> list[Row]:
    """Rows by family and detail, a total ("all") for each family with several details, in order of appearance."""
    groups: dict[str, dict[str, list[_Marks]]] = {}
    for item, reply in zip(asked, replies, strict=True):
        right = reply.error is None and item.right(reply.content, reply.calls)
        marks = (right, reply.well_formed, item.thinking, item.thinking and reply.thought)
        groups.setdefault(item.family, {}).setdefault(item.detail, []).append(marks)
    rows = []
    for family, details in groups.items():
        every = [x for marks in details.values() for x in marks]
        if len(details) > 1:
            rows.append(_row(family, "all", every))
        rows += [_row(family, detail, marks) for detail, marks in sorted(details.items(), key=_by_number)]
    return rows


def _by_number(pair):
    first = pair[0].split()[0]
    return (int(first) if first.isdigit() else 0, pair[0])


def _row(family: str, detail: str, marks: Sequence[_Marks]) -> Row:
    return Row(family, detail, len(marks), *map(sum, zip(*marks, strict=True)))
