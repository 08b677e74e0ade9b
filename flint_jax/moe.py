"""Routed experts: on tiles in kernels (``pallas_kernels.moe_gemm``), else in plain jnp: gathered weights for few
tokens, expert blocks for many.

All paths follow the same roundings; they differ in float32 summation order only. Letters as in ``flint_jax.model``;
P = M * A (token, expert) pairs.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flint_jax.numerics import SCALED, Adapted, Matrix, Numerics, project, silu
from pallas_kernels import device, dispatch, moe_gemm
from pallas_kernels.layout import Tiles

# Gathered weights are materialised, in the compute dtype: three full-size bf16 tokens' worth.
GATHER_BYTES = 128 << 20
# Unpacked weights that the block path has at once; on a GPU, the most tokens of one expert that meet them together.
GROUP_BYTES, CPU_GROUP_BYTES = 256 << 20, 1 << 20
MOST_ROWS = 512
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


class Blocks(NamedTuple):
    """How the block path cuts its work: tokens of one expert (``rows``) make a block, ``group`` blocks run at a time.

    skip: leave out groups without a token: at full size four of ten, with 4,096 tokens and an even routing (an H200
    takes 3.3 ms a layer instead of 4.4). XLA keeps the decision inside a GPU's graph, so that the host is not asked.
    False computes them all.
    """

    rows: int
    group: int
    skip: bool = True


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
    cut: Blocks | None = None,
    real: Bool[Array, " M"] | None = None,
) -> Float[Array, "M D"]:
    """Weighted sum of each token's experts. gate_up [Lm,E,2F,D] and down [Lm,E,D,F] are whole stacks.

    each: sees, and may replace, the experts' outputs [M,A,D] before they are weighted. cut: take the block path, cut
    like this; by default ``blocks`` says how, and few tokens gather their weights instead. real: rows that count; the
    kernels read no weights for the others, whose results are then anything.
    """
    y = None
    if cut is None and _grouped.get() is None and numerics.serving and isinstance(gate_up, Tiles):
        implementations = {"grouped": _on_tensor_cores, dispatch.REFERENCE: lambda *_: None}
        y = dispatch.run("moe.experts", implementations, x, routing, real, gate_up, down, layer, numerics)
    if y is None:
        y = _plain(x, routing, gate_up, down, layer, numerics, cut)
    y = each(y).astype(jnp.float32)
    # float32 sum in rank order, one rounding.
    total = jnp.zeros((x.shape[0], x.shape[1]), jnp.float32)
    for rank in range(routing.ids.shape[1]):
        total = total + routing.weights[:, rank, None] * y[:, rank]
    return numerics.round(total)


def _on_tensor_cores(x, routing: Routing, real, gate_up, down, layer, numerics: Numerics) -> Float[Array, "M A D"]:
    """Grouped products in kernels; raises KernelUnsupported. Whoever differentiates gets the plain path."""
    number = gate_up.shape[1]

    @jax.custom_jvp
    def run(x, routing, real, gate_up, down):
        ids = routing.ids if real is None else jnp.where(real[:, None], routing.ids, number)
        groups = moe_gemm.group(ids, number)
        act = moe_gemm.mosaic.gate_up(moe_gemm.product_order(x), groups, gate_up, layer)
        y = moe_gemm.mosaic.down(act, groups, down, layer)
        return y.at[groups.place].get(mode="promise_in_bounds")

    @run.defjvp
    def _(primals, tangents):
        def plain(x, routing, real, gate_up, down):
            return _plain(x, routing, gate_up, down, layer, numerics, None)

        return jax.jvp(plain, primals, tangents)

    return run(x, routing, real, gate_up, down)


def _plain(x, routing: Routing, gate_up: Matrix, down: Matrix, layer, numerics: Numerics, cut) -> Float[Array, "M A D"]:
    tokens, active = routing.ids.shape
    experts_here, expert_bytes = gate_up.shape[1], 3 * math.prod(down.shape[-2:]) * x.dtype.itemsize
    flat = _flatten_experts(gate_up), _flatten_experts(down)
    ids = routing.ids + layer * experts_here
    training, pairs = _grouped.get(), tokens * active
    if training is not None and experts_here <= EVERYWHERE * active and not isinstance(gate_up, Adapted):
        y = _everywhere(x, routing.ids, *(jax.tree.map(lambda a: a[layer], w) for w in (gate_up, down)), numerics)
    elif training is None and cut is None and pairs * expert_bytes <= GATHER_BYTES:
        y = _gathered(x, ids, *flat, numerics)
    else:
        if cut is None:
            packed = isinstance(gate_up.base if isinstance(gate_up, Adapted) else gate_up, SCALED)
            cut = blocks(pairs, experts_here, expert_bytes, packed=packed, training=training)
        y = _blocked(x, ids, *flat, numerics, experts_here, cut)
    return y


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


def blocks(pairs: int, experts: int, expert_bytes: int, *, packed: bool, training: int | None = None) -> Blocks:
    """How to cut ``pairs`` over ``experts`` of which each has ``expert_bytes`` of weights in the compute dtype.

    Every block unpacks its expert's weights. At full size that takes an H200 as long as multiplying them with 330
    tokens: there, blocks as large as an expert's usual share (and a quarter) are best, and many at a time, since one
    has too little work for the chip. A CPU gains from unpacking (``packed``) what its cache holds at a time.
    training: what ``grouped`` was given.
    """
    rows, room = 64, CPU_GROUP_BYTES if packed else 0
    if training is None and device.current().capability > device.CPU.capability:
        room = GROUP_BYTES
        while rows < min(MOST_ROWS, 1.25 * pairs / experts):
            rows *= 2
    rows = min(rows, max(8, pairs // 8))
    if training is None:
        return Blocks(rows, max(1, room // expert_bytes))
    most = _most_blocks(pairs, experts, rows)
    return Blocks(rows, most if most * expert_bytes <= training else 1, skip=False)


def _most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Blocks that any routing can need."""
    return -(-pairs // rows) + min(experts, pairs)


def _blocked(x, ids, gate_up, down, numerics, per_layer, cut: Blocks) -> Float[Array, "M A D"]:
    """Pairs sorted by expert, each expert's run cut into blocks, some blocks at a time."""
    tokens, active = ids.shape
    pairs = tokens * active
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sorted_ids = flat[order]
    # Runs of equal ids in the sorted order, without a table over all experts of all layers.
    is_first = jnp.concatenate([jnp.ones((1,), bool), sorted_ids[1:] != sorted_ids[:-1]])
    position = jnp.arange(pairs, dtype=jnp.int32)
    run_start = jax.lax.cummax(jnp.where(is_first, position, 0))
    within = position - run_start
    opens_block = within % cut.rows == 0
    block_of_pair = jnp.cumsum(opens_block, dtype=jnp.int32) - 1
    place = block_of_pair * cut.rows + within % cut.rows
    most = _most_blocks(pairs, per_layer, cut.rows)
    group = min(cut.group, most)
    groups = -(-most // group)
    expert = jnp.zeros((groups * group,), jnp.int32).at[block_of_pair].set(sorted_ids)
    # The token of each row of each block. Rows that are nobody's are computed from token 0, and never read.
    token = jnp.zeros((groups * group * cut.rows,), jnp.int32).at[place].set(order // active)
    token, expert = token.reshape(groups, group, cut.rows), expert.reshape(groups, group)

    def run(token, expert):
        up, down_w = (jax.tree.map(lambda a: a.at[expert].get(mode="promise_in_bounds"), w) for w in (gate_up, down))
        rows = x.at[token].get(mode="promise_in_bounds")
        act = _activate(jax.vmap(project)(rows, up), numerics)
        return numerics.round(jax.vmap(project)(act, down_w))

    if groups == 1:
        y = run(token[0], expert[0])
    elif not cut.skip:
        y = jax.lax.map(lambda args: run(*args), (token, expert))
    else:
        needed = jnp.arange(groups, dtype=jnp.int32) * group <= block_of_pair[-1]
        nothing = jnp.zeros((group, cut.rows, x.shape[1]), numerics.dtype)
        y = jax.lax.map(lambda args: jax.lax.cond(args[0], run, lambda *_: nothing, *args[1:]), (needed, token, expert))
    unsorted = jnp.zeros((pairs,), jnp.int32).at[order].set(place)
    return y.reshape(-1, x.shape[1])[unsorted].reshape(tokens, active, -1)
