"""One decode step's attention of a layer, from the raw qkv rows to the heads' outputs, cache written in place; of one
token per row, or of a few (a request's guesses at what comes next, to be verified at once).

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
    """out: bfloat16 [B, N*H] or [B, T, N*H]. k, v: the cache with the rows' tokens written. arrivals: see
    ``attend_pages``."""

    out: BFloat16[Array, "*B NH"]
    k: Array
    v: Array
    arrivals: Int32[Array, " A"] | None = None


def attend_ring(
    qkv: BFloat16[Array, "*B C"],
    weights: Weights,
    k_ring: BFloat16[Array, "Lw S K R H"],
    v_ring: BFloat16[Array, "Lw S K R H"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " B"],
    start: Int32[Array, " B"],
    *,
    window: int,
    count: Int32[Array, " B"] | None = None,
) -> Result:
    """Window layer ``layer`` of the ring cache: position p of a slot lies at place p % R.

    qkv: rows of N + 2K heads: [B, C], one token each, or [B, T, C], T consecutive tokens each, which also see each
    other's keys causally. slots: distinct. start: position of each row's (first) token; a token and the window - 1
    positions before it are attended to. count, only with T: how many of a row's tokens are there, all when left out;
    the others write nothing and give zeros. The ring needs window + T - 1 places.
    """
    if qkv.ndim == 3 and k_ring.shape[3] < window + qkv.shape[1] - 1:
        raise ValueError(
            f"{qkv.shape[1]} tokens at once and a window of {window} in a ring of {k_ring.shape[3]} places"
        )
    implementations = {"mosaic": mosaic.attend_ring, "reference": reference.attend_ring}
    arguments = (qkv, weights, k_ring, v_ring, layer, slots, start)
    return Result(*dispatch.run("sink_attention.ring", implementations, *arguments, window=window, count=count))


def attend_pages(
    qkv: BFloat16[Array, "*B C"],
    weights: Weights,
    k_pages: BFloat16[Array, "Lf P K page H"],
    v_pages: BFloat16[Array, "Lf P K page H"],
    layer: int | Int32[Array, ""],
    tables: Int32[Array, "S W"],
    slots: Int32[Array, " B"],
    start: Int32[Array, " B"],
    *,
    count: Int32[Array, " B"] | None = None,
    arrivals: Int32[Array, " A"] | None = None,
) -> Result:
    """Full layer ``layer`` of the paged cache: position p of a slot lies in page tables[slot, p // page].

    Arguments as in ``attend_ring``; all positions up to a token's own are attended to. arrivals: counters that the
    kernel's blocks meet at, from ``new_arrivals`` or the call before; when left out they are made anew by one more
    launch.
    """
    implementations = {"mosaic": mosaic.attend_pages, "reference": reference.attend_pages}
    arguments = (qkv, weights, k_pages, v_pages, layer, tables, slots, start)
    run = dispatch.run("sink_attention.pages", implementations, *arguments, count=count, arrivals=arrivals)
    return Result(*run)


def new_arrivals(rows: int, kv_heads: int) -> Int32[Array, " A"]:
    """Counters for ``attend_pages`` with up to ``rows`` tokens; calls that follow each other can share them."""
    return mosaic.new_arrivals(rows, kv_heads)
