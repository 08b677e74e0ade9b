"""Attention of many tokens: pieces of several requests against the paged cache or the rings, with learned sinks.

Numerics as in ``sink_attention``: bfloat16 products in float32; exp2 against the running maximum of real keys;
probabilities rounded to bfloat16 before they meet V, their sum in float32; the sink last; one rounding of the output.
Nothing that no token of the request wrote is read into a result.

Letters: T places, N query heads, K kv heads, H head width, C = (N + 2 K) H.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import dispatch
from pallas_kernels.flash_attention import mosaic, reference, write


def write_cache(
    qkv: BFloat16[Array, "T C"],
    destination: Int32[Array, " T"],
    k: BFloat16[Array, "L U K R H"],
    v: BFloat16[Array, "L U K R H"],
    layer: int | Int32[Array, ""],
    after: jax.Array | None = None,
) -> tuple[Array, Array]:
    """Keys and values of the tokens into layer ``layer`` of a cache, in place (donate it): unit and row
    ``destination`` // R and % R; -1 writes nothing. after: something that has to be computed first."""
    implementations = {"mosaic": write.mosaic, "reference": write.reference}
    return dispatch.run("flash_attention.write", implementations, qkv, destination, k, v, layer, after)


def attend_pages(
    qkv: BFloat16[Array, "T C"],
    tiles: Int32[Array, "T16 8"],
    sinks: Float32[Array, "L N"],
    sinks_layer: int,
    k_pages: BFloat16[Array, "Lf P K page H"],
    v_pages: BFloat16[Array, "Lf P K page H"],
    layer: int | Int32[Array, ""],
    tables: Int32[Array, "S W"],
    *,
    window: int | None = None,
) -> BFloat16[Array, "T NH"]:
    """Every token attends to its request's positions up to its own (to the last ``window`` of them), which are in the
    pages already. qkv: q normed and rotated. tiles: see ``Pieces.tiles``. Places without a token give zeros.

    Cost: 4 N H operations for each pair of a token and a key."""
    implementations = {"mosaic": mosaic.attend_pages, "reference": reference.attend_pages}
    arguments = (qkv, tiles, sinks, sinks_layer, k_pages, v_pages, layer, tables)
    return dispatch.run("flash_attention.pages", implementations, *arguments, window=window)


def attend_ring(
    qkv: BFloat16[Array, "T C"],
    tiles: Int32[Array, "T16 8"],
    sinks: Float32[Array, "L N"],
    sinks_layer: int,
    k_ring: BFloat16[Array, "Lw S K R H"],
    v_ring: BFloat16[Array, "Lw S K R H"],
    layer: int | Int32[Array, ""],
    *,
    window: int,
) -> BFloat16[Array, "T NH"]:
    """Every token attends to itself and the window - 1 positions before it: those of its own piece from ``qkv``
    (q, k normed and rotated), earlier ones from the ring, which does not hold the piece yet."""
    implementations = {"mosaic": mosaic.attend_ring, "reference": reference.attend_ring}
    arguments = (qkv, tiles, sinks, sinks_layer, k_ring, v_ring, layer)
    return dispatch.run("flash_attention.ring", implementations, *arguments, window=window)
