"""How far two models (two roundings, two checkpoints) are apart, layer by layer: KL between their logit lenses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from flint_jax.errors import RequestError
from flint_jax.model import Flint, WholeSequence
from flint_jax.numerics import Matrix, Numerics
from flint_jax.research.tracing import as_model, as_rows, forward

BLOCK = 64  # positions whose logits (of both models) exist at once


@dataclasses.dataclass(frozen=True)
class LayerKL:
    """KL(a || b) in nats. per_token [L+1,B,T]: after each of the L blocks, then of the models' logits; 0 at padding."""

    per_token: Float[np.ndarray, "L1 B T"]
    lengths: Int[np.ndarray, " B"]

    @property
    def mean(self) -> Float[np.ndarray, " L1"]:
        """Mean over the real tokens."""
        return self.per_token.sum((1, 2), dtype=np.float64) / self.lengths.sum()

    @property
    def max(self) -> Float[np.ndarray, " L1"]:
        """Largest over the tokens."""
        return self.per_token.max((1, 2))


def layer_kl(
    a,
    b,
    tokens: Int[Array, "B T"] | Sequence[int],
    lengths: Int[Array, " B"] | None = None,
    *,
    isolated: bool = False,
) -> LayerKL:
    """KL(a || b) between what both models would say after each block (their own final norm and head on the stream).

    a, b: LanguageModel or Flint over one vocabulary and with equally many layers. isolated: each block of b is fed a's
    stream, so that a layer answers for itself only (the last entry is then b's norm and head on a's stream).
    """
    a, b = as_model(a), as_model(b)
    for what in ("vocab_size", "num_hidden_layers") + (("hidden_size",) if isolated else ()):
        mine, theirs = getattr(a.config, what), getattr(b.config, what)
        if mine != theirs:
            raise RequestError(f"the models differ in {what} ({mine} and {theirs}), so layers cannot be compared")
    tokens, lengths = as_rows(a, tokens, lengths)
    first, second = nnx.split(a), nnx.split(b)
    ours = _streams(first[0], first[1], tokens, lengths)
    if isolated:
        theirs = _blocks_alone(second[0], second[1], ours, lengths)
    else:
        theirs = _streams(second[0], second[1], tokens, lengths)
    real = np.arange(tokens.shape[1])[None] < np.asarray(lengths)[:, None]
    found = np.asarray(_kl(first[0], second[0], first[1], second[1], ours[1:], theirs[1:]))
    return LayerKL(np.where(real[None], found, 0.0), np.asarray(lengths))


def with_numerics(lm, mode: str = "serving", dtype: str = "bfloat16") -> Flint:
    """The same weights under other rounding rules: a module whose leaves of unchanged dtype are shared.

    A router that was narrowed to bfloat16 when it was loaded stays so; load the checkpoint anew to have it whole.
    """
    model = as_model(lm)
    numerics = Numerics(mode, dtype)

    def convert(name: str, leaf: Matrix) -> Matrix:
        if not isinstance(leaf, jax.Array) or name == "sinks":
            return leaf
        return leaf.astype(numerics.router_dtype if name == "router" else numerics.dtype)

    weights = {name: convert(name, param.get_value()) for name, param in model.stacks.items()}
    return Flint(model.config, weights, numerics, max_positions=model.rope.get_value().shape[0])


@functools.partial(jax.jit, static_argnames="graph")
def _streams(graph, state, tokens, lengths) -> tuple[Array, ...]:
    """Residual stream before the first block, after each block, and the final normed one."""
    model = nnx.merge(graph, state)
    names = [f"blocks.{i}.post" for i in range(len(model.blocks))]
    hidden, tracer = forward(model, tokens, lengths, ["blocks.0.pre", *names], {})
    return (tracer.found["blocks.0.pre"], *(tracer.found[name] for name in names), hidden)


@functools.partial(jax.jit, static_argnames="graph")
def _blocks_alone(graph, state, streams, lengths) -> tuple[Array, ...]:
    model = nnx.merge(graph, state)
    numerics = model.numerics
    kv = WholeSequence(model.config, numerics, streams[0].shape[:2], lengths)
    out = [streams[0]]
    for stream, block in zip(streams, model.blocks, strict=False):
        residual, branch = block(stream.astype(numerics.dtype), None, kv)
        out.append(numerics.round(residual.astype(jnp.float32) + branch.astype(jnp.float32)))
    return (*out, model.norm(streams[-2].astype(numerics.dtype)))


@functools.partial(jax.jit, static_argnames=("graph_a", "graph_b"))
def _kl(graph_a, graph_b, state_a, state_b, ours, theirs) -> Float[Array, "L1 B T"]:
    """ours, theirs: streams after each block and the normed one."""
    a, b = nnx.merge(graph_a, state_a), nnx.merge(graph_b, state_b)
    shape = ours[0].shape[:2]
    count = shape[0] * shape[1]
    block = min(BLOCK, count)
    pad = -count % block

    def pieces(stream, model):
        flat = stream.astype(model.numerics.dtype).reshape(count, -1)
        return jnp.pad(flat, ((0, pad), (0, 0))).reshape(-1, block, flat.shape[-1])

    def depth(x, y, normed: bool):
        def one(piece):
            p, q = (
                jax.nn.log_softmax(m.logits(s if normed else m.norm(s)), axis=-1)
                for m, s in zip((a, b), piece, strict=True)
            )
            return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

        found = jax.lax.map(one, (pieces(x, a), pieces(y, b))).reshape(-1)[:count].reshape(shape)
        return jnp.maximum(found, 0.0)  # rounding may leave -1e-8

    *x, x_normed = ours
    *y, y_normed = theirs
    return jnp.stack([*(depth(s, t, False) for s, t in zip(x, y, strict=True)), depth(x_normed, y_normed, True)])
