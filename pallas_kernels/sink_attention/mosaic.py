"""Decode attention for NVIDIA GPUs: 8 query heads per kv head, heads of 128 values.

Here the shapes are checked and a kernel with its grid is chosen: ``window`` for ring caches, ``spans`` for one row and
``pages`` for several over a paged cache. What their blocks have in common is in ``block``, a warp's part in ``tile``.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import device, emit, tuned
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.qk_norm_rope_write import mosaic as write
from pallas_kernels.sink_attention import pages, spans, tile, window

MAX_ROWS = 256


def _check(qkv, weights, cache, slots) -> int:
    rows, columns = qkv.shape
    kv_heads, width = cache.shape[2], cache.shape[4]
    if qkv.dtype != jnp.bfloat16 or cache.dtype != jnp.bfloat16 or weights.q_norm.dtype != jnp.bfloat16:
        raise KernelUnsupported(f"qkv of {qkv.dtype}, cache of {cache.dtype}, norms of {weights.q_norm.dtype}")
    if width != tile.WIDTH or columns != (tile.HEADS + 2) * kv_heads * width:
        raise KernelUnsupported(
            f"{columns} columns for {kv_heads} kv heads of {width}: need 8 query heads each, of 128"
        )
    if rows > MAX_ROWS:
        raise KernelUnsupported(f"{rows} rows; the kernel takes up to {MAX_ROWS}")
    if slots.shape != (rows,):
        raise ValueError(f"{rows} rows of qkv, slots of shape {slots.shape}")
    return kv_heads


def _check_block(warps: int, stages: int) -> None:
    if warps not in (4, 8):
        raise ValueError(f"{warps} warps: expected 4 or 8")
    room = 227 if device.current().capability[0] in (9, 10) else 99  # KB that one block may have
    need = warps * stages * tile.UNIT // 1024 + 8
    if need > room:
        raise KernelUnsupported(f"{need} KB of shared memory; the device has {room}")


def _operands(qkv, weights, layer, slots, start) -> list:
    """Those of ``Spec.names``."""
    index = emit.index_operand(layer, weights.layer)
    rope = [] if weights.rope is None else [weights.rope]
    return [index, qkv, weights.q_norm, weights.k_norm, weights.sinks, slots, start, *rope]


def _common(qkv, weights, kv_heads: int, slots: int, fresh: bool) -> dict:
    """The fields of ``Spec`` but for warps and stages."""
    return {
        "rows": qkv.shape[0],
        "kv_heads": kv_heads,
        "slots": slots,
        "eps": weights.eps,
        "positions": 0 if weights.rope is None else weights.rope.shape[0],
        "fresh": fresh,
    }


def _each_token(qkv, slots, start, count):
    """Rows of T consecutive tokens -> a row a token, slot -1 for tokens that are not there."""
    rows, tokens, columns = qkv.shape
    step = jnp.arange(tokens, dtype=jnp.int32)
    there = step < (tokens if count is None else count[:, None])
    slots = jnp.where(there, slots[:, None], -1)
    return qkv.reshape(rows * tokens, columns), slots.reshape(-1), (start[:, None] + step).reshape(-1)


def window_splits(rows: int, kv_heads: int, cores: int) -> int:
    """Blocks of a cluster: as many as still run all at once, a power of two up to 8."""
    return next((s for s in (8, 4, 2) if s * rows * kv_heads <= cores), 1)


def window_rule(rows: int, kv_heads: int, cores: int, splits: int | None = None) -> dict[str, int]:
    """Options of ``attend_ring`` where nothing was measured; 8 warps while a block has a core to itself."""
    splits = splits or window_splits(rows, kv_heads, cores)
    return {"splits": splits, "warps": 8 if rows * kv_heads * splits <= cores else 4, "stages": 3}


def attend_ring(
    qkv, weights, k_ring, v_ring, layer, slots, start, *, window: int, count=None, splits=None, warps=None, stages=None
):
    """See ``api.attend_ring``. splits, warps, stages: instead of what was measured."""
    options = {"splits": splits, "warps": warps, "stages": stages}
    if qkv.ndim == 3:
        rows = _each_token(qkv, slots, start, count)
        k_ring, v_ring = write.write_ring(rows[0], weights, k_ring, v_ring, layer, *rows[1:])
        out = _ring(rows[0], weights, k_ring, v_ring, layer, *rows[1:], window, False, options)[0]
        return out.reshape(*qkv.shape[:2], -1), k_ring, v_ring
    return tuple(_ring(qkv, weights, k_ring, v_ring, layer, slots, start, window, True, options))


def _ring(qkv, weights, k_ring, v_ring, layer, slots, start, seen: int, fresh: bool, given: dict):
    kv_heads = _check(qkv, weights, k_ring, slots)
    rows, ring = qkv.shape[0], k_ring.shape[3]
    config = window_rule(rows, kv_heads, device.current().cores, given["splits"])
    config |= {k: v for k, v in given.items() if v is not None}
    if all(value is None for value in given.values()):
        config = tuned.lookup("attend_ring", f"window{seen} k{kv_heads} b{rows}", config)
    if config["splits"] not in (1, 2, 4, 8):
        raise ValueError(f"{config['splits']} splits: expected 1, 2, 4 or 8")
    spec = window.Window(**_common(qkv, weights, kv_heads, k_ring.shape[1], fresh), **config, window=seen, ring=ring)
    _check_block(spec.warps, min(spec.stages, spec.rounds))
    if ring % tile.KEYS or ring < spec.units * tile.KEYS:
        raise KernelUnsupported(f"a ring of {ring} places for a window of {seen}")
    return window.kernel(spec)(*_operands(qkv, weights, layer, slots, start), k_ring, v_ring)


# -- full layers ---------------------------------------------------------------------------------------------------

PAGES_RULE = {"warps": 8, "stages": 3, "blocks_per_core": 1}


LONG = 16_384  # tokens that a block table has room for, beyond which many blocks matter more than few launches' delay


def spans_rule(kv_heads: int, cores: int, room: int) -> dict[str, int]:
    """Options for one row where nothing was measured; room: tokens that the block table can name.

    Short contexts take clusters of 8 blocks: 1K tokens are one cluster's and need no meeting in memory. But a cluster
    lives in a part of the chip whose cores are no multiple of 8: on an H200 (132 cores) 16 of them took two turns and
    72 us for 100K tokens, 12 of them 68 us. Pairs fit everywhere: 62 us, and 6.9 instead of 5.5 us for 1K.
    """
    if room > LONG:
        return {"warps": 8, "stages": 2, "cluster": 2, "parts": max(1, cores // (2 * kv_heads))}
    return {"warps": 8, "stages": 2, "cluster": 8, "parts": max(1, cores * 3 // (4 * 8 * kv_heads))}


def new_arrivals(rows: int, kv_heads: int):
    """The counters that blocks of ``attend_pages`` meet at: zeros, which every launch leaves behind again."""
    return jnp.zeros((rows * kv_heads * tile.HEADS,), jnp.int32)


def attend_pages(qkv, weights, k_pages, v_pages, layer, tables, slots, start, *, count=None, arrivals=None, **options):
    """See ``api.attend_pages``. options: of ``PAGES_RULE`` or ``spans_rule``, instead of what was measured."""
    kv_heads = k_pages.shape[2]
    if qkv.ndim == 3:
        rows = _each_token(qkv, slots, start, count)
        k_pages, v_pages = write.write_pages(rows[0], weights, k_pages, v_pages, layer, tables, *rows[1:])
        arrivals = new_arrivals(len(rows[0]), kv_heads) if arrivals is None else arrivals
        out, arrivals = _pages(rows[0], weights, k_pages, v_pages, layer, tables, *rows[1:], arrivals, False, options)
        return out.reshape(*qkv.shape[:2], -1), k_pages, v_pages, arrivals
    arrivals = new_arrivals(len(qkv), kv_heads) if arrivals is None else arrivals
    out, arrivals, k_pages, v_pages = _pages(
        qkv, weights, k_pages, v_pages, layer, tables, slots, start, arrivals, True, options
    )
    return out, k_pages, v_pages, arrivals


def _pages(qkv, weights, k_pages, v_pages, layer, tables, slots, start, arrivals, fresh: bool, options: dict):
    kv_heads = _check(qkv, weights, k_pages, slots)
    page, cores = k_pages.shape[3], device.current().cores
    single = len(qkv) == 1 and "blocks_per_core" not in options
    room = tables.shape[1] * page
    rule = spans_rule(kv_heads, cores, room) if single else PAGES_RULE
    if options.keys() - rule.keys():
        raise ValueError(f"options {sorted(options)}: expected some of {sorted(rule)}")
    op, key = "attend_pages", f"k{kv_heads} b{len(qkv)}"
    if single:
        op, key = "attend_spans", f"{key} {'long' if room > LONG else 'short'}"
    config = rule | options if options else tuned.lookup(op, key, rule)
    if page % tile.KEYS or page & (page - 1):
        raise KernelUnsupported(f"pages of {page} tokens")
    if config["stages"] < 2:
        raise ValueError(f"{config['stages']} stages: expected 2 or more")
    _check_block(config["warps"], config["stages"])
    if arrivals.shape[0] < qkv.shape[0] * kv_heads * tile.HEADS or arrivals.dtype != jnp.int32:
        raise ValueError(f"arrivals {arrivals.dtype}{arrivals.shape}: expected {qkv.shape[0]} x {kv_heads} x 8 int32")
    common = _common(qkv, weights, kv_heads, tables.shape[0], fresh) | {
        "warps": config["warps"],
        "stages": config["stages"],
        "page": page,
        "pages": k_pages.shape[1],
        "width": tables.shape[1],
    }
    if single:
        if config["cluster"] not in (1, 2, 4, 8):
            raise ValueError(f"clusters of {config['cluster']}: expected 1, 2, 4 or 8")
        run = spans.kernel(spans.Spans(**common, cluster=config["cluster"], parts=config["parts"]))
    else:
        run = pages.kernel(pages.Pages(**common, blocks=cores * config["blocks_per_core"]))
    operands = [*_operands(qkv, weights, layer, slots, start), tables]
    operands += [arrivals, k_pages, v_pages] if fresh else [k_pages, v_pages, arrivals]
    out, _, _, *written = run(*operands)
    return out, *written
