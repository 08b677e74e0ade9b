"""The recorder behind capture and patch, and an attention that can show probabilities and change its window."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from flint_jax.config import FULL, SLIDING
from flint_jax.errors import RequestError
from flint_jax.model import Flint, WholeSequence
from flint_jax.research.patches import Patch
from flint_jax.sites import recording

# Sites inside the MoE, where rows and tokens are one axis.
_FLAT = re.compile(r"\.mlp\.(router|shared)\.|\.mlp\.(experts|routed)$")
_PRE = re.compile(r"blocks\.(\d+)\.pre$")


class Tracer:
    """A recorder (see ``flint_jax.sites``): keeps the wanted sites in ``found``, applies the patches."""

    def __init__(
        self, model: Flint, shape: tuple[int, int], wanted: Collection[str], patches: Mapping[str, tuple[Patch, ...]]
    ):
        self.model, self.shape = model, shape
        self.wanted, self.patches = frozenset(wanted), patches
        self.found: dict[str, Array] = {}

    def __call__(self, name: str, value: Array) -> Array:
        before = _PRE.match(name)
        if before and int(before[1]):  # the stream before a block is the stream after the one below
            value = self._visit(f"blocks.{int(before[1]) - 1}.post", value)
        return self._visit(name, value)

    def needs(self, name: str) -> bool:
        """Whether someone looks at a site or changes it."""
        return name in self.wanted or name in self.patches

    def _visit(self, name: str, value: Array) -> Array:
        lens = name.removesuffix("post") + "lens" if name.endswith(".post") else ""
        if not self.needs(name) and lens not in self.wanted:
            return value
        flat = _FLAT.search(name) is not None
        seen = value.reshape(*self.shape, *value.shape[1:]) if flat else value
        for patch in self.patches.get(name, ()):
            seen = patch(seen)
        if name in self.wanted:
            self.found[name] = seen
        if lens in self.wanted:
            with recording(None):
                self.found[lens] = self.model.logits(self.model.norm(seen))
        if name not in self.patches:
            return value
        return seen.reshape(value.shape) if flat else seen


class TracedAttention(WholeSequence):
    """Attention over whole rows that shows the probabilities of the heads somebody asks for."""

    def __init__(self, tracer: Tracer, lengths: Int[Array, " B"] | None):
        super().__init__(tracer.model.config, tracer.model.numerics, tracer.shape, lengths)
        self.tracer = tracer

    def attend(self, layer: int, q: Array, k: Array, v: Array, sinks: Array) -> Array:
        """See flint_jax.model.Attend."""
        normal = self.config
        window = normal.sliding_window if normal.layer_types[layer] == SLIDING else None
        for patch in self.tracer.patches.get(f"blocks.{layer}.attn.window", ()):
            window = patch.function
            kinds = list(normal.layer_types)
            kinds[layer] = FULL if window is None else SLIDING
            # As far as a row reaches, so that a large number costs no padding.
            width = normal.sliding_window if window is None else min(window, self.positions.shape[1])
            self.config = dataclasses.replace(normal, layer_types=tuple(kinds), sliding_window=width)
        out = super().attend(layer, q, k, v, sinks)
        self.config = normal
        group = q.shape[2] // k.shape[2]
        for head in range(q.shape[2]):
            name = f"blocks.{layer}.attn.probs.{head}"
            if not self.tracer.needs(name):
                continue
            kv = head // group
            probs = self._probabilities(q[:, :, head], k[:, :, kv], sinks[head], window)
            seen = self.tracer(name, probs)
            if seen is not probs:
                mixed = jnp.einsum("bts,bsh->bth", seen[..., :-1], v[:, :, kv].astype(jnp.float32), precision="highest")
                out = out.at[:, :, head].set(self.numerics.round(mixed))
        return out

    def _probabilities(
        self, q: Float[Array, "B T H"], k: Float[Array, "B T H"], sink: Array, window: int | None
    ) -> Float[Array, "B T T1"]:
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        scores = jnp.einsum("bth,bsh->bts", q, k, precision="highest") * jnp.float32(self.config.head_dim**-0.5)
        place = jnp.arange(k.shape[1], dtype=jnp.int32)
        distance = place[:, None] - place[None, :]
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        seen = seen[None] & (place[None, None, :] <= (self.last - self.start)[:, None, None])
        scores = jnp.where(seen, scores, -jnp.inf)
        column = jnp.broadcast_to(sink.astype(jnp.float32), (*scores.shape[:2], 1))
        # A row past its length may see no key, and the sink may be patched away: then there is nothing to share.
        both = jnp.concatenate([scores, column], axis=-1)
        highest = jnp.max(both, axis=-1, keepdims=True)
        weight = jnp.exp(both - jnp.where(highest > -jnp.inf, highest, 0.0))
        return weight / jnp.maximum(weight.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def forward(
    model: Flint,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None,
    wanted: Collection[str],
    patches: Mapping[str, tuple[Patch, ...]],
) -> tuple[Float[Array, "B T D"], Tracer]:
    """One traced pass: final normed hidden states, and the tracer with what it found (``logits`` not among it)."""
    tracer = Tracer(model, tokens.shape, wanted, patches)
    with recording(tracer):
        hidden = model.hidden(tokens, TracedAttention(tracer, lengths))
    return hidden, tracer


def as_model(lm) -> Flint:
    """The Flint module of a LanguageModel, or the module itself. Raises RequestError for anything else."""
    model = lm if isinstance(lm, Flint) else getattr(lm, "model", None)
    if not isinstance(model, Flint):
        raise RequestError(f"need a LanguageModel (of flint_jax.load) or a Flint, got {type(lm).__name__}", param="lm")
    return model


def as_rows(model: Flint, tokens, lengths=None) -> tuple[jax.Array, jax.Array]:
    """(int32 [B,T], int32 [B]) of token ids [T] or [B,T]; lengths (0 to T) default to T.

    Raises RequestError for what is neither, for more tokens than the model has positions, and, where values are known
    (not under jit), for lengths beyond the row and real tokens outside the vocabulary: a lookup would answer those too.
    """
    tokens = _integers("tokens", tokens)
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    most, vocabulary = model.rope.get_value().shape[0], model.config.vocab_size
    if tokens.ndim != 2 or not tokens.size or tokens.shape[1] > most:
        raise RequestError(f"tokens must be [T] or [B, T], T from 1 to {most}, got {tokens.shape}", param="tokens")
    rows, width = tokens.shape
    lengths = np.full(rows, width) if lengths is None else _integers("lengths", lengths)
    lengths = lengths[None] if lengths.ndim == 0 else lengths
    if lengths.shape != (rows,):
        raise RequestError(f"lengths must be [B], one for each of {rows} rows, got {lengths.shape}", param="lengths")
    if not isinstance(lengths, jax.core.Tracer):
        lengths = np.asarray(lengths)
        if lengths.min() < 0 or lengths.max() > width:
            raise RequestError(f"lengths must be from 0 to {width}, got {lengths.tolist()!r:.80}", param="lengths")
        if not isinstance(tokens, jax.core.Tracer):
            tokens = np.asarray(tokens)
            outside = (tokens < 0) | (tokens >= vocabulary)
            bad = tokens[outside & (np.arange(width) < lengths[:, None])]
            if bad.size:
                raise RequestError(f"token id {int(bad[0])} is outside the vocabulary, 0 to {vocabulary - 1}")
            tokens = np.where(outside, 0, tokens)  # padding may be any number
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)


def _integers(what: str, given) -> np.ndarray | jax.Array:
    try:
        array = given if isinstance(given, jax.Array) else np.asarray(given)
    except ValueError as error:
        raise RequestError(f"{what} must be a rectangle; pad the rows and pass lengths ({error})", param=what) from None
    if array.size and not jnp.issubdtype(array.dtype, jnp.integer):
        raise RequestError(f"{what} must be integers, got {array.dtype} (text goes through lm.encode)", param=what)
    return array
