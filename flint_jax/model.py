"""The Flint module tree: embedding, pre-norm blocks (attention, then dense MLP or experts), final norm, untied head.

Weights live in stacks, one array per kind with a leading layer axis, because the host pays per array on every step.
A module holds its stack (an ``nnx.Param`` that all layers share) and its index in it; ``block.attn.qkv.matrix`` is that
layer's slice, and assigning to it writes the stack. Source of the function: transformers' ``FlintForCausalLM``; of the
roundings: ``flint_jax.numerics``. ``site(self, name, value)`` marks where research may look or patch
(``flint_jax.research.sites`` lists the names); elsewhere it is nothing.

Letters: B rows, T tokens, N query heads, K kv heads, H head width, D model width, F expert width, V vocabulary,
E experts, A active experts, M = B*T tokens of a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flint_jax import moe
from flint_jax.config import FULL, FlintConfig
from flint_jax.errors import RequestError
from flint_jax.numerics import Matrix, Numerics, project, silu
from flint_jax.sites import site
from pallas_kernels.sink_attention import reference as sink_attention


class RopeTable(nnx.Variable):
    """cos and sin of every position, float32 [P, H]: halves [cos | sin]. Not a parameter."""


def rope_table(positions: int, width: int, theta: float) -> Float[np.ndarray, "P H"]:
    """cos | sin table in float32 throughout, as every peer builds it.

    A float64 table would be more exact and wrong: near position 262,143 the float32 angle is off by up to 0.016 rad,
    and the model was trained and is served with that error.
    """
    inverse = np.float32(1) / np.power(np.float32(theta), np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    angle = np.arange(positions, dtype=np.float32)[:, None] * inverse[None, :].astype(np.float32)
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=-1)


class Stacked(nnx.Module):
    """One layer's view of a stack."""

    def __init__(self, weight: nnx.Param, index: int | None = None):
        self.weight = weight
        self.index = index

    @property
    def matrix(self) -> Matrix:
        """This layer's weight (a slice of the stack)."""
        value = self.weight.get_value()
        return value if self.index is None else value[self.index]

    @matrix.setter
    def matrix(self, value: Matrix):
        old = jax.eval_shape(lambda: self.matrix)
        _check_replacement(old, value)
        value = jax.tree.map(lambda leaf, new: jnp.asarray(new).astype(leaf.dtype), old, value)
        if self.index is not None:
            i = self.index
            value = jax.tree.map(lambda stack, new: stack.at[i].set(new), self.weight.get_value(), value)
        self.weight.set_value(value)


def _check_replacement(old: Matrix, new: Matrix) -> None:
    """Raise RequestError unless the new value of a layer's weight is of the old one's kind, shape and dtypes (one float
    kind may stand for another)."""

    def told(value) -> str:
        leaves = jax.tree.leaves(value)
        shown = [f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else f"{leaf!r:.40}" for leaf in leaves]
        plain = len(leaves) == 1 and leaves[0] is value
        return f"an array {shown[0]}" if plain else f"{type(value).__name__} of {', '.join(shown)}"

    fits = jax.tree.structure(old) == jax.tree.structure(new)
    if fits:
        for have, need in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
            kinds = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in (have, need) if hasattr(leaf, "dtype")]
            same = len(kinds) == 2 and (all(kinds) or have.dtype == need.dtype)
            fits = fits and same and tuple(have.shape) == tuple(need.shape)
    if not fits:
        raise RequestError(f"a weight of this layer is {told(old)}; got {told(new)}", param="matrix")


class Linear(Stacked):
    """y = x @ W.T, float32 accumulators out. W is [R, C]: plain, or NVFP4 kept packed."""

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... R"]:
        return project(x, self.matrix)


class RMSNorm(Stacked):
    """x / rms(x) * weight over the last axis, in float32, one rounding."""

    def __init__(self, weight: nnx.Param, index: int | None, numerics: Numerics, eps: float):
        super().__init__(weight, index)
        self.numerics = numerics
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        x = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(self.eps))
        return self.numerics.round(x * scale * self.matrix.astype(jnp.float32))


class Attend(Protocol):
    """What a block needs of its surroundings: positions, and attention over whatever keys came before.

    ``positions`` is int32 [B, T]; ``real`` says which of the places hold a token (None: all of them); ``attend`` takes
    q [B,T,N,H] and the new k, v [B,T,K,H] (normed and rotated).
    """

    positions: Int[Array, "B T"]
    real: Bool[Array, "B T"] | None

    def attend(self, layer: int, q: Array, k: Array, v: Array, sinks: Array) -> Array: ...


class Attention(nnx.Module):
    """Grouped-query attention: per-head q/k norm, RoPE where the config says so, learned sinks."""

    def __init__(self, config: FlintConfig, numerics: Numerics, weights: dict[str, nnx.Param], rope: RopeTable, i: int):
        self.config, self.numerics, self.layer, self.path = config, numerics, i, f"blocks.{i}.attn."
        self.qkv = Linear(weights["qkv"], i)
        self.o = Linear(weights["o"], i)
        self.q_norm = RMSNorm(weights["q_norm"], i, numerics, config.rms_norm_eps)
        self.k_norm = RMSNorm(weights["k_norm"], i, numerics, config.rms_norm_eps)
        self.sinks = Stacked(weights["sinks"], i)
        self.rope = rope if config.rope_layers[i] else None

    def __call__(self, x: Float[Array, "B T D"], kv: Attend) -> Float[Array, "B T D"]:
        c = self.config
        qkv = self.numerics.round(self.qkv(site(self, "input", x)))
        q, k, v = jnp.split(qkv, [c.q_size, c.q_size + c.kv_size], axis=-1)
        q = self.q_norm(q.reshape(*q.shape[:2], c.num_attention_heads, c.head_dim))
        k = self.k_norm(k.reshape(*k.shape[:2], c.num_key_value_heads, c.head_dim))
        v = v.reshape(k.shape)
        if self.rope is not None:
            table = self.rope.get_value()[kv.positions]
            q, k = (rotate(heads, table, self.numerics) for heads in (q, k))
        q, k, v = site(self, "q", q), site(self, "k", k), site(self, "v", v)
        out = site(self, "heads", kv.attend(self.layer, q, k, v, site(self, "sinks", self.sinks.matrix)))
        return site(self, "out", self.numerics.round(self.o(out.reshape(*out.shape[:2], c.q_size))))


def rotate(x: Float[Array, "B T N H"], table: Float[Array, "B T H"], numerics: Numerics) -> Float[Array, "B T N H"]:
    """RoPE on the two halves of each head. table: cos | sin of each token's position, float32."""
    cos, sin = (half[:, :, None, :] for half in jnp.split(table, 2, axis=-1))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    if numerics.serving:
        return numerics.round(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))

    def once(value):
        return numerics.round(value).astype(jnp.float32)

    # transformers rounds the table, both products and the sum.
    cos, sin = once(cos), once(sin)
    return numerics.round(jnp.concatenate([once(a * cos) - once(b * sin), once(b * cos) + once(a * sin)], axis=-1))


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)): the dense layers and the shared expert."""

    def __init__(self, numerics: Numerics, gate_up: nnx.Param, down: nnx.Param, i: int, path: str):
        self.numerics, self.path = numerics, path
        self.gate_up = Linear(gate_up, i)
        self.down = Linear(down, i)

    def __call__(self, x: Float[Array, "... D"], real: Bool[Array, "..."] | None = None) -> Float[Array, "... D"]:
        del real  # every row costs the same
        rounded = self.numerics.round(self.gate_up(site(self, "input", x))).astype(jnp.float32)
        gate, up = jnp.split(rounded, 2, axis=-1)
        act = silu(gate)
        if not self.numerics.serving:
            act = self.numerics.round(act).astype(jnp.float32)
        act = site(self, "act", self.numerics.round(act * up))
        return site(self, "out", self.numerics.round(self.down(act)))


class Router(nnx.Module):
    """Sigmoid scores of the experts, the best A of them, their scores divided by their sum."""

    def __init__(self, config: FlintConfig, numerics: Numerics, weight: nnx.Param, i: int, path: str):
        self.config, self.numerics, self.path = config, numerics, path
        self.gate = Stacked(weight, i)

    def __call__(self, x: Float[Array, "... D"]) -> moe.Routing:
        c = self.config
        weight = self.gate.matrix
        logits = project(x.astype(weight.dtype), weight)
        if self.numerics.serving:
            logits = self.numerics.round(logits).astype(jnp.float32)
        logits = site(self, "logits", logits)
        choice = site(self, "choice", logits if self.numerics.serving else jax.nn.sigmoid(logits))
        ids = site(self, "ids", jax.lax.top_k(choice, c.num_experts_per_tok)[1])  # ties go to the lowest index
        scores = jax.nn.sigmoid(jnp.take_along_axis(logits, ids, axis=-1))
        if c.norm_topk_prob:
            # 1e-20 is serving's guard against a row whose scores all underflow.
            scores = scores / (scores.sum(-1, keepdims=True) + jnp.float32(1e-20 if self.numerics.serving else 0.0))
        scores = scores * jnp.float32(c.routed_scaling_factor)
        if self.numerics.serving:
            scores = self.numerics.round(scores).astype(jnp.float32)
        return moe.Routing(logits, ids.astype(jnp.int32), site(self, "weights", scores))


class MoE(nnx.Module):
    """Weighted sum of the chosen experts plus one shared expert, ungated."""

    def __init__(self, config: FlintConfig, numerics: Numerics, weights: dict[str, nnx.Param], i: int):
        self.config, self.numerics, self.index, self.path = config, numerics, i, f"blocks.{config.moe_layers[i]}.mlp."
        self.router = Router(config, numerics, weights["router"], i, self.path + "router.")
        self.gate_up = Stacked(weights["expert_gate_up"], i)  # [E, 2F, D]
        self.down = Stacked(weights["expert_down"], i)  # [E, D, F]
        self.shared = MLP(numerics, weights["shared_gate_up"], weights["shared_down"], i, self.path + "shared.")

    def __call__(self, x: Float[Array, "B T D"], real: Bool[Array, "B T"] | None = None) -> Float[Array, "B T D"]:
        x = site(self, "input", x)
        flat = x.reshape(-1, x.shape[-1])
        routed = moe.experts(
            flat,
            self.router(flat),
            self.gate_up.weight.get_value(),
            self.down.weight.get_value(),
            layer=self.index,
            numerics=self.numerics,
            each=functools.partial(site, self, "experts"),
            real=None if real is None else real.reshape(-1),
        )
        total = site(self, "routed", routed).astype(jnp.float32) + self.shared(flat).astype(jnp.float32)
        return site(self, "out", self.numerics.round(total).reshape(x.shape))


class Block(nnx.Module):
    """Pre-norm block. Residual and last branch come apart, so that their sum can be normalised unrounded."""

    def __init__(self, config: FlintConfig, numerics: Numerics, weights: dict[str, nnx.Param], rope: RopeTable, i: int):
        self.numerics, self.layer, self.path = numerics, i, f"blocks.{i}."
        self.attn_norm = RMSNorm(weights["attn_norm"], i, numerics, config.rms_norm_eps)
        self.attn = Attention(config, numerics, weights, rope, i)
        self.mlp_norm = RMSNorm(weights["mlp_norm"], i, numerics, config.rms_norm_eps)
        if i in config.mlp_only_layers:
            index = sorted(config.mlp_only_layers).index(i)
            self.mlp = MLP(numerics, weights["dense_gate_up"], weights["dense_down"], index, self.path + "mlp.")
        else:
            self.mlp = MoE(config, numerics, weights, config.moe_layers.index(i))

    def __call__(self, residual: Array, branch: Array | None, kv: Attend) -> tuple[Array, Array]:
        residual, x = add_norm(residual, branch, self.attn_norm, functools.partial(site, self, "pre"))
        residual, x = add_norm(residual, self.attn(x, kv), self.mlp_norm, functools.partial(site, self, "mid"))
        return residual, self.mlp(x, kv.real)


def add_norm(
    residual: Array, branch: Array | None, norm: RMSNorm, visit: Callable[[Array], Array] = lambda stream: stream
) -> tuple[Array, Array]:
    """(residual + branch rounded, its norm). Serving norms the unrounded sum, transformers the rounded one.

    visit: the site of this stream; what it changes is normalised instead of the unrounded sum.
    """
    if branch is None:
        stream = visit(residual)
        return stream, norm(stream)
    total = residual.astype(jnp.float32) + branch.astype(jnp.float32)
    rounded = norm.numerics.round(total)
    stream = visit(rounded)
    return stream, norm(total if norm.numerics.serving and stream is rounded else stream)


class Flint(nnx.Module):
    """The language model.

    ``weights``: the stacks of ``flint_jax.weights.shapes``. ``max_positions`` bounds the RoPE table (and with it the
    context); default: the config's.
    """

    def __init__(
        self,
        config: FlintConfig,
        weights: dict[str, Matrix],
        numerics: Numerics | None = None,
        max_positions: int | None = None,
    ):
        numerics = numerics or Numerics()
        self.config, self.numerics, self.path = config, numerics, ""
        params = {name: nnx.Param(value) for name, value in weights.items()}
        self.stacks = nnx.Dict(params)
        table = rope_table(max_positions or config.max_position_embeddings, config.head_dim, config.rope_theta)
        self.rope = RopeTable(jnp.asarray(table))
        self.embed = Stacked(params["embed"])
        self.blocks = nnx.List([Block(config, numerics, params, self.rope, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(params["final_norm"], None, numerics, config.rms_norm_eps)
        self.head = Linear(params["head"])

    def hidden(self, tokens: Int[Array, "B T"], kv: Attend) -> Float[Array, "B T D"]:
        """Final normed hidden states: the head's input."""
        residual, branch = site(self, "embed", self.embed.matrix[tokens].astype(self.numerics.dtype)), None
        for block in self.blocks:
            residual, branch = block(residual, branch, kv)
        _, hidden = add_norm(residual, branch, self.norm, functools.partial(site, self.blocks[-1], "post"))
        return site(self, "norm", hidden)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """float32 logits. Serving keeps the accumulators, transformers rounds them to the compute dtype."""
        logits = self.head(hidden)
        logits = logits if self.numerics.serving else self.numerics.round(logits).astype(jnp.float32)
        return site(self, "logits", logits)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Float[Array, "B T V"]:
        """Logits of every position of right-padded rows, without a cache (for research, training and parity)."""
        return self.logits(self.hidden(tokens, WholeSequence(self.config, self.numerics, tokens.shape, lengths)))


class WholeSequence:
    """Attend of a forward pass that sees its whole rows at once: no cache, positions 0..T-1, rows right-padded."""

    def __init__(
        self,
        config: FlintConfig,
        numerics: Numerics,
        shape: tuple[int, int],
        lengths: Int[Array, " B"] | None = None,
        start: Int[Array, " B"] | None = None,
        block: int = 512,
    ):
        batch, length = shape
        self.config, self.numerics, self.block = config, numerics, min(block, length)
        self.start = jnp.zeros((batch,), jnp.int32) if start is None else start
        self.positions = self.start[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
        size = jnp.full((batch,), length, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
        self.last = self.start + size - 1
        self.real = None

    def attend(self, layer: int, q: Array, k: Array, v: Array, sinks: Array) -> Array:
        """See Attend."""
        c = self.config
        scale = c.head_dim**-0.5
        k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
        options = {"scale": scale, "normalise_first": not self.numerics.serving}
        if c.layer_types[layer] != FULL:
            past = min(c.sliding_window - 1, k.shape[2])
            k, v = (jnp.pad(x, ((0, 0), (0, 0), (past, 0), (0, 0))) for x in (k, v))
            return sink_attention.attend_window(
                q, k, v, self.start, self.last, sinks, window=c.sliding_window, first=self.start, **options
            )
        count = -(-k.shape[2] // self.block)
        pad = count * self.block - k.shape[2]
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (k, v))
        inside = jnp.arange(self.block, dtype=jnp.int32)

        def keys(i):
            k_block, v_block = (jax.lax.dynamic_slice_in_dim(x, i * self.block, self.block, 2) for x in (k, v))
            return sink_attention.Keys(k_block, v_block, self.start[:, None] + i * self.block + inside)

        def queries(i):
            offset = i * self.block
            q_block = jax.lax.dynamic_slice_in_dim(q, offset, self.block, 1)
            where = self.start[:, None] + offset + inside
            return sink_attention.attend(q_block, where, self.last, keys, count, sinks, **options)

        length = q.shape[1]
        q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
        if count == 1:
            return queries(jnp.zeros((), jnp.int32))[:, :length]
        out = jax.lax.map(queries, jnp.arange(count, dtype=jnp.int32))
        return out.transpose(1, 0, 2, 3, 4).reshape(q.shape)[:, :length]
