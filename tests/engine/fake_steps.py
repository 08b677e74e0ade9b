"""Steps without a model: pages and rings hold token ids, and what is drawn depends on every id that is read back.

The next token is a hash of all ids found through the block table, and of the window's ids found in the ring. So one
wrong page, one stale ring place, one copy too few, and a request's output differs from ``reply``.
"""

from __future__ import annotations

import dataclasses
import types
import zlib
from collections.abc import Sequence

import numpy as np

from flint_jax.cache import PAGE, ring_size
from flint_jax.step import Sizes

VOCABULARY = 500


class Drawn(np.ndarray):
    """An array that can be asked to come to the host."""

    def copy_to_host_async(self) -> None:
        pass


def next_token(ids: Sequence[int], window: int) -> int:
    """What follows ``ids``."""
    return _draw(np.asarray(ids, np.int64), np.asarray(ids[-window:], np.int64))


def reply(prompt: Sequence[int], count: int, window: int) -> list[int]:
    """The ``count`` tokens that follow a prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, window))
    return ids[len(prompt) :]


def _draw(history: np.ndarray, window: np.ndarray) -> int:
    return zlib.crc32(window.tobytes(), zlib.crc32(history.tobytes())) % VOCABULARY


@dataclasses.dataclass
class _Slot:
    limit: int = 0
    stops: frozenset[int] = frozenset()
    token: int = 0
    position: int = 0
    active: bool = False


class FakeSteps:
    """The interface of flint_jax.step.Steps. log: what was called, in order. poison: slots whose next draw is NaN."""

    packed = True
    tile = 1

    def __init__(self, sizes: Sizes, *, window: int = 33, page: int = PAGE, ring: int | None = None):
        self.sizes, self.window, self.page = sizes, window, page
        self.ring = ring or ring_size(window)
        self.config = types.SimpleNamespace(sliding_window=window, vocab_size=VOCABULARY)
        self.tables = np.zeros((sizes.slots, -(-sizes.max_context // page)), np.int32)
        self.pages = np.full((sizes.pages, page), -1, np.int64)
        self.rings = np.full((sizes.slots, self.ring), -1, np.int64)
        self.snapshots = np.full((max(sizes.snapshots, 1), self.ring), -1, np.int64)
        self.slots = [_Slot() for _ in range(sizes.slots)]
        self.log: list[tuple] = []
        self.poison: set[int] = set()
        self.pieces: list[tuple] = []  # of the last prefill step: (row, tokens, slot, start, final)

    # -- what the engine calls -------------------------------------------------------------------------------------

    def set_table(self, slot: int, row) -> None:
        self.tables[slot] = row

    def admit(self, slot: int, row, limit: int) -> None:
        stops = frozenset(int(t) for t in row.wholes[3:] if t >= 0) if row is not None else frozenset()
        self.slots[slot] = _Slot(limit, stops)
        self.log.append(("admit", slot))

    def release(self, slot: int) -> None:
        self.slots[slot].active = False

    def save(self, slot: int, index: int) -> None:
        self.snapshots[index] = self.rings[slot]
        self.log.append(("save", slot, index))

    def restore(self, index: int, slot: int) -> None:
        self.rings[slot] = self.snapshots[index]
        self.log.append(("restore", index, slot))

    def copy_page(self, source: int, target: int) -> None:
        self.pages[target] = self.pages[source]
        self.log.append(("copy", source, target))

    def prefill(self, pieces):
        assert 0 < len(pieces) <= self.sizes.rows_per_prefill
        assert len({slot for _, slot, _, _ in pieces}) == len(pieces)
        assert 0 < sum(len(tokens) for tokens, *_ in pieces) <= self.sizes.chunks[-1]
        self.log.append(("step", len(pieces)))
        self.pieces = [(row, *piece) for row, piece in enumerate(pieces)]
        drawn = [self._prefill(*piece) for piece in pieces]
        drawn += [-2] * (self.sizes.rows_per_prefill - len(drawn))
        return np.array(drawn).view(Drawn), None

    def _prefill(self, tokens, slot: int, start: int, final: bool) -> int:
        assert len(tokens) > 0
        before = np.arange(max(start - self.window + 1, 0), start)
        kept, paged = self.rings[slot, before % self.ring], self.read(slot, start)[before]
        np.testing.assert_array_equal(kept, paged, err_msg="the ring holds another window than the pages")
        self.log.append(("prefill", slot, start, len(tokens), final))
        for position, token in enumerate(tokens, start):
            self._write(slot, position, token)
        state = self.slots[slot]
        drawn = self._next(slot, start + len(tokens)) if final else -2
        if final:
            self._commit(state, drawn, start + len(tokens))
        return drawn

    def decode(self, slots: Sequence[int], fast: bool = False):
        assert len(set(slots)) == len(slots) <= self.sizes.batches[-1]
        out = []
        for slot in slots:
            state = self.slots[slot]
            if state.active:
                self._write(slot, state.position, state.token)
                self._commit(state, self._next(slot, state.position + 1), state.position + 1)
            out.append(state.token)
        self.log.append(("decode", *slots))
        return np.array(out).view(Drawn), None

    # -- inside ----------------------------------------------------------------------------------------------------

    def read(self, slot: int, count: int) -> np.ndarray:
        """The first ``count`` token ids of a slot, by its block table."""
        positions = np.arange(count)
        return self.pages[self.tables[slot, positions // self.page], positions % self.page]

    def _write(self, slot: int, position: int, token: int) -> None:
        self.pages[self.tables[slot, position // self.page], position % self.page] = token
        self.rings[slot, position % self.ring] = token

    def _next(self, slot: int, count: int) -> int:
        if slot in self.poison:
            self.poison.discard(slot)
            return -1
        last = np.arange(max(count - self.window, 0), count)
        return _draw(self.read(slot, count), self.rings[slot, last % self.ring])

    def _commit(self, state: _Slot, token: int, position: int) -> None:
        state.token, state.position = token, position
        state.active = not (token in state.stops or position >= state.limit or token < 0)
