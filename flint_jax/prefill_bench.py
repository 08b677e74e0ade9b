"""``python -m flint_jax bench prefill``: a prefill step alone, random weights, against the operations it needs."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flint_jax import step, tiles
from flint_jax.cache import PAGE, table_width
from flint_jax.config import FULL, FlintConfig
from flint_jax.device_trace import traced
from flint_jax.model import Flint
from flint_jax.number_flags import whole, wholes
from flint_jax.numerics import Numerics

ROWS = 8


def arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's flags."""
    parser.add_argument("--tokens", type=wholes(16), default="512", help="tokens of the step, comma-separated")
    parser.add_argument("--start", type=wholes(0), default="0", help="tokens in the cache before, comma-separated")
    parser.add_argument("--format", default="nvfp4", help="nvfp4, bf16 or both, comma-separated")
    parser.add_argument("--preset", default="full", choices=("full", "tiny"))
    parser.add_argument("--layers", type=whole(1), help="fewer layers")
    parser.add_argument("--profile", action="store_true", help="after each row, a table of device time by kernel")


def operations(config: FlintConfig, tokens: int, start: int) -> float:
    """Multiplications and additions of one piece, without the head."""
    d, q, kv = config.hidden_size, config.q_size, config.kv_size
    expert = 3 * d * config.moe_intermediate_size * config.num_experts_per_tok
    shared = 3 * d * config.shared_expert_intermediate_size + d * config.num_experts
    linear = len(config.layer_types) * (d * (q + 2 * kv) + q * d) + len(config.moe_layers) * (expert + shared)
    linear += len(config.mlp_only_layers) * 3 * d * config.intermediate_size
    seen = np.arange(start + 1, start + tokens + 1, dtype=np.float64)
    window = np.minimum(seen, config.sliding_window)
    keys = sum(seen.sum() if kind == FULL else window.sum() for kind in config.layer_types)
    return 2.0 * linear * tokens + 4.0 * q * keys


def product_rate(size: int = 8192) -> float:
    """Operations per second of a large bfloat16 product on random data, best of five: the ceiling of this run."""
    if jax.default_backend() == "cpu":
        size = 512
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: a @ b)
    product(a, b).block_until_ready()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        product(a, b).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / min(times)


def run(args: argparse.Namespace) -> list[dict]:
    """Print a row for each length and start."""
    from flint_jax.random_weights import random_weights
    from loaders.synthetic import preset, spread

    config, numerics = preset(args.preset, args.layers), Numerics("serving", "bfloat16")
    rate = product_rate()
    print(f"products {rate / 1e12:.0f} TFLOP/s")
    print(f"{'format':<7}{'tokens':>8}{'start':>9}{'ms':>9}{'tok/s':>9}{'floor ms':>10}{'share':>7}{'compile s':>11}")
    rows = []
    for weight_format in args.format.split(","):
        weights = random_weights(config, numerics, weight_format=weight_format, spread=spread)
        if tiles.wanted(config, numerics, "auto"):
            weights = tiles.tile_weights(weights)
        longest = max(args.start) + max(args.tokens)
        model = Flint(config, weights, numerics, max_positions=min(config.max_position_embeddings, longest + PAGE))
        del weights
        graph, tree = nnx.split(model)
        leaves, structure = jax.tree.flatten(tree)

        def merge(leaves, graph=graph, structure=structure):
            return nnx.merge(graph, jax.tree.unflatten(structure, leaves))

        state = step.State.create(model, 2, -(-longest // PAGE) + 1)
        noise = jax.jit(
            lambda c: jax.tree.map(lambda a: jax.random.normal(jax.random.key(a.ndim), a.shape, a.dtype), c),
            donate_argnums=0,
        )
        state = dataclasses.replace(state, cache=noise(state.cache))
        width = table_width(longest)
        tables = jnp.asarray(np.tile(np.arange(width, dtype=np.int32) % state.cache.k_pages.shape[1], (2, 1)))
        call = jax.jit(functools.partial(step._prefill_packed, merge=merge), donate_argnums=1)
        for tokens in args.tokens:
            places = -(-tokens // 16) * 16
            ids = jax.random.randint(jax.random.key(tokens), (places,), 0, config.vocab_size, jnp.int32)
            compiled = None
            for start in args.start:
                pieces = np.zeros((ROWS, 5), np.int32)
                pieces[0] = 0, 1, start, tokens, 1
                begin = time.perf_counter()
                if compiled is None:
                    compiled = call.lower(leaves, state, tables, ids, pieces).compile()
                compiled_in = time.perf_counter() - begin
                times = []
                for _ in range(7):
                    begin = time.perf_counter()
                    state, token, _, _ = compiled(leaves, state, tables, ids, pieces)
                    token.block_until_ready()
                    times.append(time.perf_counter() - begin)
                ms = 1e3 * statistics.median(times[2:])
                floor = 1e3 * operations(config, tokens, start) / rate
                row = {"format": weight_format, "tokens": tokens, "start": start, "ms": ms, "floor_ms": floor}
                row |= {"tokens_per_s": 1e3 * tokens / ms, "share": floor / ms, "compile_s": compiled_in}
                row["temp_gib"] = compiled.memory_analysis().temp_size_in_bytes / 2**30
                rows.append(row)
                print(
                    f"{weight_format:<7}{tokens:>8}{start:>9}{ms:>9.2f}{row['tokens_per_s']:>9.0f}{floor:>10.2f}"
                    f"{row['share']:>7.0%}{compiled_in:>11.1f}  temp {row['temp_gib']:.2f} GiB",
                    flush=True,
                )
                if args.profile:
                    with traced(1, host=False):
                        state, token, _, _ = compiled(leaves, state, tables, ids, pieces)
                        token.block_until_ready()
    return rows
