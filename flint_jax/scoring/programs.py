"""The compiled programs of scoring: run tiles through the model, score positions, copy pages.

``run`` gives hidden states of the step's M tokens and leaves them on the device; ``score`` takes P of them at a time
through the head, so that logits exist for P positions only. All shapes are fixed: M tokens in rows of one tile width,
P positions. A token's numbers depend on its own sequence: keys are read in whole pages counted from position 0 (blocks
of keys that a row cannot see change nothing), and rows of a product do not mix.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from flint_jax.cache import PAGE, PAGES_PER_BLOCK
from flint_jax.config import FULL, FlintConfig
from flint_jax.errors import RequestError
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from pallas_kernels import dispatch, flash_attention
from pallas_kernels.flash_attention import TILE
from pallas_kernels.sink_attention import reference as sink_attention

LOGITS_BYTES = 1 << 29  # float32 logits of one ``score`` call, at most


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """Keys and values of all layers, full and window alike: [L, P, K, PAGE, H], the compute dtype."""

    k: Float[Array, "L P K page H"]
    v: Float[Array, "L P K page H"]

    @classmethod
    def create(cls, config: FlintConfig, pages: int, dtype, sharding: jax.sharding.Sharding | None = None) -> Pages:
        """Zeros; where the weights are, by default on the default device."""
        shape = (config.num_hidden_layers, pages, config.num_key_value_heads, PAGE, config.head_dim)
        return cls(*(jnp.zeros(shape, dtype, device=sharding) for _ in "kv"))


def place(leaves) -> jax.sharding.Sharding | None:
    """Where a pool of pages belongs beside weights: whole on every device that holds some; None: the default device.

    Raises RequestError for weights of no one mesh.
    """
    places = {leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array) and leaf.committed}
    single = {place for place in places if len(place.device_set) == 1}
    if not places or (single == places and len(single) == 1):
        return next(iter(single), None)
    meshes = {place.mesh for place in places if isinstance(place, jax.sharding.NamedSharding)}
    if len(meshes) != 1 or single:
        raise RequestError(
            f"the weights lie on {len({d for p in places for d in p.device_set})} devices without one common mesh; "
            "load them with a NamedSharding of one mesh for every array (PartitionSpec() for those that stay whole)"
        )
    return jax.sharding.NamedSharding(meshes.pop(), jax.sharding.PartitionSpec())


def page_bytes(config: FlintConfig, itemsize: int) -> int:
    """Bytes of one page across all layers, keys and values."""
    return 2 * config.num_hidden_layers * config.kv_size * PAGE * itemsize


def positions_per_call(vocab_size: int, tokens: int) -> int:
    """P: positions whose logits exist at once. A power of two, at most ``tokens`` / 2 and 512 MiB of logits."""
    fits = max(16, min(512, LOGITS_BYTES // (4 * vocab_size), tokens // 2))
    return 1 << (fits.bit_length() - 1)


class TileAttention:
    """The model's Attend over pages: R rows of T positions, each row inside one page.

    tables: int32 [R, W], page of each PAGE positions of the row's sequence (W a multiple of PAGES_PER_BLOCK). start:
    int32 [R], first position, a multiple of T. low, high: int32 [R], offsets of the real tokens; the others are neither
    written nor seen, and an empty range makes the row inert. Rows of one sequence may follow each other: all of them
    write before any of them reads. After the forward pass ``pages`` holds the written pages.
    """

    def __init__(
        self,
        config: FlintConfig,
        numerics: Numerics,
        pages: Pages,
        tables: Int[Array, "R W"],
        start: Int[Array, " R"],
        low: Int[Array, " R"],
        high: Int[Array, " R"],
        width: int,
    ):
        self.config, self.numerics, self.pages, self.tables = config, numerics, pages, tables
        offset = jnp.arange(width, dtype=jnp.int32)
        self.positions = start[:, None] + offset
        written = (offset >= low[:, None]) & (offset < high[:, None])
        self.entry = start // PAGE
        page = jnp.take_along_axis(tables, self.entry[:, None], axis=1)
        self.page = jnp.where(written, page, pages.k.shape[1])  # out of range: dropped
        self.last = jnp.where(high > low, start + high - 1, -1)
        self.real = written
        self.tiles, self.destination = self._for_kernels(start, high, width)

    def _for_kernels(self, start, high, width: int):
        """What ``flash_attention`` asks for; (None, None) where rows are no whole tiles. A tile begins at its row's
        first place: what lies before ``low`` was written before, and its output is nobody's."""
        if width % TILE:
            return None, None
        first = jnp.arange(0, width, TILE, dtype=jnp.int32)
        count = jnp.where(self.real.any(axis=1)[:, None], jnp.clip(high[:, None] - first, 0, TILE), 0).reshape(-1)
        row = jnp.repeat(jnp.arange(start.shape[0], dtype=jnp.int32), first.size, total_repeat_length=count.size)
        position = (start[:, None] + first).reshape(-1)
        tiles = jnp.stack([row, position, count, *[jnp.zeros_like(count)] * 5], axis=1)
        at = self.page * PAGE + self.positions % PAGE
        return tiles, jnp.where(self.real, at, -1).reshape(-1)

    def attend(self, layer: int, q: Array, k: Array, v: Array, sinks: Array) -> Array:
        """See flint_jax.model.Attend."""
        implementations = {"kernels": self._on_tensor_cores, dispatch.REFERENCE: self._plain}
        return dispatch.run("scoring.attention", implementations, layer, q, k, v, sinks)

    def _on_tensor_cores(self, layer: int, q: Array, k: Array, v: Array, sinks: Array) -> Array:
        if self.tiles is None or not self.numerics.serving:
            raise dispatch.KernelUnsupported("rows of no whole tiles, or other numerics")
        qkv = jnp.concatenate([x.reshape(x.shape[0] * x.shape[1], -1) for x in (q, k, v)], axis=1)
        window = None if self.config.layer_types[layer] == FULL else self.config.sliding_window
        written = flash_attention.write.mosaic(qkv, self.destination, self.pages.k, self.pages.v, layer)
        sinks = sinks.astype(jnp.float32)[None]
        out = flash_attention.mosaic.attend_pages(
            qkv, self.tiles, sinks, 0, *written, layer, self.tables, window=window
        )
        self.pages = Pages(*written)
        return out.reshape(q.shape)

    def _plain(self, layer: int, q: Array, k: Array, v: Array, sinks: Array) -> Array:
        place = self.positions % PAGE
        k, v = (
            pool.at[layer, self.page, :, place].set(new, mode="drop")
            for pool, new in ((self.pages.k, k), (self.pages.v, v))
        )
        self.pages = Pages(k, v)
        total = k.shape[1]
        flat = tuple(x.reshape(-1, *x.shape[2:]) for x in (k, v))  # one gather with an offset, no slice of a layer

        def keys(entries: Int[Array, "R n"]) -> sink_attention.Keys:
            """Keys of some pages of each row; negative entries are before the beginning."""
            chosen = layer * total + jnp.take_along_axis(self.tables, jnp.maximum(entries, 0), axis=1)
            both = (x.at[chosen].get(mode="clip") for x in flat)  # [R, n, K, PAGE, H]
            both = (x.transpose(0, 2, 1, 3, 4).reshape(x.shape[0], x.shape[2], -1, x.shape[4]) for x in both)
            inside = jnp.arange(PAGE, dtype=jnp.int32)
            return sink_attention.Keys(*both, (entries[:, :, None] * PAGE + inside).reshape(entries.shape[0], -1))

        options = {"scale": self.config.head_dim**-0.5, "normalise_first": not self.numerics.serving}
        if self.config.layer_types[layer] == FULL:
            block = jnp.arange(PAGES_PER_BLOCK, dtype=jnp.int32)
            rows = q.shape[0]

            def blocks(b):
                return keys(jnp.broadcast_to(b * PAGES_PER_BLOCK + block, (rows, PAGES_PER_BLOCK)))

            count = jnp.max(self.last) // (PAGE * PAGES_PER_BLOCK) + 1
            return sink_attention.attend(q, self.positions, self.last, blocks, count, sinks, **options)
        window = self.config.sliding_window
        past = -(-(window - 1) // PAGE)
        mine = keys(self.entry[:, None] - past + jnp.arange(past + 1, dtype=jnp.int32))
        return sink_attention.attend(q, self.positions, self.last, lambda _: mine, 1, sinks, window=window, **options)


def _run(leaves, pages: Pages, rows, *, merge, width: int):
    """rows: int32 [R, 3 + T + W]: start, low, high, tokens, table. (pages, hidden [R * T, D])."""
    model: Flint = merge(leaves)
    start, low, high = rows[:, 0], rows[:, 1], rows[:, 2]
    tokens, tables = rows[:, 3 : 3 + width], rows[:, 3 + width :]
    kv = TileAttention(model.config, model.numerics, pages, tables, start, low, high, width)
    hidden = model.hidden(tokens, kv)
    return kv.pages, hidden.reshape(-1, hidden.shape[-1])


def _score(leaves, hidden, wanted, *, merge, top_k: int):
    """wanted: int32 [2, P]: which hidden state, and the token whose score it gives.

    float32 log p [P], whether the token is the likeliest [P] (ties: the lowest id is), and the likeliest ``top_k`` with
    their log p [P, k].
    """
    model: Flint = merge(leaves)
    where, target = wanted
    logits = model.logits(hidden[where])
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    values, ids = jax.lax.top_k(logits, top_k) if top_k else (logits[:, :0], jnp.zeros((target.size, 0), jnp.int32))
    return chosen - total, best == target, ids.astype(jnp.int32), values - total[:, None]


def _copy(pages: Pages, pairs):
    """pairs: int32 [2, C]: from, to; a ``to`` out of range copies nothing."""
    source, target = pairs
    return jax.tree.map(lambda x: x.at[:, target].set(x[:, source], mode="drop"), pages)


class Programs:
    """The jitted programs of one model."""

    def __init__(
        self,
        merge,
        config: FlintConfig,
        *,
        tokens: int,
        widths: tuple[int, ...],
        top_k: int,
        sharding: jax.sharding.Sharding | None = None,
    ):
        """sharding: of the pages, see ``place``."""
        self.sharding = sharding
        self.config, self.tokens = config, tokens
        self.rows = {width: tokens // width for width in widths}
        self.positions = positions_per_call(config.vocab_size, tokens)
        self.copies = max(self.rows.values())
        # Said aloud, so that XLA does not find the pages another place, and every step but the first another program.
        self._run = {
            width: jax.jit(
                functools.partial(_run, merge=merge, width=width), donate_argnums=1, out_shardings=(sharding, None)
            )
            for width in widths
        }
        self._score = jax.jit(functools.partial(_score, merge=merge, top_k=top_k))
        self._copy = jax.jit(_copy, donate_argnums=0, out_shardings=sharding)

    def run(self, leaves, pages: Pages, rows: np.ndarray, width: int) -> tuple[Pages, Float[Array, "M D"]]:
        """One step; ``pages`` is donated."""
        return self._run[width](leaves, pages, rows)

    def score(self, leaves, hidden: Float[Array, "M D"], where: np.ndarray, target: np.ndarray):
        """Score up to P positions: see ``_score``. The results are P long; what is beyond ``where`` means nothing."""
        wanted = np.zeros((2, self.positions), np.int32)
        wanted[0, : len(where)], wanted[1, : len(where)] = where, target
        return self._score(leaves, hidden, wanted)

    def copy(self, pages: Pages, pairs: list[tuple[int, int]]) -> Pages:
        """Copy whole pages; ``pages`` is donated. None of them is written twice."""
        for begin in range(0, len(pairs), self.copies):
            some = pairs[begin : begin + self.copies]
            padded = np.full((2, self.copies), pages.k.shape[1], np.int32)
            padded[:, : len(some)] = np.asarray(some, np.int32).T
            pages = self._copy(pages, padded)
        return pages
