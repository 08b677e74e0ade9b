"""``python -m flint_jax bench score``: scoring whole texts, against plain chunked prefill and the operations' floor."""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np

from flint_jax import roofline
from flint_jax.cache import PAGE, table_width
from flint_jax.device_trace import traced
from flint_jax.lm import LanguageModel
from flint_jax.model import Flint
from flint_jax.number_flags import whole
from flint_jax.numerics import Numerics
from flint_jax.scoring import Scorer
from flint_jax.step import Sizes, Steps


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--preset", default="full", choices=("full", "tiny"), help="full: Flint's shapes; tiny: a look")
    parser.add_argument("--format", default="nvfp4", choices=("nvfp4", "bf16"))
    parser.add_argument("--layers", type=whole(1), help="fewer layers")
    parser.add_argument("--kernels", default="auto", choices=("auto", "xla", "pallas"))
    parser.add_argument("--length", type=whole(2), default=2048, help="tokens of a text")
    parser.add_argument("--texts", type=whole(1), default=8, help="texts of a round")
    parser.add_argument("--rounds", type=whole(1), default=2, help="timed rounds; the best counts")
    parser.add_argument(
        "--tokens",
        type=whole(PAGE, 1 << 20, multiple=PAGE),
        help="token places of a step (default: 256 on the CPU, 4096 on a GPU)",
    )
    parser.add_argument(
        "--questions", type=whole(0), default=0, help="also: questions of 500 tokens with 4 answers each"
    )
    parser.add_argument("--profile", action="store_true", help="a table of device time by kernel")
    parser.add_argument(
        "--no-prefill", action="store_true", help="leave out the comparison, which compiles one more large program"
    )


def run(args: argparse.Namespace) -> list[dict]:
    """Time it; rows for the JSON line. One large program, or two with prefill."""
    from flint_jax import tiles
    from flint_jax.random_weights import random_weights
    from loaders.synthetic import preset, spread

    config = preset(args.preset, args.layers)
    numerics = Numerics("serving", "bfloat16")
    begin = time.perf_counter()
    weights = random_weights(config, numerics, weight_format=args.format, spread=spread)
    if tiles.wanted(config, numerics, args.kernels):
        weights = tiles.tile_weights(weights)
    jax.block_until_ready(weights)
    longest = max(args.length, 512 if args.questions else 0)
    lm = LanguageModel(Flint(config, weights, numerics, max_positions=longest), max_context=longest)
    del weights
    print(f"weights {time.perf_counter() - begin:.1f} s", flush=True)
    scorer = Scorer(lm, tokens=args.tokens, max_length=longest, batch_invariant=True)
    compiled = scorer.warm_up()
    print(f"compile {compiled:.1f} s; {scorer.programs.tokens} token places a step, {scorer._pool} pages", flush=True)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, config.vocab_size, args.length) for _ in range(args.texts)]
    row = {"format": args.format, "length": args.length, "texts": args.texts, "compile_s": compiled}
    row |= _texts(scorer, texts, args.rounds)
    row |= _floor(config, args.length, row["tokens_per_s"])
    print(
        f"score    {row['tokens_per_s']:>10,.0f} tokens/s{row['ms_per_step']:>10.1f} ms a step"
        + (
            f"   {row['share']:.1%} of the operations' floor ({row['floor_tokens_per_s']:,.0f})" if row["share"] else ""
        ),
        flush=True,
    )
    print(f"alone and together the same bits: {row['same_bits']}", flush=True)
    if args.profile:
        with traced(row["steps"], host=False):
            scorer.score_texts(texts)
    if args.questions:
        row |= _questions(scorer, args.questions, rng)
        print(
            f"choices  {row['questions_per_s']:>10,.1f} questions/s; {row['context_tokens']:,} tokens of context run "
            f"for {args.questions} contexts of 500",
            flush=True,
        )
    if not args.no_prefill:
        chunk = scorer.programs.tokens
        del scorer
        row |= _prefill(lm, texts, chunk, args.rounds)
        row["of_prefill"] = row["tokens_per_s"] / row["prefill_tokens_per_s"]
        print(f"prefill  {row['prefill_tokens_per_s']:>10,.0f} tokens/s in chunks of {row['chunk']}")
        print(f"scoring reaches {row['of_prefill']:.1%} of prefill")
    return [row]


def _texts(scorer: Scorer, texts: list, rounds: int) -> dict:
    """Every token of every text scored; tokens per second of the best round, and whether company changes bits."""
    together = scorer.score_texts(texts)
    best = float("inf"), 1
    for _ in range(rounds):
        steps, begin = scorer.stats.steps, time.perf_counter()
        scorer.score_texts(texts)
        spent = time.perf_counter() - begin
        best = min(best, (spent, scorer.stats.steps - steps))
    alone = scorer.score_texts(texts[-1:])[0]
    spent, steps = best
    return {
        "tokens_per_s": sum(map(len, texts)) / spent,
        "ms_per_step": 1e3 * spent / steps,
        "steps": steps,
        "same_bits": bool((alone.logprobs == together[-1].logprobs).all()),
        "sane": bool(np.isfinite(together[0].logprobs).all()),
    }


def _questions(scorer: Scorer, count: int, rng) -> dict:
    vocab = scorer.config.vocab_size
    pairs = []
    for _ in range(count):
        context = rng.integers(0, vocab, 500)
        first = rng.choice(vocab, 4, replace=False)
        pairs += [(context, np.append(start, rng.integers(0, vocab, 4))) for start in first]
    before, begin = scorer.stats.context_tokens, time.perf_counter()
    scorer.score(pairs)
    return {
        "questions_per_s": count / (time.perf_counter() - begin),
        "context_tokens": scorer.stats.context_tokens - before,
    }


def _floor(config, length: int, rate: float) -> dict:
    kind = jax.devices()[0].device_kind.lower()
    device = next((d for name, d in roofline.DEVICES.items() if name in kind), None)
    if device is None:
        return {"floor_tokens_per_s": None, "share": None}
    floor = length / roofline.scoring_floor(config, device, tokens=length, context=(length + 1) / 2)
    return {"floor_tokens_per_s": floor, "share": rate / floor}


def _prefill(lm: LanguageModel, texts: list, chunk: int, rounds: int) -> dict:
    """The same tokens through the engine's prefill step, one text after the other, nothing scored."""
    length = len(texts[0])
    chunk = min(chunk, 1 << (length - 1).bit_length())
    pages = -(-length // PAGE)
    steps = Steps(lm.model, Sizes(1, pages, length, (1,), (chunk,)))
    table = np.zeros((1, table_width(length)), np.int32)
    table[0, :pages] = np.arange(pages)
    steps.set_tables(table)

    def one(text):
        for begin in range(0, length, chunk):
            steps.prefill([(text[begin : begin + chunk].tolist(), 0, begin, False)])

    one(texts[0])
    best = float("inf")
    for _ in range(rounds):
        jax.block_until_ready(steps.state)
        begin = time.perf_counter()
        for text in texts:
            one(text)
        jax.block_until_ready(steps.state)
        best = min(best, time.perf_counter() - begin)
    return {"prefill_tokens_per_s": length * len(texts) / best, "chunk": chunk}
