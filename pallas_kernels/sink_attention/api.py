"""One decode step's attention of a layer, from the raw qkv rows to the heads' outputs, cache written in place.

Numerics are the serving contract's: q and k normed per head and rounded; rotated in float32 and rounded once; scores of
bfloat16 products in float32; exp2 against the running maximum of real keys; probabilities rounded to bfloat16 before
they meet V, their sum in float32; the sink added last; one rounding of the output.

A row whose slot is out of range (padding, or a finished request) writes nothing and gives zeros. Donate the cache, or
XLA copies it first.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import dispatch
from pallas_kernels.sink_attention import mosaic, reference


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """Stacks over the model's layers, and which layer. rope: cos | sin of every position, None for no rotation."""

    q_norm: BFloat16[Array, "L H"]
    k_norm: BFloat16[Array, "L H"]
    sinks: Float32[Array, "L N"]
    layer: int | Int32[Array, ""]
    rope: Float32[Array, "P H"] | None = None
    eps: float = dataclasses.field(default=1e-6, metadata={"static": True})


class Result(NamedTuple):
    """out: bfloat16 [B, N*H]. k, v: the cache with the rows' tokens written."""

    out: BFloat16[Array, "B NH"]
    k: Array
    v: Array


def attend_ring(
    qkv: BFloat16[Array, "B C"],
    weights: Weights,
    k_ring: BFloat16[Array, "Lw S K R H"],
    v_ring: BFloat16[Array, "Lw S K R H"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " B"],
    start: Int32[Array, " B"],
    *,
    window: int,
) -> Result:
    """Window layer ``layer`` of the ring cache: position p of a slot lies at place p % R.

    qkv: rows of N + 2K heads. slots: distinct. start: position of each row's token; it and the window - 1 positions
    before it are attended to.
    """
    implementations = {"mosaic": mosaic.attend_ring, "reference": reference.attend_ring}
    arguments = (qkv, weights, k_ring, v_ring, layer, slots, start)
    return Result(*dispatch.run("sink_attention.ring", implementations, *arguments, window=window))


def attend_pages(
    qkv: BFloat16[Array, "B C"],
    weights: Weights,
    k_pages: BFloat16[Array, "Lf P K page H"],
    v_pages: BFloat16[Array, "Lf P K page H"],
    layer: int | Int32[Array, ""],
    tables: Int32[Array, "S W"],
    slots: Int32[Array, " B"],
    start: Int32[Array, " B"],
) -> Result:
    """Full layer ``layer`` of the paged cache: position p of a slot lies in page tables[slot, p // page].

    Arguments as in ``attend_ring``; all positions up to ``start`` are attended to.
    """
    implementations = {"mosaic": mosaic.attend_pages, "reference": reference.attend_pages}
    arguments = (qkv, weights, k_pages, v_pages, layer, tables, slots, start)
    return Result(*dispatch.run("sink_attention.pages", implementations, *arguments))
