"""Attention with learned sinks, blockwise, in plain jnp: the reference of every attention kernel here.

A sink is one extra softmax logit per query head that has no value: ``p_j = exp(s_j) / (sum_j exp(s_j) + exp(sink))``.
Scores never exist for more than one block of keys at a time. Letters: B rows, T queries, S keys, N query heads, K kv
heads, G = N / K, H head width.

Numerics: products of the operands' dtype accumulated in float32 (true float32 for float32 operands), softmax in
float32, running maximum over real keys only, probabilities rounded to the values' dtype before they meet the values.
``normalise_first`` divides before that rounding, as transformers does (it needs a second pass over the keys);
otherwise the division comes last.

A key row outside the valid range is replaced by zero in V, not only masked in P: stale NaN times zero is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.qk_norm_rope_write.reference import split_qkv, write_pages, write_ring

HIGHEST = jax.lax.Precision.HIGHEST


class _Partial(NamedTuple):
    """Softmax state of some keys: running maximum and denominator [B,K,G,T], unnormalised output [B,K,G,T,H]."""

    m: Float[Array, "B K G T"]
    l: Float[Array, "B K G T"]  # noqa: E741 - the literature's name
    acc: Float[Array, "B K G T H"]


def _precision(dtype) -> jax.lax.Precision | None:
    return HIGHEST if dtype == jnp.float32 else None


def _scores(q, k, mask, scale):
    scores = jnp.einsum("bkgth,bksh->bkgts", q, k, precision=_precision(k.dtype), preferred_element_type=jnp.float32)
    return jnp.where(mask, scores * jnp.float32(scale), -jnp.inf)


def _values(p, v):
    return jnp.einsum(
        "bkgts,bksh->bkgth", p.astype(v.dtype), v, precision=_precision(v.dtype), preferred_element_type=jnp.float32
    )


def _finite(m):
    return jnp.where(m > -jnp.inf, m, 0.0)


def _start(q) -> _Partial:
    return _Partial(
        jnp.full(q.shape[:-1], -jnp.inf, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )


def _absorb(state: _Partial, q, k, v, mask, scale, *, with_values: bool = True) -> _Partial:
    """One more block of keys. mask: bool, broadcastable to [B,K,G,T,S]."""
    scores = _scores(q, k, mask, scale)
    m = jnp.maximum(state.m, jax.lax.stop_gradient(scores.max(-1)))
    p = jnp.exp(scores - _finite(m)[..., None])
    shrink = jnp.exp(state.m - _finite(m))
    acc = state.acc * shrink[..., None] + _values(p, v) if with_values else state.acc
    return _Partial(m, state.l * shrink + p.sum(-1), acc)


def _denominator(state: _Partial, sinks) -> Float[Array, "B K G T"]:
    return state.l + jnp.exp(sinks[None, :, :, None] - _finite(state.m))


class Keys(NamedTuple):
    """One block of keys and values [B,K,S,H] with the position of each, int32 [B,S]; -1 marks an unused place."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    positions: Int[Array, "B S"]


def attend(
    q: Float[Array, "B T N H"],
    q_positions: Int[Array, "B T"],
    last: Int[Array, " B"],
    blocks: Callable[[Int[Array, ""]], Keys],
    num_blocks: int | Int[Array, ""],
    sinks: Float[Array, " N"],
    *,
    scale: float,
    window: int | None = None,
    normalise_first: bool = False,
) -> Float[Array, "B T N H"]:
    """Attention over ``num_blocks`` blocks of keys that ``blocks(i)`` provides.

    q_positions: position of each query. last: position of each row's last real token; later keys are ignored and
    their values zeroed. window: number of keys a query sees, itself included; None for all before it. A static
    ``num_blocks`` gives a scan (differentiable), a traced one a loop. Returns q's dtype.
    """
    batch, length, heads, width = q.shape
    first = jax.eval_shape(blocks, jnp.zeros((), jnp.int32))
    kv_heads = first.k.shape[1]
    group = heads // kv_heads
    qg = q.reshape(batch, length, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    sinks = sinks.astype(jnp.float32).reshape(kv_heads, group)

    def load(i):
        keys = blocks(i)
        known = (keys.positions >= 0) & (keys.positions <= last[:, None])
        seen = visible(q_positions, keys.positions, window) & known[:, None, :]
        v = jnp.where(known[:, None, :, None], keys.v, jnp.zeros((), keys.v.dtype))
        return keys.k, v, seen[:, None, None]

    def run(body, state):
        if isinstance(num_blocks, int):
            if num_blocks == 1:
                return body(jnp.zeros((), jnp.int32), state)
            return jax.lax.scan(lambda s, i: (body(i, s), None), state, jnp.arange(num_blocks, dtype=jnp.int32))[0]
        return jax.lax.fori_loop(0, num_blocks, body, state)

    two_pass = normalise_first and q.dtype != jnp.float32  # in float32 the order of the division changes nothing

    def absorb(i, state):
        k, v, mask = load(i)
        return _absorb(state, qg, k, v, mask, scale, with_values=not two_pass)

    state = run(absorb, _start(qg))
    total = _denominator(state, sinks)
    if two_pass:

        def weigh(i, acc):
            k, v, mask = load(i)
            p = jnp.exp(_scores(qg, k, mask, scale) - _finite(state.m)[..., None]) / total[..., None]
            return acc + _values(p, v)

        out = run(weigh, jnp.zeros_like(state.acc))
    else:
        out = state.acc / total[..., None]
    return out.astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)


def visible(q_positions: Int[Array, "B T"], k_positions: Int[Array, "B S"], window: int | None) -> Bool[Array, "B T S"]:
    """Causal, and within ``window`` keys counting the query's own."""
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def attend_window(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K P+T H"],
    v: Float[Array, "B K P+T H"],
    start: Int[Array, " B"],
    last: Int[Array, " B"],
    sinks: Float[Array, " N"],
    *,
    scale: float,
    window: int,
    first: Int[Array, " B"] | None = None,
    normalise_first: bool = False,
    block: int = 128,
) -> Float[Array, "B T N H"]:
    """Sliding-window attention of T consecutive queries that begin at position ``start``.

    k and v hold P >= window - 1 positions of the past, then the T of the queries: place j is position
    ``start - P + j`` (unused below ``first``, default 0). Work and memory are T x (window + block), whatever T is.
    """
    batch, length, _, _ = q.shape
    past = k.shape[2] - length
    block = min(block, length)
    count = -(-length // block)
    pad = count * block - length
    if pad:
        q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (k, v))
    span = past + block

    def one(i):
        offset = i * block
        q_block = jax.lax.dynamic_slice_in_dim(q, offset, block, 1)
        q_positions = start[:, None] + offset + jnp.arange(block, dtype=jnp.int32)
        k_positions = start[:, None] - past + offset + jnp.arange(span, dtype=jnp.int32)
        if first is not None:
            k_positions = jnp.where(k_positions >= first[:, None], k_positions, -1)
        keys = Keys(*(jax.lax.dynamic_slice_in_dim(x, offset, span, 2) for x in (k, v)), k_positions)
        return attend(
            q_block,
            q_positions,
            last,
            lambda _: keys,
            1,
            sinks,
            scale=scale,
            window=window,
            normalise_first=normalise_first,
        )

    if count == 1:
        return one(jnp.zeros((), jnp.int32))[:, :length]
    out = jax.lax.map(one, jnp.arange(count, dtype=jnp.int32))
    return out.transpose(1, 0, 2, 3, 4).reshape(batch, count * block, *q.shape[2:])[:, :length]


# -- few tokens per row, from qkv to the written cache: what the decode kernels do ------------------------------------

PAGES_PER_BLOCK = 8  # pages scored at once


def _flat(qkv, slots, start, count):
    """Rows of T tokens (or of one) -> (a row a token, their slots, their positions) and the positions [B, T]."""
    rows, tokens = qkv.shape[0], qkv.shape[1] if qkv.ndim == 3 else 1
    step = jnp.arange(tokens, dtype=jnp.int32)
    there = jnp.broadcast_to(step < (tokens if count is None else count[:, None]), (rows, tokens))
    positions = start[:, None] + step
    each = jnp.where(there, slots[:, None], -1).reshape(-1)
    return (qkv.reshape(rows * tokens, -1), each, positions.reshape(-1)), jnp.where(there, positions, -1)


def _decode(q, positions, real, blocks, num_blocks, weights, shape, window=None):
    """q [B T, N, H]; positions [B, T], -1 where there is no token; real [B]. Outputs in the form ``shape`` of qkv."""
    rows, tokens = positions.shape
    out = attend(
        q.reshape(rows, tokens, *q.shape[1:]),
        positions,
        jnp.where(real, jnp.max(positions, axis=1), -1),
        blocks,
        num_blocks,
        weights.sinks[weights.layer],
        scale=q.shape[-1] ** -0.5,
        window=window,
    )
    out = out.reshape(rows, tokens, -1)
    out = jnp.where((real[:, None] & (positions >= 0))[..., None], out, jnp.zeros((), q.dtype))
    return out.reshape(*shape[:-1], -1)


def _split(qkv, weights, positions, kv_heads):
    norms = weights.q_norm[weights.layer], weights.k_norm[weights.layer]
    return split_qkv(qkv, *norms, positions, weights.rope, kv_heads=kv_heads, eps=weights.eps)


def attend_ring(qkv, weights, k_ring, v_ring, layer, slots, start, *, window, count=None):
    """See ``api.attend_ring``."""
    _, total, kv_heads, ring, _ = k_ring.shape
    real = (slots >= 0) & (slots < total)
    (flat, each, at), positions = _flat(qkv, slots, start, count)
    q, k, v = _split(flat, weights, at, kv_heads)
    k_ring, v_ring = (write_ring(c, layer, each, at, x) for c, x in ((k_ring, k), (v_ring, v)))
    last = jnp.maximum(jnp.max(positions, axis=1), 0)
    places = last[:, None] - (last[:, None] - jnp.arange(ring, dtype=jnp.int32)) % ring  # position in each place
    mine = (c[layer, jnp.where(real, slots, 0)] for c in (k_ring, v_ring))
    keys = Keys(*mine, places)
    return _decode(q, positions, real, lambda _: keys, 1, weights, qkv.shape, window), k_ring, v_ring


def attend_pages(qkv, weights, k_pages, v_pages, layer, tables, slots, start, *, count=None, arrivals=None):
    """See ``api.attend_pages``."""
    _, pages, kv_heads, page, width = k_pages.shape
    real = (slots >= 0) & (slots < tables.shape[0])
    (flat, each, at), positions = _flat(qkv, slots, start, count)
    q, k, v = _split(flat, weights, at, kv_heads)
    k_pages, v_pages = (write_pages(c, layer, tables, each, at, x) for c, x in ((k_pages, k), (v_pages, v)))
    mine = tables.at[slots].get(mode="clip")
    flat = [c.reshape(-1, kv_heads, page, width) for c in (k_pages, v_pages)]  # a gather with an offset, no slice
    inside = jnp.arange(PAGES_PER_BLOCK, dtype=jnp.int32)

    def keys(block):
        entries = block * PAGES_PER_BLOCK + inside
        chosen = layer * pages + mine.at[:, entries].get(mode="clip")
        joined = (c.at[chosen].get(mode="clip").swapaxes(1, 2) for c in flat)  # [B, K, pages, page, H]
        rows = jnp.arange(PAGES_PER_BLOCK * page, dtype=jnp.int32) + block * (PAGES_PER_BLOCK * page)
        shape = (start.shape[0], kv_heads, rows.size, width)
        return Keys(*(x.reshape(shape) for x in joined), jnp.broadcast_to(rows, (start.shape[0], rows.size)))

    blocks = jnp.max(jnp.where(real[:, None], positions, 0)) // (PAGES_PER_BLOCK * page) + 1
    out = _decode(q, positions, real, keys, blocks, weights, qkv.shape)
    return out, k_pages, v_pages, arrivals
