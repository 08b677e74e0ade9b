"""Routed experts on packed or plain stacks, in plain jnp: gathered weights for few tokens, expert blocks for many.

Both paths follow the same roundings; they differ in float32 summation order only. Letters as in ``flint_jax.model``;
P = M * A (token, expert) pairs.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flint_jax.numerics import SCALED, Adapted, Matrix, Numerics, project, silu

# Gathered weights are materialised, in the compute dtype: three full-size bf16 tokens' worth.
GATHER_BYTES = 128 << 20
BLOCK = 64  # tokens of one expert that are multiplied together in the block path
# In training, up to this many times the chosen experts' products: all experts on all tokens are plain matrix products,
# while the gradient of gathered weights is a scatter with thousands of collisions.
EVERYWHERE = 4


# Bytes of expert weights that the block path may gather at once; None: as serving does it.
_grouped: contextvars.ContextVar[int | None] = contextvars.ContextVar("grouped", default=None)


@contextlib.contextmanager
def grouped(nbytes: int) -> Iterator[None]:
    """Trace experts for training: always in blocks, all of them at once where ``nbytes`` hold their weights.

    The gradient of a loop over blocks adds up whole stacks of weights once a block; that of one batched product does
    so once.
    """
    token = _grouped.set(nbytes)
    try:
        yield
    finally:
        _grouped.reset(token)


class Routing(NamedTuple):
    """Router logits [M,E] and the chosen experts [M,A], best first, with their weights (float32)."""

    logits: Float[Array, "M E"]
    ids: Int[Array, "M A"]
    weights: Float[Array, "M A"]


def experts(
    x: Float[Array, "M D"],
    routing: Routing,
    gate_up: Matrix,
    down: Matrix,
    *,
    layer: int,
    numerics: Numerics,
    each: Callable[[Array], Array] = lambda outputs: outputs,
) -> Float[Array, "M D"]:
    """Weighted sum of each token's experts. gate_up [Lm,E,2F,D] and down [Lm,E,D,F] are whole stacks.

    each: sees, and may replace, the experts' outputs [M,A,D] before they are weighted.
    """
    tokens, active = routing.ids.shape
    per_pair = 3 * math.prod(down.shape[-2:]) * x.dtype.itemsize
    flat = _flatten_experts(gate_up), _flatten_experts(down)
    ids = routing.ids + layer * gate_up.shape[1]
    small = tokens * active * per_pair <= GATHER_BYTES and _grouped.get() is None
    if _grouped.get() is not None and gate_up.shape[1] <= EVERYWHERE * active and not isinstance(gate_up, Adapted):
        y = _everywhere(x, routing.ids, *(jax.tree.map(lambda a: a[layer], w) for w in (gate_up, down)), numerics)
    else:
        run = _gathered if small else functools.partial(_blocked, per_layer=gate_up.shape[1])
        y = run(x, ids, *flat, numerics)
    y = each(y).astype(jnp.float32)
    # float32 sum in rank order, one rounding.
    total = jnp.zeros((tokens, x.shape[1]), jnp.float32)
    for rank in range(active):
        total = total + routing.weights[:, rank, None] * y[:, rank]
    return numerics.round(total)


def _flatten_experts(stack: Matrix) -> Matrix:
    """[Lm, E, ...] -> [Lm*E, ...]: one gather with an offset instead of a slice of a whole layer's experts."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), stack)


def _activate(gate_up: Float[Array, "... F2"], numerics: Numerics) -> Float[Array, "... F"]:
    """float32 accumulators -> rounded silu(gate) * up. Serving rounds once, transformers three times."""
    if not numerics.serving:
        gate_up = numerics.round(gate_up).astype(jnp.float32)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    act = silu(gate)
    if not numerics.serving:
        act = numerics.round(act).astype(jnp.float32)
    return numerics.round(act * up)


def _batched_project(x: Float[Array, "P C"], w: Matrix) -> Float[Array, "P R"]:
    """One matrix per row of x."""
    if isinstance(w, Adapted):
        low = _batched_project(x, w.down.astype(x.dtype))
        return _batched_project(x, w.base) + _batched_project(low, w.up) * jnp.float32(w.scale)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    quantised = isinstance(w, SCALED)
    values = w.values(x.dtype) if quantised else w
    y = jnp.einsum("pc,prc->pr", x, values, precision=precision, preferred_element_type=jnp.float32)
    return y * w.row_scale() if quantised else y


def _gathered(x, ids, gate_up, down, numerics) -> Float[Array, "M A D"]:
    tokens, active = ids.shape
    pairs = ids.reshape(-1)
    repeated = jnp.repeat(x, active, axis=0, total_repeat_length=tokens * active)
    act = _activate(_batched_project(repeated, gate_up[pairs]), numerics)
    return numerics.round(_batched_project(act, down[pairs])).reshape(tokens, active, -1)


def _everywhere(x, ids, gate_up, down, numerics) -> Float[Array, "M A D"]:
    """Every expert of the layer [E, ...] on every token, then the chosen ones."""
    act = _activate(jax.vmap(lambda w: project(x, w))(gate_up), numerics)
    y = numerics.round(jax.vmap(project)(act, down))
    # A sum with one term that is not 0: exact in any dtype, and one pass over y where a product would transpose it.
    number = jnp.arange(y.shape[0], dtype=ids.dtype)[:, None, None]
    picked = [jnp.where(number == ids[None, :, rank, None], y, 0).sum(0) for rank in range(ids.shape[1])]
    return jnp.stack(picked, axis=1)


def _blocked(x, ids, gate_up, down, numerics, per_layer) -> Float[Array, "M A D"]:
    """Pairs sorted by expert, each expert's run padded to whole blocks, one block after the other (or all at once)."""
    tokens, active = ids.shape
    pairs = tokens * active
    block = min(BLOCK, max(8, pairs // 8))
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sorted_ids = flat[order]
    # Runs of equal ids in the sorted order, without a table over all experts of all layers.
    is_first = jnp.concatenate([jnp.ones((1,), bool), sorted_ids[1:] != sorted_ids[:-1]])
    position = jnp.arange(pairs, dtype=jnp.int32)
    run_start = jax.lax.cummax(jnp.where(is_first, position, 0))
    within = position - run_start
    opens_block = within % block == 0
    block_of_pair = jnp.cumsum(opens_block, dtype=jnp.int32) - 1
    place = block_of_pair * block + within % block
    count = -(-pairs // block) + min(per_layer, pairs)  # most blocks that any routing can need
    block_expert = jnp.zeros((count,), jnp.int32).at[block_of_pair].set(sorted_ids)
    padded = jnp.zeros((count * block, x.shape[1]), x.dtype).at[place].set(x[order // active])

    def one(args):
        rows, expert = args
        up, down_w = (jax.tree.map(lambda a: a[expert], w) for w in (gate_up, down))
        act = _activate(project(rows, up), numerics)
        return numerics.round(project(act, down_w))

    blocks = padded.reshape(count, block, -1), block_expert
    per_block = 3 * math.prod(down.shape[-2:]) * x.dtype.itemsize
    at_once = count * per_block <= (_grouped.get() or 0)
    y = (jax.vmap(one)(blocks) if at_once else jax.lax.map(one, blocks)).reshape(count * block, -1)
    unsorted = jnp.zeros((pairs,), jnp.int32).at[order].set(place)
    return y[unsorted].reshape(tokens, active, -1)
