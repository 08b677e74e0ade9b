"""Train the small embedded Flint: ``python -m examples.train_tiny.train OUT --seconds 480`` (one GPU).

Writes OUT/flint-tiny (BF16 safetensors, published names), OUT/flint-tiny-NVFP4.gguf and OUT/log.jsonl.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import loaders
from examples.train_tiny import check as checking
from examples.train_tiny import model, tokenizer, write
from examples.train_tiny.data import Encoder
from examples.train_tiny.workers import Rows
from flint_jax.chat import ChatTemplate
from flint_jax.evals import suite
from flint_jax.numerics import Numerics
from flint_jax.research import quantisation, train
from loaders.tokenizer import load_tokenizer
from loaders.vocabulary import EMBEDDED, Vocabulary, of_merges


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=480, help="how long to train, compiling not counted")
    parser.add_argument("--steps", type=int, default=1 << 30, help="end earlier, after this many steps")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--short", type=int, default=768, help="length of ordinary rows")
    parser.add_argument("--long", type=int, default=4096, help="length of rows with a long record")
    parser.add_argument("--long-share", type=float, default=0.3, help="of the steps that use long rows, later on")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="float32: for a CPU")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--remat", action="store_true", help="run blocks again backwards: less memory, slower")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--processes", type=int, default=12, help="processes that make rows")
    parser.add_argument("--items", type=int, default=64, help="held-out items of each family in a check; 0: no checks")
    parser.add_argument("--every", type=float, default=60, help="seconds between checks")
    parser.add_argument("--resume", type=Path, help="go on from these weights: the flint-tiny folder of an earlier run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    taken = [path for path in write.targets(args.out) if path.exists()]
    if taken:
        parser.error(f"{taken[0]} exists; remove it or give another folder")
    return args


class Schedule:
    """What changes over the run, as a function of the share of time gone, 0 to 1."""

    def __init__(self, rate: float, long_share: float):
        self.top, self.long_share = rate, long_share

    def rate(self, gone: float) -> float:
        """Warm up over 3 %, then a cosine to a hundredth."""
        if gone < 0.03:
            return self.top * (gone + 1e-3) / 0.031
        return self.top * (0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * (gone - 0.03) / 0.97)))

    def long(self, gone: float) -> float:
        """How many of the steps use long rows."""
        return 0.0 if gone < 0.3 else self.long_share

    def quantised(self, gone: float, step: int) -> float:
        """Share of quantisation of a step: two steps of three in the second half, four of five in the last fifth."""
        return 1.0 if gone > 0.5 and step % (3 if gone < 0.8 else 5) else 0.0


def main() -> None:
    """Train, check, write."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    template = ChatTemplate((EMBEDDED / "chat_template.jinja").read_text(encoding="utf-8"))
    vocabulary = tokenizer.train(template)
    start = None
    if args.resume:
        start, vocabulary = resumed(args.resume)
    config = model.config(len(vocabulary.tokens))
    folder = args.out / "tokenizer"
    folder.mkdir(exist_ok=True)
    vocabulary.write_folder(folder, config.max_position_embeddings)
    encoder = Encoder(load_tokenizer(folder), template)
    sources = {
        args.short: Rows(
            folder, args.short, args.tokens // args.short, max(args.processes * 2 // 3, 1), seed=args.seed
        ),
        args.long: Rows(
            folder, args.long, args.tokens // args.long, max(args.processes // 3, 1), seed=args.seed, long=True
        ),
    }
    try:
        params = run(args, config, encoder, sources, start)
    finally:
        for source in sources.values():
            source.close()
    write.checkpoints(args.out, config, {name: np.asarray(value) for name, value in params.items()}, vocabulary)


def resumed(folder: Path) -> tuple[dict, Vocabulary]:
    """Float32 weights and the vocabulary of an earlier run's flint-tiny folder."""
    merges = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]
    checkpoint = loaders.open_checkpoint(folder)
    weights = loaders.load_weights(checkpoint, dtype="float32", progress=False)
    return weights, of_merges(tuple(map(tuple, merges)), checkpoint.config.vocab_size)


def run(args, config, encoder, sources, start) -> dict:
    """The training run; returns the weights, float32."""
    numerics = Numerics("serving", args.dtype)
    build = quantisation.aware(train.full(config, numerics), config)
    optimizer = optax.inject_hyperparams(functools.partial(_optimizer, kind=args.optimizer))(rate=0.0)
    state = train.start(start or train.initial_weights(config, args.seed, std=0.04), optimizer)
    print(f"{config.num_parameters:,} weights on {jax.devices()[0].device_kind}", flush=True)
    begin = time.monotonic()
    steps, check = _compile(args, build, optimizer, state)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    groups = []
    if check:
        asked = suite.items(suite.NAMES, args.items, length=lambda item: len(encoder(item)[0]), seed=1)
        groups = list(checking.batches(encoder, asked, args.long, 16))
    schedule = Schedule(args.rate, args.long_share)
    feeds = {length: iter(source) for length, source in sources.items()}
    log = open(args.out / "log.jsonl", "w", encoding="utf-8")  # noqa: SIM115
    rng = np.random.default_rng(args.seed)
    begin = checked = time.monotonic()
    n, tokens, late, waited = 0, 0, None, 0.0
    while True:
        gone = max((time.monotonic() - begin) / args.seconds, n / args.steps)
        if gone >= 1:
            break
        length = args.long if rng.random() < schedule.long(gone) else args.short
        asked_at = time.monotonic()
        batch = _batch(*next(feeds[length]), rng)
        waited += time.monotonic() - asked_at
        state.optimizer.hyperparams["rate"] = jnp.float32(schedule.rate(gone))
        state, metrics = steps[length](state, jnp.float32(schedule.quantised(gone, n)), batch)
        n, tokens = n + 1, tokens + args.tokens
        if n % 50 == 0:
            if late is not None:
                seconds = time.monotonic() - begin
                line = {k: round(float(v), 4) for k, v in late.items()}
                rate = tokens / seconds / 1e6
                print(f"{seconds:6.0f} s step {n} {rate:.2f} Mtok/s, waited {waited:.0f} s for rows {line}", flush=True)
                log.write(json.dumps({"step": n, "seconds": seconds, **line}) + "\n")
            late = metrics | {"length": length}
        if check and time.monotonic() - checked > args.every:
            checked = time.monotonic()
            _report(checking.scores(check, state.params, jnp.float32(0), encoder, groups), log, n, "bf16")
    for name, share in (("bf16", 0.0), ("nvfp4", 1.0)) if check else ():
        last = checking.scores(check, state.params, jnp.float32(share), encoder, groups)
        _report(last, log, n, name)
    log.close()
    return state.params


def _optimizer(rate, kind: str) -> optax.GradientTransformation:
    if kind == "adamw":
        return optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=0.05, mask=_matrices)
        )
    # With updates of the size that AdamW's have (0.2), so that both take the same rate.
    muon = optax.contrib.muon(
        rate, weight_decay=0.05, weight_decay_mask=_matrices, consistent_rms=0.2, adam_b2=0.98, adam_weight_decay=0.0,
        muon_weight_dimension_numbers=_orthogonal,
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def _matrices(params):
    return {name: not name.endswith("norm") and name != "sinks" for name in params}


def _orthogonal(params):
    """Which axes of a stack are a matrix; None: not one of those that Muon takes."""
    matrix = _matrices(params)
    return {
        name: optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
        if matrix[name] and name not in ("embed", "head", "router")
        else None
        for name in params
    }


def _batch(tokens: np.ndarray, weights: np.ndarray, rng) -> train.Batch:
    """Replies always count; a prompt token counts as often as its weight says."""
    counts = rng.random(weights.shape) < weights
    targets = np.concatenate([np.zeros((len(tokens), 1), bool), counts], axis=1)[:, :-1]
    rows, length = len(tokens), tokens.shape[1] - 1
    return train.Batch(tokens[:, :length], np.full(rows, length, np.int32), targets)


def _compile(args, build, optimizer, state):
    """Both steps and the check, side by side."""

    def batch(length):
        rows = args.tokens // length
        return train.Batch(
            jax.ShapeDtypeStruct((rows, length), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows, length), jnp.bool_),
        )

    share = jax.ShapeDtypeStruct((), jnp.float32)
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((16, args.long), (16,), (16,), (3,))]
    step = train.make_step(build, optimizer, balance=0.01, remat=args.remat)
    jobs = {
        length: (lambda length=length: step.lower(state, share, batch(length))) for length in (args.short, args.long)
    }
    if args.items:
        jobs["check"] = lambda: checking.make_check(build).lower(state.params, share, *ints)
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        made = dict(zip(jobs, pool.map(lambda job: job().compile(), jobs.values()), strict=True))
    check = made.pop("check", None)
    return made, check


def _report(scores: dict[str, tuple[int, int]], log, step: int, name: str) -> None:
    line = {k: round(right / asked, 4) for k, (right, asked) in scores.items()}
    print(f"check {name} " + ", ".join(f"{k} {v:.0%}" for k, v in sorted(line.items())), flush=True)
    log.write(json.dumps({"step": step, "weights": name, "check": line}) + "\n")
    log.flush()


if __name__ == "__main__":
    main()
