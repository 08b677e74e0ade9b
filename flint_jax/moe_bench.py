"""``python -m flint_jax bench experts``: the routed experts of one layer on many tokens, cut into blocks in many ways.

What prefill and batch scoring spend their time in. Every way is checked row by row against gathered weights, one token
at a time, and timed in a loop over layers whose weights exceed the L2 cache, each on the output of the one before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flint_jax import moe
from flint_jax.number_flags import whole, wholes
from flint_jax.numerics import Numerics
from pallas_kernels.testing import random_tiles, row_error

NUMERICS = Numerics("serving", "bfloat16")
TOLERANCE = 8e-3  # relative, of a row: three roundings to bfloat16 on the way, after sums in another order
FULL_LAYERS = 47  # of Flint's that have experts


class Size(NamedTuple):
    """Experts E, width D, expert width F, active experts A of a layer."""

    experts: int
    width: int
    inner: int
    active: int


SIZES = {"full": Size(256, 2048, 512, 6), "small": Size(16, 256, 128, 4)}
# Rows of a block x MiB of unpacked weights at a time. In order of interest: --seconds may cut the list short.
CUTS = "128x256,64x0+all,128x64,128x256+all,128x32,128x1024,64x256,256x256,128x128"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--size", default="full", choices=SIZES, help="full: a layer of Flint; small: for a look")
    parser.add_argument("--format", default="nvfp4", help="nvfp4, bf16 or both, comma-separated")
    parser.add_argument("--tokens", type=wholes(1), default="4096", help="tokens of a step, comma-separated")
    parser.add_argument(
        "--cuts",
        type=_cuts,
        default=CUTS,
        help="rows of a block x MiB of unpacked weights at a time, comma-separated; +all: blocks that the routing left "
        "empty are computed, too; auto: what moe.blocks says (%(default)s)",
    )
    parser.add_argument(
        "--uneven", action="store_true", help="some experts get many times the tokens of others, not all about the same"
    )
    parser.add_argument("--layers", type=whole(1), default=2, help="layers that take turns")
    parser.add_argument("--repeats", type=whole(1), default=5, help="timed runs; the median counts")
    parser.add_argument("--seconds", type=whole(1), default=600, help="begin with no other cut after this time")


def _cuts(text: str) -> list[str]:
    for part in text.split(","):
        rows, _, mib = part.removesuffix("+all").partition("x")
        if part != "auto" and not (rows.isdecimal() and int(rows) and mib.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part}: need ROWSxMIB, such as 128x256 or 128x256+all, or auto")
    return text.split(",")


def cut_of(text: str, pairs: int, size: Size, packed: bool) -> moe.Blocks:
    """``128x256+all`` -> Blocks."""
    expert_bytes = 3 * size.width * size.inner * 2
    if text == "auto":
        return moe.blocks(pairs, size.experts, expert_bytes, packed=packed)
    rows, _, mib = text.removesuffix("+all").partition("x")
    return moe.Blocks(int(rows), max(1, (int(mib) << 20) // expert_bytes), skip=not text.endswith("+all"))


def random_experts(key: jax.Array, size: Size, layers: int, nvfp4: bool):
    """Random (gate_up [L,E,2F,D], down [L,E,D,F]) in tile order."""
    lead, keys = (layers, size.experts), jax.random.split(key)
    gate_up = random_tiles(keys[0], lead, 2 * size.inner, size.width, nvfp4=nvfp4, paired=True)
    return gate_up, random_tiles(keys[1], lead, size.width, size.inner, nvfp4=nvfp4)


def random_routing(rng: np.random.Generator, size: Size, layers: int, tokens: int, uneven: bool) -> moe.Routing:
    """Routing of every layer [L,M,...]. uneven: experts' popularity differs by a factor of e a standard deviation."""
    logits = rng.gumbel(size=(layers, tokens, size.experts)) + uneven * rng.normal(size=(layers, 1, size.experts))
    ids = np.argsort(-logits, axis=-1)[..., : size.active]
    weights = rng.random(ids.shape) + 0.1
    weights /= weights.sum(-1, keepdims=True)
    return moe.Routing(*(jnp.asarray(a, t) for a, t in zip((logits, ids, weights), ("f4", "i4", "f4"), strict=True)))


def reference(x, routing: moe.Routing, weights):
    """``chain`` of the first layer alone, by gathered weights, one token after the other."""

    def token(args):
        row, *mine = args
        own = moe.Routing(*(a[None] for a in mine))
        return moe.experts(row[None], own, *weights, layer=0, numerics=NUMERICS)[0]

    return _normalised(jax.lax.map(token, (x, *(a[0] for a in routing))))


def chain(x, routing: moe.Routing, weights, calls, cut: moe.Blocks | None):
    """``calls`` layers in turn on x [M,D], each on the normalised output of the one before; the last one's output."""
    layers = routing.ids.shape[0]

    def body(i, x):
        mine = moe.Routing(*(a[i % layers] for a in routing))
        return _normalised(moe.experts(x, mine, *weights, layer=i % layers, numerics=NUMERICS, cut=cut))

    return jax.lax.fori_loop(0, calls, body, x)


def _normalised(y):
    wide = y.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True))).astype(y.dtype)


def run(args: argparse.Namespace) -> list[dict]:
    """Check and time every cut; rows for the JSON line."""
    began, size = time.perf_counter(), SIZES[args.size]
    copy, product = _copy_rate(), _product_rate()
    print(f"copy {copy / 1e12:.2f} TB/s, products {product / 1e12:.0f} TFLOP/s")
    print(f"{'format':<7}{'tokens':>7}  {'cut':<14}{'ms':>9}{'of floor':>9}{'47 layers':>11}{'row error':>11}{'s':>7}")
    rng, rows = np.random.default_rng(0), []
    for name in args.format.split(","):
        weights = jax.block_until_ready(random_experts(jax.random.key(0), size, args.layers, name == "nvfp4"))
        for tokens in args.tokens:
            routing = random_routing(rng, size, args.layers, tokens, args.uneven)
            x = jnp.asarray(rng.normal(size=(tokens, size.width)), jnp.bfloat16)
            expected = np.asarray(jax.jit(reference)(x, routing, weights), np.float32)
            floor = _floor(size, routing, weights, args.layers, tokens, copy, product)
            for text in args.cuts:
                if time.perf_counter() - began > args.seconds:
                    print(f"stopped before {name} {tokens} {text}: {args.seconds} s are over")
                    break
                begin = time.perf_counter()
                cut = cut_of(text, tokens * size.active, size, packed=name == "nvfp4")
                spent, error = measure(x, routing, weights, cut, expected, args.repeats)
                row = {"format": name, "tokens": tokens, "cut": text, **cut._asdict(), "uneven": args.uneven}
                row |= {"ms": 1e3 * spent, "floor_ms": 1e3 * floor, "share": floor / spent, "error": error}
                row["ok"] = error <= TOLERANCE
                rows.append(row)
                print(
                    f"{name:<7}{tokens:>7}  {text:<14}{row['ms']:>9.3f}{row['share']:>9.1%}"
                    f"{FULL_LAYERS * row['ms']:>11.1f}{error:>11.1e}{time.perf_counter() - begin:>7.1f}"
                    f"{'' if row['ok'] else '  WRONG'}",
                    flush=True,
                )
    return rows


def measure(x, routing: moe.Routing, weights, cut: moe.Blocks, expected, repeats: int) -> tuple[float, float]:
    """(seconds a layer, largest relative error of a row of layer 0); compiles one program."""
    step, calls = jax.jit(chain, static_argnums=4), 2 * routing.ids.shape[0]
    error = row_error(step(x, routing, weights, 1, cut), expected)
    if not bool(jnp.isfinite(step(x, routing, weights, calls, cut)).all()):
        error = float("inf")
    return _median(lambda: step(x, routing, weights, calls, cut), repeats) / calls, error


def _floor(size: Size, routing: moe.Routing, weights, layers: int, tokens: int, copy: float, product: float) -> float:
    """Seconds: every chosen expert's weights as stored once, or the products, whichever takes longer."""
    chosen = np.mean([len(np.unique(ids)) for ids in np.asarray(routing.ids)])
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) / (layers * size.experts)
    moved = chosen * stored + 2 * 2 * tokens * size.width
    return max(moved / copy, 6 * tokens * size.active * size.width * size.inner / product)


def _median(call, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _copy_rate() -> float:
    """Bytes a second of a device copy, read plus written."""
    x = jnp.ones((1 << (24 if jax.default_backend() == "cpu" else 30),), jnp.float32)
    copy = jax.jit(lambda a: a + 1.0)
    jax.block_until_ready(copy(x))
    return 2 * x.nbytes / _median(lambda: copy(x), 5)


def _product_rate() -> float:
    """Operations a second of a large bfloat16 product of random matrices."""
    n = 512 if jax.default_backend() == "cpu" else 8192
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32).astype(jnp.bfloat16))
    jax.block_until_ready(product(a, b))
    return 2 * n**3 / _median(lambda: product(a, b), 5)
