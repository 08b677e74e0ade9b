"""What ``/v1/responses`` said lately, for clients that refer to it by id instead of sending it again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

Item = dict[str, Any]

DEFAULT_LIMIT = 64 << 20
_OVERHEAD = 64  # characters that each string and each object count more


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    previous: str | None
    items: tuple[Item, ...]
    ids: tuple[str, ...]
    size: int


class ItemMemory:
    """Items of responses by id, and whole conversations by the id of their last response.

    limit: characters that are kept at most, roughly; what was used longest ago goes first. Belongs to the event loop.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT):
        self._limit, self._size = limit, 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by the response's id, what was used last at the end
        self._home: dict[str, tuple[str, Item]] = {}  # an item's id -> (the response that it is kept with, item)

    @property
    def size(self) -> int:
        """Characters that are kept now."""
        return self._size

    def keep(self, response_id: str, previous: str | None, given: Sequence[Item], said: Sequence[Item]) -> None:
        """Keep a response: the items it was given after those of ``previous``, and the items it said."""
        items = (*given, *said)
        size = _size(items)
        if size > self._limit:
            return
        ids = tuple(i["id"] for i in said)
        self._kept[response_id] = _Kept(previous, items, ids, size)
        self._home |= {i["id"]: (response_id, i) for i in said}
        self._size += size
        while self._size > self._limit:
            _, old = self._kept.popitem(last=False)
            self._size -= old.size
            for item_id in old.ids:
                del self._home[item_id]

    def item(self, item_id: str) -> Item | None:
        """An item that some response said, or None."""
        response_id, item = self._home.get(item_id, ("", None))
        if item is not None:
            self._kept.move_to_end(response_id)
        return item

    def conversation(self, response_id: str) -> list[Item] | None:
        """All items up to the end of a response, or None when it, or one that it went on from, is not kept."""
        chain: list[_Kept] = []
        at: str | None = response_id
        while at is not None:
            kept = self._kept.get(at)
            if kept is None:
                return None
            self._kept.move_to_end(at)
            chain.append(kept)
            at = kept.previous
        return [item for kept in reversed(chain) for item in kept.items]


def _size(value: Any) -> int:
    size, left = 0, [value]
    while left:  # no recursion: a request may nest as deeply as it likes
        at = left.pop()
        size += _OVERHEAD
        if isinstance(at, str):
            size += len(at)
        elif isinstance(at, dict):
            left += at.values()
            size += sum(map(len, at))
        elif isinstance(at, list | tuple):
            left += at
    return size
