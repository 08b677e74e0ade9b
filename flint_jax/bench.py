"""``python -m flint_jax bench``: what decoding and loading cost on this device, against the memory's floor."""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import threading
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flint_jax import forced_bench, moe_bench, prefill_bench, score_bench
from flint_jax.cache import PAGE, table_width
from flint_jax.command_line import Parser
from flint_jax.device_trace import traced
from flint_jax.model import Flint
from flint_jax.number_flags import whole, wholes
from flint_jax.numerics import Numerics
from flint_jax.roofline import step_bytes
from flint_jax.step import Sizes, Steps


def main(argv: Sequence[str] | None = None) -> int:
    """Run one bench; tables for people, JSON on the last line."""
    parser = Parser(prog="flint bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="BENCH")
    decode = commands.add_parser("decode", help="ms a token at given contexts and batches, random weights")
    decode.add_argument(
        "--context", type=wholes(1), default="1024", help="tokens already in the cache, comma-separated"
    )
    decode.add_argument("--batch", type=wholes(1), default="1", help="requests in the step, comma-separated")
    decode.add_argument("--format", default="nvfp4", help="nvfp4, bf16 or both, comma-separated")
    decode.add_argument("--preset", default="full", choices=("full", "tiny"), help="full: Flint's shapes; tiny: a look")
    decode.add_argument("--layers", type=whole(1), help="fewer layers")
    decode.add_argument("--kernels", default="auto", choices=("auto", "xla", "pallas"))
    decode.add_argument("--steps", type=whole(1), default=64, help="timed steps")
    decode.add_argument("--sampling", default="default", choices=("default", "greedy"))
    decode.add_argument(
        "--xla", action="append", default=[], metavar="NAME=VALUE[,NAME=VALUE]", help="time this XLA setting as well"
    )
    decode.add_argument("--profile", action="store_true", help="after each row, a table of device time by kernel")
    decode.set_defaults(run=_decode)
    load = commands.add_parser("load", help="load a checkpoint, then generate 64 tokens")
    load.add_argument("model")
    load.add_argument("--tokens", type=whole(0), default=64, help="0: load only")
    load.add_argument("--kernels", default="auto", choices=("auto", "xla", "pallas"))
    load.set_defaults(run=_load)
    score = commands.add_parser("score", help="tokens scored a second, random weights, against plain prefill")
    score_bench.arguments(score)
    score.set_defaults(run=score_bench.run)
    forced = commands.add_parser("forced", help="what holding the output to a grammar costs a token, one request alone")
    forced_bench.arguments(forced)
    forced.set_defaults(run=forced_bench.run)
    experts = commands.add_parser("experts", help="the routed experts of a layer on many tokens, in several ways")
    moe_bench.arguments(experts)
    experts.set_defaults(run=moe_bench.run)
    prefill = commands.add_parser("prefill", help="a prefill step alone, random weights")
    prefill_bench.arguments(prefill)
    prefill.set_defaults(run=prefill_bench.run)
    commands.add_parser("serve", help="load on a running server, and a check of what it sends; see bench serve --help")
    commands.add_parser("full", help="the full-size model served for real, over HTTP; see bench full --help")
    args = parser.parse_args(argv)
    print(_header())
    rows = args.run(args)
    print(json.dumps({**_facts(), "bench": args.command, "rows": rows}))
    return 0


def _facts() -> dict:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }


def _header() -> str:
    return "{device}, jax {jax}, {date}".format(**_facts())


def copy_rate(nbytes: int = 1 << 32) -> float:
    """Bytes per second of a device copy, read plus written, best of ten: the ceiling of this run."""
    if jax.default_backend() == "cpu":
        nbytes = 1 << 27
    x = jnp.ones((nbytes // 4,), jnp.float32)
    copy = jax.jit(lambda a: a + 1.0)
    copy(x).block_until_ready()
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        copy(x).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 2 * nbytes / min(times)


# -- decode ----------------------------------------------------------------------------------------------------------


def _decode(args: argparse.Namespace) -> list[dict]:
    from flint_jax import tiles
    from flint_jax.random_weights import random_weights
    from loaders.synthetic import preset, spread

    contexts, batches = args.context, args.batch
    rate = copy_rate()
    print(f"copy {rate / 1e12:.2f} TB/s")
    print(
        f"{'format':<7}{'batch':>6}{'context':>9}{'ms/step':>9}{'tok/s':>9}{'floor ms':>10}{'share':>7}{'host ms':>9}"
    )
    config = preset(args.preset, args.layers)
    rows = []
    for weight_format in args.format.split(","):
        numerics = Numerics("serving", "bfloat16")
        weights = random_weights(config, numerics, weight_format=weight_format, spread=spread)
        if tiles.wanted(config, numerics, args.kernels):
            weights = tiles.tile_weights(weights)
        jax.block_until_ready(weights)
        longest = max(contexts) + 2 * args.steps + 64
        model = Flint(config, weights, numerics, max_positions=min(config.max_position_embeddings, longest))
        del weights
        for batch in batches:
            for context in contexts:
                for row in _decode_rows(args, model, batch, context, weight_format, rate):
                    rows.append(row)
                    print(
                        f"{weight_format:<7}{batch:>6}{context:>9}{row['ms']:>9.3f}{row['tokens_per_s']:>9.0f}"
                        f"{row['floor_ms']:>10.3f}{row['share']:>7.0%}{row['host_ms']:>9.3f}  {row['xla']}",
                        flush=True,
                    )
    return rows


def _decode_rows(args, model: Flint, batch: int, context: int, weight_format: str, rate: float) -> dict:
    from flint_jax import sampling
    from flint_jax.sampling_params import SamplingParams

    # Room for warm-up and timed steps; the state starts as if ``context`` tokens had been prefilled.
    tokens = context + args.steps + 24
    pages = -(-tokens // PAGE)
    steps = Steps(model, Sizes(batch, batch * pages, tokens, (batch,), (16,)))
    table = np.zeros((batch, table_width(tokens)), np.int32)
    table[:, :pages] = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages)
    steps.set_tables(table)
    greedy = args.sampling == "greedy"
    params = SamplingParams(temperature=0.0 if greedy else 1.0, top_p=0.95, top_k=20, ignore_eos=True)
    for slot in range(batch):
        steps.admit(slot, sampling.slot_row(params.replace(seed=slot), (1,), model.config.vocab_size, (), 0), tokens)

    def noise(leaf, key):
        return jax.jit(
            lambda a: jax.random.normal(key, a.shape[1:], a.dtype)[None] + jnp.zeros_like(a), donate_argnums=0
        )(leaf)

    cache = steps.state.cache
    keys = jax.random.split(jax.random.key(1), 4)
    leaves, structure = jax.tree.flatten(cache)
    steps.state = None
    cache = jax.tree.unflatten(structure, [noise(leaf, key) for leaf, key in zip(leaves, keys, strict=True)])
    fresh = jnp.full((batch,), context, jnp.int32)
    state = _last_state(steps, cache, fresh, model, batch)
    steps.state = state
    lowered = steps.lower_decode(batch, steps.kernels)
    key = ("fast" if steps.kernels else "decode", batch)
    floor = 1e3 * step_bytes(model.config, batch=batch, context=context, weight_format=weight_format).total / rate
    for setting in ("", *args.xla):
        options = dict(pair.split("=", 1) for pair in setting.split(",") if pair)
        options = {k: {"true": True, "false": False}.get(v, v) for k, v in options.items()}
        begin = time.perf_counter()
        steps._compiled[key] = lowered.compile(compiler_options=options)
        row = {"format": weight_format, "batch": batch, "context": context, "xla": setting, "floor_ms": floor}
        row["compile_s"] = time.perf_counter() - begin
        row |= _time(steps, list(range(batch)), args.steps)
        yield row | {"share": floor / row["ms"], "tokens_per_s": batch * 1e3 / row["ms"]}
    if args.profile:
        _profile(steps, list(range(batch)))


def _time(steps: Steps, slots: list[int], count: int) -> dict:
    """Median ms of a step as the engine sees it (tokens read one step late), and the part the host needs."""
    late = None
    for _ in range(16):
        late, _ = steps.decode(slots, True)
    jax.block_until_ready(late)
    times, host = [], []
    previous = late
    last = time.perf_counter()
    for _ in range(count):
        begin = time.perf_counter()
        current, _ = steps.decode(slots, True)
        current.copy_to_host_async()
        host.append(time.perf_counter() - begin)
        np.asarray(previous)  # one step late, as the engine reads
        previous = current
        now = time.perf_counter()
        times.append(now - last)
        last = now
    sane = bool((np.asarray(previous) >= 0).all())
    alone = []
    for _ in range(16):  # with an idle device nothing but the host's own work is in the call
        jax.block_until_ready(steps.state)
        begin = time.perf_counter()
        steps.decode(slots, True)
        alone.append(time.perf_counter() - begin)
    return {
        "ms": 1e3 * statistics.median(times),
        "host_ms": 1e3 * statistics.median(alone),
        "call_ms": 1e3 * statistics.median(host),
        "sane": sane,
    }


def _profile(steps: Steps, slots: list[int], count: int = 8) -> None:
    with traced(count):
        for _ in range(count):
            tokens, _ = steps.decode(slots, True)
        jax.block_until_ready(tokens)


def _last_state(steps: Steps, cache, positions, model: Flint, batch: int):
    from flint_jax import decode, sampling
    from flint_jax.step import State

    return State(
        cache=cache,
        sampling=sampling.SlotSampling.empty(batch, model.config.vocab_size),
        progress=jnp.stack(
            [jnp.arange(batch, dtype=jnp.int32), positions, jnp.full_like(positions, 2**30), jnp.ones_like(positions)],
            1,
        ),
        exchange=decode.new_exchange(model.config),
    )


# -- load ------------------------------------------------------------------------------------------------------------


def _load(args: argparse.Namespace) -> list[dict]:
    from flint_jax import SamplingParams, load

    begin = time.perf_counter()
    with _AnonymousMemory() as memory:
        lm = load(args.model, kernels=args.kernels)
    loaded = time.perf_counter() - begin
    print(f"load {loaded:.1f} s; host memory {memory.before:.2f} GiB before, {memory.peak:.2f} GiB at the peak")
    row = {"load_s": loaded, "host_before_gib": memory.before, "host_peak_gib": memory.peak}
    if not args.tokens:
        return [row]
    engine = lm.make_engine(max_num_seqs=1, max_model_len=2048, max_num_batched_tokens=256)
    lm._engine = engine
    print(f"compile {engine.compile_seconds:.1f} s")
    prompt = list(range(100, 120))
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    lm.generate(prompt, params.replace(max_tokens=4))
    begin = time.perf_counter()
    out = lm.generate(prompt, params)
    ms = 1e3 * (time.perf_counter() - begin) / len(out.token_ids)
    print(f"{len(out.token_ids)} tokens, {ms:.2f} ms a token")
    return [row | {"compile_s": engine.compile_seconds, "ms_per_token": ms, "tokens": len(out.token_ids)}]


class _AnonymousMemory:
    """Peak of this process's memory beside mapped files, in GiB, looked at every 10 ms (Linux)."""

    def __enter__(self):
        self.before = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> float:
        with open("/proc/self/status") as status:
            return sum(int(line.split()[1]) for line in status if line.startswith(("RssAnon", "RssShmem"))) / 2**20
