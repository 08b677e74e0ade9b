"""``Scorer``: log-probabilities of given tokens, for many sequences at once.

The default packs a step from whatever sequences are at hand, in tiles of 64 or 16 positions, and shares every common
beginning. ``batch_invariant=True`` uses one tile width: then every product has one shape and a token meets its keys in
one order, so a sequence gets the same bits alone and in any company.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from tqdm import tqdm

from flint_jax.cache import PAGE, PAGES_PER_BLOCK
from flint_jax.errors import RequestError
from flint_jax.scoring import inputs, plan
from flint_jax.scoring.inputs import LanguageModel, default_prefix, encode, encode_pair
from flint_jax.scoring.programs import Pages, Programs, page_bytes, place
from flint_jax.scoring.rolling import check_overlap, windows

Item = tuple[np.ndarray, int]  # tokens int32 [n], index of the first one to score
WIDTHS = (64, 16)
AHEAD = 2  # steps dispatched before the results of the first are read


@dataclasses.dataclass(frozen=True)
class Score:
    """Scores of the T tokens of one continuation or text.

    logprobs: natural logarithm of each token's probability given everything before it, float32. greedy: whether the
    token is the likeliest one there. first: index of the first token that has a score (1 for a text that nothing
    precedes; its logprobs[0] is 0 and greedy[0] True). top_ids, top_logprobs: the likeliest k at each place.
    """

    logprobs: Float[np.ndarray, " T"]
    greedy: Bool[np.ndarray, " T"]
    top_ids: Int[np.ndarray, "T k"]
    top_logprobs: Float[np.ndarray, "T k"]
    first: int = 0

    @property
    def total(self) -> float:
        """Sum of the log-probabilities (added in float64); 0.0 of nothing."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have given exactly these tokens; True of nothing."""
        return bool(self.greedy.all())


@dataclasses.dataclass
class Stats:
    """Counters since the scorer was made.

    sequences: asked for. distinct: scored, after equal ones were merged. tokens: real tokens run through the model,
    context_tokens those of them before the first scored one. reused: tokens that did not run because an equal beginning
    had. scored: log-probabilities computed. steps, slots: model calls, and the token places in them. copies: pages
    copied where continuations part.
    """

    sequences: int = 0
    distinct: int = 0
    tokens: int = 0
    context_tokens: int = 0
    reused: int = 0
    scored: int = 0
    steps: int = 0
    slots: int = 0
    copies: int = 0


class Scorer:
    """Scores sequences with one model, in fixed shapes.

    tokens: places of a step, a multiple of 64; default 256 on the CPU, 4096 on a GPU. max_length: most tokens that the
    model reads at once, default its context; when given, the page pool is made for it now, else it grows when a longer
    sequence comes (and the programs compile again). batch_invariant: see above. top_k: how many of the likeliest tokens
    to give at each place. prefix: token put before an empty context; "auto" is the model's BOS, else its EOS; None
    refuses empty contexts. progress: show a bar for lists of more than one.

    Raises RequestError for numbers out of range.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        tokens: int | None = None,
        max_length: int | None = None,
        batch_invariant: bool = False,
        top_k: int = 0,
        prefix: int | str | None = "auto",
        progress: bool = False,
    ):
        config = lm.config
        if tokens is None:
            tokens = 256 if jax.default_backend() == "cpu" else 4096
        _check("tokens", tokens, PAGE, 1 << 20)
        if tokens % PAGE:
            raise RequestError(f"tokens = {tokens}: need a multiple of {PAGE}", param="tokens")
        if max_length is not None:
            _check("max_length", max_length, 1, lm.max_context)
        _check("top_k", top_k, 0, config.vocab_size)
        self.lm, self.config, self.progress, self.batch_invariant = lm, config, progress, batch_invariant
        self.max_length = lm.max_context if max_length is None else max_length
        self.prefix = default_prefix(lm) if isinstance(prefix, str) and prefix == "auto" else prefix
        if self.prefix is not None:
            _check("prefix", self.prefix, 0, config.vocab_size - 1)
        widths = WIDTHS[:1] if batch_invariant else WIDTHS
        where = place(lm._leaves())
        self.programs = Programs(lm._merge, config, tokens=tokens, widths=widths, top_k=top_k, sharding=where)
        self.top_k = top_k
        self.stats = Stats()
        self._lock = threading.Lock()
        self._pages: Pages | None = None
        self._pool = 0
        # Two steps' worth of sequences at once, and whole blocks of pages.
        self._least = max(4 * tokens // PAGE, plan.pages_needed(max_length, PAGE) if max_length else 0)

    # -- what callers use ------------------------------------------------------------------------------------------

    def score(self, pairs: Iterable[tuple[Sequence[int] | str, Sequence[int] | str]]) -> list[Score]:
        """Scores of continuations. pairs: (context, continuation), token ids as they are, or text (``encode_pair``).

        An empty context is replaced by the prefix token. Raises RequestError, naming the pair, when there is none, for
        ids outside the vocabulary, or when a pair is longer than ``max_length`` + 1 tokens (see ``score_long``).
        """
        items = [self.pair_item(*inputs.two(pair, f"pair {i}"), f"pair {i}") for i, pair in _listed(pairs)]
        return self.score_ids(items)

    def score_long(
        self, pairs: Iterable[tuple[Sequence[int] | str, Sequence[int] | str]], *, overlap: int = 1
    ) -> list[Score]:
        """``score`` for pairs of any length, read in windows of ``max_length`` tokens (see ``windows``)."""
        items = [self.pair_item(*inputs.two(pair, f"pair {i}"), f"pair {i}") for i, pair in _listed(pairs)]
        return self.score_ids(items, long=True, overlap=overlap)

    def score_texts(
        self, texts: Iterable[Sequence[int] | str], *, prefix: int | None = None, overlap: int = 1
    ) -> list[Score]:
        """Scores of whole texts, of any length: texts beyond ``max_length`` are read in windows.

        prefix: token put before each text, in place of what its tokenizer may put there; without it a text's first
        token has no score.
        """
        items = [self.text_item(text, prefix, f"text {i}") for i, text in _listed(texts)]
        return self.score_ids(items, long=True, overlap=overlap, name="text")

    def warm_up(self) -> float:
        """Compile everything that the present pool needs; nothing compiles after it while the pool holds. Seconds."""
        begin = time.monotonic()
        with self._lock:
            self._ensure(0)
            leaves = self.lm._leaves()
            for width, rows in self.programs.rows.items():
                idle = np.zeros((rows, 3 + width + self._pool), np.int32)
                self._pages, hidden = self.programs.run(leaves, self._pages, idle, width)
                found = self.programs.score(leaves, hidden, np.zeros(0, np.int32), np.zeros(0, np.int32))
            self._pages = self.programs.copy(self._pages, [(0, self._pool)])
            jax.block_until_ready((self._pages, found))
        return time.monotonic() - begin

    def score_ids(
        self, items: Sequence[Item], *, long: bool = False, overlap: int = 1, name: str = "pair"
    ) -> list[Score]:
        """Scores of items (tokens int32 [n], checked; index of the first one to score). Entries before index 1 are 0.

        Results hold n - index entries. overlap: see ``windows``.
        """
        check_overlap(overlap, self.max_length)
        tasks: dict[tuple[bytes, int], tuple[plan.Task, _Result]] = {}
        parts: list[list[tuple[plan.Task, _Result, int]]] = []  # per item: task, result, where its scores begin
        for i, (tokens, first) in enumerate(items):
            start = max(first, 1)
            if not long and (error := self.too_long((tokens, first), f"{name} {i}")) is not None:
                raise error
            found = []
            for window in windows(max(len(tokens), start), start, self.max_length, overlap):
                piece, at = tokens[window.begin : window.end], window.first - window.begin
                key = piece.tobytes(), at
                if key not in tasks:
                    tasks[key] = plan.Task(piece, at), _Result(len(piece) - at, self.top_k)
                found.append((*tasks[key], window.first - first))
            parts.append(found)
        with self._lock:
            self.stats.sequences += len(items)
            self._run_all(list(tasks.values()))
        return [
            self._join(len(tokens) - first, first, found) for (tokens, first), found in zip(items, parts, strict=True)
        ]

    # -- running ---------------------------------------------------------------------------------------------------

    def _run_all(self, tasks: list[tuple[plan.Task, _Result]]) -> None:
        if not tasks:
            return
        results = dict(tasks)
        self._ensure(max(task.run for task in results))
        tree = plan.Tree(list(results), PAGE)
        schedule = plan.Schedule(tree, self._pool, self.programs.rows)
        leaves = self.lm._leaves()
        pending: collections.deque = collections.deque()
        before = self.stats.tokens
        try:
            with tqdm(total=len(tasks), desc="score", unit="seq", disable=not self.progress or len(tasks) < 2) as bar:
                while (step := schedule.step()) is not None:
                    pending.append(self._dispatch(leaves, results, *step))
                    if len(pending) > AHEAD:
                        bar.update(self._fetch(*pending.popleft()))
                while pending:
                    bar.update(self._fetch(*pending.popleft()))
        except BaseException:
            self._pages, self._pool = None, 0  # a failed step may have taken the donated pool with it
            raise
        self.stats.distinct += len(tasks)
        self.stats.tokens += schedule.tokens
        self.stats.context_tokens += schedule.context_tokens
        self.stats.reused += sum(task.run for task in results) - (self.stats.tokens - before)

    def _dispatch(self, leaves, results, width: int, rows: list[plan.Row], copies):
        """Start one step on the device; (device results, where they go)."""
        if copies:
            self._pages = self.programs.copy(self._pages, copies)
        packed = np.zeros((self.programs.rows[width], 3 + width + self._pool), np.int32)
        where, target, sinks = [], [], []
        for r, row in enumerate(rows):
            packed[r, :3] = row.start, row.low, row.high
            packed[r, 3 + row.low : 3 + row.high] = row.tokens
            packed[r, 3 + width :] = row.node.table
            packed[r, 3 + width + row.start // PAGE] = row.node.page
            for task, low, high in row.node.wants:
                low, high = max(low, row.start + row.low), min(high, row.start + row.high)
                if low < high:
                    where.append(np.arange(low, high, dtype=np.int32) - row.start + r * width)
                    target.append(task.tokens[low + 1 : high + 1])
                    sinks.append((results[task], low + 1 - task.first, high - low))
        self._pages, hidden = self.programs.run(leaves, self._pages, packed, width)
        found = []
        if where:
            where, target = np.concatenate(where), np.concatenate(target)
            for begin in range(0, len(where), self.programs.positions):
                part = slice(begin, begin + self.programs.positions)
                found.append(self.programs.score(leaves, hidden, where[part], target[part]))
            self.stats.scored += len(where)
        for array in jax.tree.leaves(found):
            array.copy_to_host_async()
        self.stats.steps += 1
        self.stats.slots += self.programs.tokens
        self.stats.copies += len(copies)
        return found, sinks

    @staticmethod
    def _fetch(found: list, sinks: list[tuple[_Result, int, int]]) -> int:
        """Read one step's results; how many sequences they completed."""
        if not sinks:
            return 0
        columns = [np.concatenate([np.asarray(x) for x in column]) for column in zip(*found, strict=True)]
        at = complete = 0
        for result, begin, count in sinks:
            for own, column in zip(result.columns, columns, strict=True):
                own[begin : begin + count] = column[at : at + count]
            at += count
            result.missing -= count
            complete += not result.missing
        return complete

    def _join(self, length: int, first: int, found: list) -> Score:
        out = _Result(length, self.top_k)
        for _, result, begin in found:
            for own, column in zip(out.columns, result.columns, strict=True):
                own[begin : begin + len(column)] = column
        logprobs, greedy, ids, values = out.columns
        return Score(logprobs, greedy, ids, values, first=int(first == 0 and length > 0))

    # -- the page pool ---------------------------------------------------------------------------------------------

    def _ensure(self, run: int) -> None:
        """Have a pool for sequences of ``run`` tokens: a power of two of pages, so that growing is rare."""
        need = max(self._least, plan.pages_needed(run, PAGE), PAGES_PER_BLOCK)
        if need <= self._pool:
            return
        pages = 1 << (need - 1).bit_length()
        itemsize = jnp.dtype(self.lm.model.numerics.dtype).itemsize
        size = pages * page_bytes(self.config, itemsize)
        self._pages, self._pool = None, 0
        where = self.programs.sharding
        free = _free_bytes(where.device_set if where else jax.devices()[:1])
        if free is not None and size > free:
            raise RequestError(
                f"a page pool of {size / 2**30:.1f} GiB for sequences of {run} tokens does not fit: {free / 2**30:.1f} "
                "GiB are free on the device. Give the scorer a smaller max_length (longer texts are read in windows)."
            )
        self._pages = Pages.create(self.config, pages, self.lm.model.numerics.dtype, where)
        self._pool = pages

    # -- input -----------------------------------------------------------------------------------------------------

    def pair_item(self, context: Sequence[int] | str, continuation: Sequence[int] | str, name: str) -> Item:
        """A pair for ``score_ids``; ``name`` stands for it in errors. Raises RequestError (see ``score``)."""
        try:
            context, continuation = encode_pair(self.lm, context, continuation)
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from None
        context = self.check_ids(context, f"the context of {name}")
        continuation = self.check_ids(continuation, f"the continuation of {name}")
        if not len(context) and len(continuation):
            if self.prefix is None:
                raise RequestError(
                    f"the context of {name} is empty, so nothing predicts its first token, and no prefix token stands "
                    "in (this model names no BOS and no EOS, or prefix=None was given). Give prefix=TOKEN_ID, or score "
                    "it as a text."
                )
            context = self.check_ids([self.prefix], "prefix")
        return np.concatenate([context, continuation]), len(context)

    def text_item(self, text: Sequence[int] | str, prefix: int | None, name: str) -> Item:
        """A text for ``score_ids``, behind ``prefix`` if there is one: then without the tokenizer's own BOS."""
        ids = self.check_ids(encode(self.lm, text, special=prefix is None), name)
        if prefix is None:
            return ids, 0
        return np.concatenate([self.check_ids([prefix], "prefix"), ids]), 1

    def too_long(self, item: Item, name: str) -> RequestError | None:
        """What is wrong with an item that is read without windows."""
        tokens, first = item
        if len(tokens) <= self.max_length + 1 or len(tokens) <= first:
            return None
        return RequestError(
            f"This scorer's maximum context length is {self.max_length} tokens. However, {name} has {len(tokens)} "
            f"tokens ({first} of context). Shorten it, or let it be read in windows (score_long, --long).",
            code="context_length_exceeded",
        )

    def check_ids(self, ids: Sequence[int], what: str) -> np.ndarray:
        """``ids`` as int32 [n]; ``what`` names them in the RequestError for ids that are none."""
        return inputs.check_ids(ids, self.config.vocab_size, what)


class _Result:
    """Where the scores of one task gather. columns: as in ``Score``."""

    def __init__(self, length: int, top_k: int):
        self.missing = length
        self.columns = (
            np.zeros(length, np.float32),
            np.ones(length, np.bool_),
            np.zeros((length, top_k), np.int32),
            np.zeros((length, top_k), np.float32),
        )


def _listed(many: Iterable) -> Iterable[tuple[int, Any]]:
    """Numbered. One text alone would be taken for a list of its characters."""
    if isinstance(many, str | bytes | Mapping) or not isinstance(many, Iterable):
        raise RequestError(f"need a list of texts or of (context, continuation) pairs, got {many!r:.60}")
    return enumerate(many)


def _check(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} = {value!r}: need a whole number from {low} to {high}", param=name)


def _free_bytes(devices: Iterable[jax.Device]) -> int | None:
    """Of the fullest device; None where nothing is known (CPU)."""
    stats = [device.memory_stats() for device in devices]
    return min((s["bytes_limit"] - s["bytes_in_use"] for s in stats if s), default=None)
