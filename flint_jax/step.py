"""The compiled steps: prefill a chunk of one slot, decode one token of many slots. Where we jit and donate.

Everything a request needs from step to step lives on the device in ``State``, which every step takes donated and gives
back: KV cache, last token, position, sampling state, whether the slot still runs. A step never raises and never waits
for the host; a slot that reached its end on the device becomes inert, so the host may read tokens one step late.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from flint_jax import decode, executables, prompt_scores, redraw, sampling, sampling_params, snapshots
from flint_jax.cache import CachedAttention, KVCache, table_width
from flint_jax.errors import ConfigError
from flint_jax.model import Flint
from flint_jax.packed import PackedAttention
from flint_jax.sampling import SlotRow, SlotSampling
from pallas_kernels import device, emit
from pallas_kernels.flash_attention import TILE, Pieces
from pallas_kernels.sample.shapes import PROGRESS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Device state of S slots. progress: columns ``PROGRESS``, one array because a step's host cost is per leaf and a
    kernel moves a slot on by one store; read as ``state.token`` and so on, int32/bool [S]. token: drawn but not yet in
    the cache; position: where it belongs; limit: position at which a slot ends (its token there is drawn, nothing
    after it); active: whether it runs. exchange: see ``decode``.
    """

    cache: KVCache
    sampling: SlotSampling
    progress: Int[Array, "S 4"]
    exchange: Int[Array, " W"]

    @classmethod
    def create(cls, model: Flint, slots: int, pages: int) -> State:
        """Empty slots."""
        return cls(
            cache=KVCache.create(model.config, slots, pages, model.numerics.dtype),
            sampling=SlotSampling.empty(slots, model.config.vocab_size),
            progress=jnp.zeros((slots, len(PROGRESS)), jnp.int32),
            exchange=decode.new_exchange(model.config),
        )

    token = property(lambda self: self._column("token"))
    position = property(lambda self: self._column("position"))
    limit = property(lambda self: self._column("limit"))
    active = property(lambda self: self._column("active") > 0)

    def _column(self, name: str) -> Int[Array, " S"]:
        return self.progress[:, PROGRESS.index(name)]

    def put(self, slots, **columns) -> State:
        """The state with columns of ``progress`` replaced in ``slots`` (an index of it); out of range is dropped."""
        progress = self.progress
        for name, value in columns.items():
            value = jnp.asarray(value).astype(jnp.int32)
            progress = progress.at[slots, PROGRESS.index(name)].set(value, mode="drop")
        return dataclasses.replace(self, progress=progress)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is compiled ahead: batch sizes of decode, chunk lengths of prefill, both ascending.

    snapshots: rings that the prefix cache can keep; 0 means that there is no prefix cache. rows_per_prefill: most
    pieces of one prefill step.
    """

    slots: int
    pages: int
    max_context: int
    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    snapshots: int = 0
    rows_per_prefill: int = 8

    def batch(self, rows: int) -> int:
        """Smallest compiled batch for ``rows`` rows."""
        return next(b for b in self.batches if b >= rows)

    def chunk(self, tokens: int) -> int:
        """Smallest compiled chunk for ``tokens`` tokens (the largest chunk when there are more)."""
        return next((c for c in self.chunks if c >= tokens), self.chunks[-1])


def _prefill(weights, state: State, tables, tokens, slot, start, count, final, *, merge):
    """One chunk of one slot. tokens [T]; slot, start, count int32 []; final: draw the token after it and go live."""
    model: Flint = merge(weights)
    kv = CachedAttention(
        model.config, model.numerics, state.cache, tables, slot[None], start[None], count[None], tokens.shape[0]
    )
    hidden = model.hidden(tokens[None], kv)
    logits = model.logits(jax.lax.dynamic_index_in_dim(hidden, count - 1, 1, keepdims=False))
    rows = state.sampling.gather(slot[None])
    position = start + count
    token = sampling.sample(logits, rows, position[None])
    state = dataclasses.replace(state, cache=kv.cache)
    slots = jnp.where(final, slot, state.token.shape[0])[None]
    return _commit(state, rows, slots, token, position[None], jnp.ones((1,), bool)), token, logits, hidden[0]


def _prefill_packed(weights, state: State, tables, tokens, rows, *, merge):
    """Pieces of several requests at once. tokens int32 [T], pieces back to back, each from a multiple of 16. rows int32
    [R, 5]: place, slot, start, count, final (draw the token after the piece and go live); a count of 0 is no piece.

    (state, drawn tokens [R], logits [R, V], hidden states [T, D]).
    """
    model: Flint = merge(weights)
    place, slot, start, count, final = rows.T
    total = state.token.shape[0]
    pieces = Pieces(jnp.where(count > 0, place, tokens.shape[0]), jnp.clip(slot, 0, total - 1), start, count)
    kv = PackedAttention(model.config, state.cache, tables, pieces, tokens.shape[0])
    hidden = model.hidden(tokens[None], kv)[0]
    logits = model.logits(hidden.at[place + count - 1].get(mode="clip"))
    sampled = state.sampling.gather(jnp.clip(slot, 0, total - 1))
    position = start + count
    token = sampling.sample(logits, sampled, position)
    state = dataclasses.replace(state, cache=kv.cache)
    slots = jnp.where((final > 0) & (count > 0), slot, total)
    return _commit(state, sampled, slots, token, position, count > 0), token, logits, hidden


def _decode(weights, state: State, scratch, tables, slots, *, merge, fast=False):
    """One token of each row. slots int32 [B], distinct; out of range makes a padding row.

    scratch: float32 [B, V], donated; the logits take its place. A buffer that moved from step to step would have XLA
    update the captured graph of 300 kernels on the host every time.
    fast: every row's sampling is within ``sampling_params.fast_path`` (only with kernels).
    """
    model: Flint = merge(weights)
    total = state.token.shape[0]
    known = slots < total
    safe = jnp.where(known, slots, 0)
    live = known & state.active[safe]
    start = state.position[safe]
    tokens = jnp.maximum(state.token[safe], 0)
    if decode.supported(model):
        logits, tile_max, cache, exchange = decode.forward(
            model, state.cache, state.exchange, tables, tokens, slots, start, live
        )
    else:
        kv = CachedAttention(model.config, model.numerics, state.cache, tables, slots, start, live.astype(jnp.int32), 1)
        logits, tile_max = model.logits(model.hidden(tokens[:, None], kv)[:, 0]), None
        cache, exchange = kv.cache, state.exchange
    if fast:
        moved, progress = sampling.advance(state.sampling, logits, tile_max, slots, state.progress)
        state = dataclasses.replace(state, sampling=moved, progress=progress)
    else:
        rows = state.sampling.gather(safe)
        state = _commit(state, rows, slots, sampling.sample(logits, rows, start + 1), start + 1, live)
    state = dataclasses.replace(state, cache=cache, exchange=exchange)
    return state, logits.reshape(scratch.shape)


def _stack(tokens, logits):
    """The tokens and logits of several pieces in one array each."""
    return jnp.concatenate(tokens), jnp.concatenate(logits)


def _score(weights, hidden, targets, *, merge):
    return prompt_scores.score(merge(weights), hidden, targets, k=sampling_params.MAX_LOGPROBS)


def _peek(progress, slots):
    """Last drawn token of each row, in a buffer of its own: the host reads it while the next step runs."""
    return progress[:, PROGRESS.index("token")].at[slots].get(mode="clip")


def _commit(state: State, rows: SlotSampling, slots, token, position, live) -> State:
    """Write the drawn tokens back. A row ends on a stop id, at its limit, or when nothing could be drawn (-1)."""
    total = state.token.shape[0]
    slots = jnp.where(live, slots, total)
    done = sampling.stopped(rows, token) | (position >= state.limit.at[slots].get(mode="clip")) | (token < 0)
    moved = sampling.update(state.sampling, slots, token, live & (slots < total))
    return dataclasses.replace(state, sampling=moved).put(slots, token=token, position=position, active=~done)


def _admit(state: State, slot, row: SlotRow, limit) -> State:
    admitted = dataclasses.replace(state, sampling=sampling.admit(state.sampling, slot, row))
    return admitted.put(slot, limit=limit, active=False)


def _release(state: State, slot) -> State:
    return state.put(slot, active=False)


def _set_table(tables, slot, row):
    return tables.at[slot].set(row)


# XLA recomputes instructions when it takes arguments and results for more than 80 % of the GPU, and it counts a donated
# argument twice: with a large pool always. There is nothing to win in a step that is written in place.
# Triton products are no faster than cuBLAS here, and trying them out is most of the time that a prefill step compiles.
OPTIONS = {"xla_disable_hlo_passes": "rematerialization", "xla_gpu_enable_triton_gemm": False}
ON_STATE = ("prefill", "decode", "fast", "admit", "release", "copy page")  # programs whose shapes depend on the pages


class Steps:
    """The compiled steps of one model, and the device state they pass along. After ``compile()`` nothing compiles.
    Results are device arrays: reading them waits.

    With ``allocate=False`` nothing is put on the device, and the model's weights may be shapes: ``build`` compiles,
    ``resize`` changes the number of pages, and then ``use`` and ``allocate`` make it ready to run (``fit`` does this).
    packed: whether all pieces of a prefill step run in one program, or each in its own.
    """

    def __init__(self, model: Flint, sizes: Sizes, allocate: bool = True):
        self.model, self.sizes = model, sizes
        self.config = model.config
        graph, state = nnx.split(model)
        # A flat tuple of stacks: the host pays per leaf and for every Python container on each call.
        leaves, structure = jax.tree.flatten(state)
        self.weights, self._structure = tuple(leaves), structure

        def merge(weights):
            return nnx.merge(graph, jax.tree.unflatten(structure, weights))

        self.packed = decode.supported(model)
        self._prefill = jax.jit(_bind(_prefill_packed if self.packed else _prefill, merge), donate_argnums=1)
        # With kernels there is a second decode step that samples without sorting the vocabulary.
        self.kernels = decode.supported(model)
        self._decode = {
            fast: jax.jit(_bind(_decode, merge, fast=fast), donate_argnums=(1, 2), keep_unused=True)
            for fast in ((False, True) if self.kernels else (False,))
        }
        self._peek = jax.jit(_peek)
        self._scratch: dict[int, Array] = {}
        self._rows: dict[tuple[int, ...], Array] = {}
        self._admit = jax.jit(_admit, donate_argnums=0)
        self._release = jax.jit(_release, donate_argnums=0)
        self._set_table = jax.jit(_set_table, donate_argnums=0)
        self._save = jax.jit(snapshots.save, donate_argnums=0)
        self._restore = jax.jit(snapshots.restore, donate_argnums=(0, 1))
        self._copy_page = jax.jit(snapshots.copy_page, donate_argnums=(0, 1))
        self._redraw = {
            fast: jax.jit(functools.partial(redraw.redrawn, fast=fast), donate_argnums=(0, 1))
            for fast in ((False, True) if self.kernels else (False,))
        }
        self._score = jax.jit(_bind(_score, merge))
        self._stack = jax.jit(_stack)
        self._hidden: list[tuple[Array, slice]] = []  # of the pieces prefilled last
        self._logprobs = jax.jit(functools.partial(sampling.logprobs, k=sampling_params.MAX_LOGPROBS))
        self._compiled: dict[tuple, Callable] = {}
        # Shapes until ``allocate``. The snapshots are apart from the state: no decode step has to carry them.
        self.state, self.tables, self.snapshots = jax.eval_shape(self._empty)
        if allocate:
            self.allocate()

    def _empty(self) -> tuple[State, Array, snapshots.Snapshots]:
        s = self.sizes
        # The pools first: what loading left in pieces is enough for the rest.
        state = State.create(self.model, s.slots, s.pages)
        tables = jnp.zeros((s.slots, table_width(s.max_context)), jnp.int32)
        return state, tables, snapshots.Snapshots.create(self.config, s.snapshots, self.model.numerics.dtype)

    def allocate(self) -> None:
        """Put the empty state, tables and snapshots on the device."""
        self.state, self.tables, self.snapshots = self._empty()

    def use(self, model: Flint) -> None:
        """Take the weights of ``model``; ValueError for other shapes than those that the steps were made with."""
        leaves = tuple(jax.tree.leaves(nnx.split(model)[1]))
        for known, new in zip(self.weights, leaves, strict=True):
            if (known.shape, known.dtype) != (new.shape, new.dtype):
                raise ValueError(f"compiled for a weight {known.dtype} {known.shape}, got {new.dtype} {new.shape}")
        self.model, self.weights = model, leaves

    def resize(self, sizes: Sizes) -> None:
        """Before ``allocate``: other pages, another context; programs that depend on them are dropped."""
        self.sizes = sizes
        self.state, self.tables, self.snapshots = jax.eval_shape(self._empty)
        self._compiled = {key: run for key, run in self._compiled.items() if key[0] not in (*ON_STATE, "table")}

    @property
    def programs(self) -> dict[tuple[str, int], Callable]:
        """What was compiled, by kind and size."""
        return dict(self._compiled)

    def set_weights(self, model: Flint) -> None:
        """Go on with the present weights of ``model``; nothing compiles. Raises ConfigError when they are of other
        kinds, shapes, dtypes or places than those that the programs were made for."""
        leaves, structure = jax.tree.flatten(nnx.state(model))
        if structure != self._structure:
            raise ConfigError(
                "the model's matrices are of other kinds than the engine was made for; make another engine"
            )
        for old, new in zip(self.weights, leaves, strict=True):
            if old is new:
                continue
            have, need = ((a.shape, a.dtype, a.sharding.device_set) for a in (new, old))
            if have != need:
                raise ConfigError(f"a weight is {have}, and the engine was made for {need}; make another engine")
        self.weights = tuple(leaves)

    def lower_decode(self, batch: int, fast: bool = False) -> jax.stages.Lowered:
        """The decode step of one bucket, for compiling ahead and for tests that read the compiled program."""
        logits = jax.ShapeDtypeStruct((batch, self.config.vocab_size), jnp.float32)
        rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
        return self._decode[fast].lower(self.weights, self.state, logits, self.tables, rows)

    def lower_prefill(self, chunk: int) -> jax.stages.Lowered:
        """The prefill step of one bucket."""
        zero = jax.ShapeDtypeStruct((), jnp.int32)
        tokens = jax.ShapeDtypeStruct((chunk,), jnp.int32)
        if self.packed:
            rows = jax.ShapeDtypeStruct((self.sizes.rows_per_prefill, 5), jnp.int32)
            return self._prefill.lower(self.weights, self.state, self.tables, tokens, rows)
        final = jax.ShapeDtypeStruct((), bool)
        return self._prefill.lower(self.weights, self.state, self.tables, tokens, zero, zero, zero, final)

    def compile(self, progress: Callable[[str, int, int], None] | None = None) -> float:
        """Compile everything ahead and run it once; seconds taken. ``progress``: see ``build``."""
        begin = time.monotonic()
        self.build(progress)
        self.warm_up()
        return time.monotonic() - begin

    def build(self, progress: Callable[[str, int, int], None] | None = None) -> dict[str, float]:
        """Compile what is not compiled yet; ``progress(what, done, total)`` hears of each program.

        Returns seconds: "wall" on the clock, "lower" and "compile" summed over programs (several run at a time).
        """
        begin, spent = time.monotonic(), {"lower": 0.0, "compile": 0.0}
        lower = {key: make for key, make in self._programs().items() if key not in self._compiled}
        options = OPTIONS if jax.default_backend() == "gpu" else None

        kept = executables.kept(self._identity(options)) if lower else None
        # One at a time: lowering holds Python's lock. With eight threads waiting for it, whoever reads weights beside
        # them gets his turn late (23 GB were seen to take 43 s instead of 13).
        turn = threading.Lock()

        def one(key: tuple[str, int], make: Callable[[], jax.stages.Lowered]):
            start = time.monotonic()
            name = "-".join(map(str, key)).replace(" ", "-")
            if kept is not None and (found := kept.load(name)) is not None:
                return found, 0.0, time.monotonic() - start
            with turn:
                lowered = make()
            middle = time.monotonic()
            compiled = lowered.compile(compiler_options=options)
            if kept is not None:
                kept.save(name, compiled)
            return compiled, middle - start, time.monotonic() - middle

        # XLA compiles outside Python's lock, so programs are compiled side by side; the large ones first.
        with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
            jobs = {pool.submit(one, key, make): key for key, make in lower.items()}
            try:
                for done, job in enumerate(concurrent.futures.as_completed(jobs), start=1):
                    self._compiled[jobs[job]], lowering, compiling = job.result()
                    spent["lower"] += lowering
                    spent["compile"] += compiling
                    if progress is not None:
                        progress(" ".join(map(str, jobs[job])), done, len(jobs))
            except BaseException:  # one failed, or nobody wants them any more: begin no other
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if kept is not None:
            kept.used()
        return {"wall": time.monotonic() - begin, **spent}

    def _identity(self, options) -> str:
        """All that the programs depend on, as text."""
        model = self.model
        weights = [(leaf.shape, str(leaf.dtype)) for leaf in self.weights]
        devices = sorted({str(d) for leaf in self.weights for d in getattr(leaf, "devices", set)()})
        facts = (model.config, model.numerics, self.sizes, weights, str(self._structure))
        return repr((*facts, devices, options, device.current(), sorted(emit.OFF)))

    def _programs(self) -> dict[tuple[str, int], Callable[[], jax.stages.Lowered]]:
        """How to lower each program, the slowest to compile first."""
        row = sampling.slot_row(sampling_params.SamplingParams(temperature=0.0), (0,), self.config.vocab_size, (), 0)
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        both = {self.sizes.rows_per_prefill, *self.sizes.batches}  # rows of prefill's results, and of decode's
        lower = {
            **{("prefill", c): functools.partial(self.lower_prefill, c) for c in reversed(self.sizes.chunks)},
            **{("decode", b): functools.partial(self.lower_decode, b) for b in self.sizes.batches},
            **{("fast", b): functools.partial(self.lower_decode, b, True) for b in self.sizes.batches if self.kernels},
            **{("peek", b): functools.partial(self._lower_peek, b) for b in self.sizes.batches},
            **{("logprobs", b): functools.partial(self._lower_logprobs, b) for b in both},
            **{("redraw", b): functools.partial(self._lower_redraw, b, False) for b in both},
            **{("refast", b): functools.partial(self._lower_redraw, b, True) for b in both if self.kernels},
            **({} if self.packed else {("stack", 0): self._lower_stack}),
            **{("score", c): functools.partial(self._lower_score, c) for c in self.sizes.chunks},
            ("admit", 0): lambda: self._admit.lower(self.state, slot, row, slot),
            ("release", 0): lambda: self._release.lower(self.state, slot),
            ("table", 0): lambda: self._set_table.lower(
                self.tables, slot, jax.ShapeDtypeStruct(self.tables.shape[1:], jnp.int32)
            ),
        }
        if self.sizes.snapshots:
            cache = self.state.cache
            rings, pages = (cache.k_ring, cache.v_ring), (cache.k_pages, cache.v_pages)
            lower |= {
                ("save", 0): lambda: self._save.lower(self.snapshots, *rings, slot, slot),
                ("restore", 0): lambda: self._restore.lower(*rings, self.snapshots, slot, slot),
                ("copy page", 0): lambda: self._copy_page.lower(*pages, slot, slot),
            }
        return lower

    def warm_up(self) -> None:
        """Run the large programs once on nothing but padding: the first run of each takes 20 to 50 ms longer."""
        for size in self.sizes.batches:
            for fast in (False, True) if self.kernels else (False,):
                self._decode_rows(self._padded_rows((), size), size, fast)
        for chunk in self.sizes.chunks:
            if self.packed:
                self._run_packed(np.zeros(chunk, np.int32), np.zeros((self.sizes.rows_per_prefill, 5), np.int32))
            else:
                self._prefill_piece(np.zeros(chunk, np.int32), 0, slot=0, start=0, final=False)
        jax.block_until_ready(self.state)

    def _lower_peek(self, batch: int) -> jax.stages.Lowered:
        return self._peek.lower(self.state.progress, jax.ShapeDtypeStruct((batch,), jnp.int32))

    def _lower_logprobs(self, batch: int) -> jax.stages.Lowered:
        logits = jax.ShapeDtypeStruct((batch, self.config.vocab_size), jnp.float32)
        return self._logprobs.lower(logits, jax.ShapeDtypeStruct((batch,), jnp.int32))

    def _lower_redraw(self, batch: int, fast: bool) -> jax.stages.Lowered:
        return self._redraw[fast].lower(
            *self._drawn(),
            jax.ShapeDtypeStruct((batch, self.config.vocab_size), jnp.float32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((batch, redraw.words(self.config.vocab_size)), jnp.int32),
        )

    def _lower_stack(self) -> jax.stages.Lowered:
        rows = self.sizes.rows_per_prefill
        token, logits = (
            jax.ShapeDtypeStruct((1,), jnp.int32),
            jax.ShapeDtypeStruct((1, self.config.vocab_size), jnp.float32),
        )
        return self._stack.lower((token,) * rows, (logits,) * rows)

    def _lower_score(self, chunk: int) -> jax.stages.Lowered:
        hidden = jax.ShapeDtypeStruct((chunk, self.config.hidden_size), self.model.numerics.dtype)
        return self._score.lower(self.weights, hidden, jax.ShapeDtypeStruct((chunk,), jnp.int32))

    def set_tables(self, tables: np.ndarray) -> None:
        """Replace the block tables (host int32 [slots, width])."""
        # device_put, not jnp.asarray: that compiles a program, and compiling evicts every captured CUDA graph.
        self.tables = jax.device_put(np.asarray(tables, np.int32))

    def set_table(self, slot: int, row: np.ndarray) -> None:
        """Replace the block table of one slot (host int32 [width]) where it is: no address changes."""
        run = self._compiled.get(("table", 0), self._set_table)
        self.tables = run(self.tables, np.int32(slot), row)

    def admit(self, slot: int, row: SlotRow, limit: int) -> None:
        """Give a slot to a request; it goes live with the final prefill chunk."""
        run = self._compiled.get(("admit", 0), self._admit)
        self.state = run(self.state, np.int32(slot), row, np.int32(limit))

    def release(self, slot: int) -> None:
        """Make a slot inert (abort)."""
        run = self._compiled.get(("release", 0), self._release)
        self.state = run(self.state, np.int32(slot))

    def save(self, slot: int, index: int) -> None:
        """Copy the rings of a slot to a snapshot."""
        run = self._compiled.get(("save", 0), self._save)
        cache = self.state.cache
        self.snapshots = run(self.snapshots, cache.k_ring, cache.v_ring, np.int32(slot), np.int32(index))

    def restore(self, index: int, slot: int) -> None:
        """Copy a snapshot to the rings of a slot."""
        run = self._compiled.get(("restore", 0), self._restore)
        cache = self.state.cache
        k, v = run(cache.k_ring, cache.v_ring, self.snapshots, np.int32(index), np.int32(slot))
        self.state = dataclasses.replace(self.state, cache=dataclasses.replace(cache, k_ring=k, v_ring=v))

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of the full-attention layers."""
        run = self._compiled.get(("copy page", 0), self._copy_page)
        cache = self.state.cache
        k, v = run(cache.k_pages, cache.v_pages, np.int32(source), np.int32(target))
        self.state = dataclasses.replace(self.state, cache=dataclasses.replace(cache, k_pages=k, v_pages=v))

    def prefill(
        self, pieces: Sequence[tuple[Sequence[int], int, int, bool]]
    ) -> tuple[Int[Array, " R"], Float[Array, "R V"]]:
        """One prefill step: append pieces (tokens, slot, start, final) to their slots, which are distinct.

        (drawn tokens, their logits), a row a piece in the order given, padded to ``rows_per_prefill``; a row means
        something where its piece is final. Raises ValueError for no pieces, and for more than there are rows.
        """
        rows = self.sizes.rows_per_prefill
        if not 0 < len(pieces) <= rows:
            raise ValueError(f"{len(pieces)} pieces in a prefill step: need 1 to {rows} (Sizes.rows_per_prefill)")
        if self.packed:
            return self._prefill_packed(pieces)
        tokens, logits, self._hidden = [], [], []
        for ids, slot, start, final in pieces:
            padded = np.zeros(self.sizes.chunk(len(ids)), np.int32)
            padded[: len(ids)] = ids
            token, row, hidden = self._prefill_piece(padded, len(ids), slot=slot, start=start, final=final)
            tokens.append(token)
            logits.append(row)
            self._hidden.append((hidden, slice(0, len(ids))))
        filled = (rows - len(pieces)) * [0]
        run = self._compiled.get(("stack", 0), self._stack)
        return run(*(tuple([*each, *(each[i] for i in filled)]) for each in (tokens, logits)))

    @property
    def tile(self) -> int:
        """A piece's tokens take a multiple of so many places of a prefill step (the last one's do not)."""
        return TILE if self.packed else 1

    def _prefill_packed(self, pieces):
        """All pieces in one program, one after the other, each from a multiple of ``tile``."""
        rows = np.zeros((self.sizes.rows_per_prefill, 5), np.int32)
        places, end = [], 0
        for i, (ids, slot, start, final) in enumerate(pieces):
            place = -(-end // TILE) * TILE
            rows[i] = place, slot, start, len(ids), final
            end = place + len(ids)
            places.append(slice(place, end))
        tokens = np.zeros(self.sizes.chunk(end), np.int32)
        if end > len(tokens):
            raise ValueError(f"{len(pieces)} pieces take {end} places; the longest prefill step has {len(tokens)}")
        for place, (ids, *_) in zip(places, pieces, strict=True):
            tokens[place] = ids
        drawn, logits, hidden = self._run_packed(tokens, rows)
        self._hidden = [(hidden, place) for place in places]
        return drawn, logits

    def _run_packed(self, tokens: np.ndarray, rows: np.ndarray):
        run = self._compiled.get(("prefill", len(tokens)), self._prefill)
        self.state, drawn, logits, hidden = run(self.weights, self.state, self.tables, tokens, rows)
        return drawn, logits, hidden

    def _prefill_piece(self, padded: np.ndarray, count: int, *, slot: int, start: int, final: bool):
        run = self._compiled.get(("prefill", len(padded)), self._prefill)
        where = np.int32(slot), np.int32(start), np.int32(count), np.bool_(final)
        self.state, token, logits, hidden = run(self.weights, self.state, self.tables, padded, *where)
        return token, logits, hidden

    def decode(
        self, slots: Sequence[int], fast: bool = False, peek: bool = True
    ) -> tuple[Int[Array, " B"] | None, Float[Array, "B V"]]:
        """One step of the given slots: (tokens, logits), padded to the bucket. The next step takes the logits' buffer.

        fast: every request's sampling is within ``fast_path``; ignored without kernels. peek: False leaves out
        the tokens, for whoever asks ``redraw`` or ``peek`` for them next; a program less to launch.
        """
        size = self.sizes.batch(len(slots))
        logits = self._decode_rows(self._padded_rows(tuple(slots), size), size, fast and self.kernels)
        return self.peek(slots) if peek else None, logits

    def peek(self, slots: Sequence[int]) -> Int[Array, " B"]:
        """The tokens that the given slots drew last, padded to the bucket."""
        size = self.sizes.batch(len(slots))
        run = self._compiled.get(("peek", size), self._peek)
        return run(self.state.progress, self._padded_rows(tuple(slots), size))

    def _decode_rows(self, rows: Int[Array, " B"], size: int, fast: bool):
        scratch = self._scratch.pop(size, None)
        if scratch is None:
            scratch = jax.device_put(np.zeros((size, self.config.vocab_size), np.float32))
        run = self._compiled.get(("fast" if fast else "decode", size), self._decode[fast])
        self.state, logits = run(self.weights, self.state, scratch, self.tables, rows)
        self._scratch[size] = logits
        return logits

    def redraw(
        self, slots: Sequence[int], logits: Float[Array, "B V"], masks: np.ndarray, fast: bool = False
    ) -> Int[Array, " B"]:
        """Replace the tokens that the last step drew for some of its slots; the tokens of all of them.

        slots, logits: of that step, a decode or final pieces. masks: int32 [B, words], the tokens that may be drawn
        (B is the padded batch); a token that is not among them is drawn again. fast: as in ``decode``, for the rows
        that have a mask.
        """
        fast = fast and self.kernels
        size = logits.shape[0]
        run = self._compiled.get(("refast" if fast else "redraw", size), self._redraw[fast])
        counts, progress, tokens = run(*self._drawn(), logits, self._padded_rows(tuple(slots), size), masks)
        moved = dataclasses.replace(self.state.sampling, out_count=counts)
        self.state = dataclasses.replace(self.state, sampling=moved, progress=progress)
        return tokens

    def _drawn(self) -> tuple[Array, Array, SlotSampling]:
        """What ``redraw.redrawn`` reads of the state, the parts that it changes first: the host pays per leaf."""
        sampled = self.state.sampling
        return sampled.out_count, self.state.progress, dataclasses.replace(sampled, out_count=None)

    def score_prompt(self, row: int, following: Sequence[int]) -> tuple[tuple[Array, ...], int]:
        """Log-probabilities of the tokens that follow each position of a piece of the prefill step before, as
        ``logprobs`` has them; row: which of its pieces. And where in the arrays they begin."""
        hidden, place = self._hidden[row]
        targets = np.zeros(hidden.shape[0], np.int32)
        targets[place.start : place.start + len(following)] = following
        run = self._compiled.get(("score", hidden.shape[0]), self._score)
        return run(self.weights, hidden, targets), place.start

    def _padded_rows(self, slots: tuple[int, ...], size: int) -> Int[Array, " B"]:
        """The rows of a step on the device; kept, so that the same company finds the same buffer."""
        key = (size, *slots)
        if key not in self._rows:
            if len(self._rows) >= 256:
                self._rows.clear()
            rows = np.full(size, self.sizes.slots, np.int32)
            rows[: len(slots)] = slots
            self._rows[key] = jax.device_put(rows)
        return self._rows[key]

    def logprobs(self, logits: Float[Array, "B V"], tokens: Int[Array, " B"]) -> tuple[Array, Array, Array, Array]:
        """Log-probabilities of drawn tokens and the best alternatives (see sampling.logprobs)."""
        run = self._compiled.get(("logprobs", tokens.shape[0]), self._logprobs)
        return run(logits, tokens)


def _bind(function, merge, **static):
    def bound(*args):
        return function(*args, merge=merge, **static)

    bound.__name__ = bound.__qualname__ = function.__name__.strip("_") + "_step"
    return bound
