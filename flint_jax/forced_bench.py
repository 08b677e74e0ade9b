"""``python -m flint_jax bench forced``: what holding the output to a grammar costs a token, one request alone.

The same number of tokens through the engine, free and held, in turn; random weights of a preset with the invented
vocabulary of its size, or a checkpoint. Needs llguidance.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from flint_jax.errors import RequestError
from flint_jax.lm import LanguageModel, load
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from flint_jax.sampling_params import SamplingParams

CHUNK = 64  # tokens of a prefill step: one program to compile, and a context of 1,024 takes 16 of them
SKIPPED = 8  # first tokens of an output, in which the engine finds its pace
LONG = 16  # characters of the grammars' outputs for each token, more than any token has: they do not end early


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--model", help="a checkpoint instead of random weights; 'embedded' for the embedded model")
    parser.add_argument("--preset", default="full", help="full: Flint's shapes; tiny: for a look at the output")
    parser.add_argument("--format", default="nvfp4", choices=("nvfp4", "bf16"))
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--kernels", default="auto", choices=("auto", "xla", "pallas"))
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an output")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, each one output of a kind")
    parser.add_argument("--kinds", default="text,digits,json", help=f"of {', '.join(_KINDS)}, comma-separated")


# What the output is held to: nearly every token may come, hardly any, and what most requests ask for.
_KINDS: dict[str, Callable[[int], tuple[str, Any]]] = {
    "text": lambda n: ("regex", f"[a-z ]{{{n}}}"),
    "digits": lambda n: ("regex", f"[0-9]{{{n}}}"),
    "json": lambda n: ("json", {"type": "array", "items": {"type": "string", "minLength": n}, "minItems": 1}),
}


def _wish(kind: str, tokens: int) -> Any:
    """What guided.Compiler reads of a request: one format and no tools."""
    form, value = _KINDS[kind](LONG * tokens)
    return SimpleNamespace(
        tools=(),
        choice=SimpleNamespace(callable=lambda tools: (), forces=False, name=None),
        parallel=False,
        format=None,
        structured=SimpleNamespace(kind=form, value=value, param=kind),
        start=None,
        thinking=False,
    )


class _Timed:
    """A constraint whose trackers note what they take. spent: seconds by name; allowed: shares of the vocabulary."""

    ends = True

    def __init__(self, inner: Any, vocab: int):
        self.inner, self.vocab = inner, vocab
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.allowed: list[float] = []

    def begin(self) -> _TimedTracker:
        return _TimedTracker(self, self.inner.begin())


class _TimedTracker:
    free = 0

    def __init__(self, owner: _Timed, inner: Any):
        self.owner, self.inner = owner, inner

    @property
    def done(self) -> bool:
        return self.inner.done

    def push(self, token_id: int) -> None:
        begin = time.perf_counter()
        self.inner.push(token_id)
        self.owner.spent["push"].append(time.perf_counter() - begin)

    def fill(self, row: np.ndarray) -> None:
        begin = time.perf_counter()
        self.inner.fill(row)
        self.owner.spent["mask"].append(time.perf_counter() - begin)
        if len(self.owner.allowed) < 32:
            self.owner.allowed.append(int(np.bitwise_count(row.view(np.uint32)).sum()) / self.owner.vocab)


def run(args: argparse.Namespace) -> list[dict]:
    """Time it; rows for the JSON line."""
    kinds = _checked(args)
    begin = time.perf_counter()
    lm = _model(args)
    print(f"weights {time.perf_counter() - begin:.1f} s", flush=True)
    from flint_jax.guided import Compiler, Vocabulary  # late: it needs llguidance

    begin = time.perf_counter()
    compiler = Compiler(Vocabulary(lm.tokenizer, lm.config.vocab_size, lm.eos_ids))
    held = {None: None}
    for kind in kinds:
        held[kind] = _Timed(compiler(_wish(kind, args.tokens)), lm.config.vocab_size)
    print(f"grammars {time.perf_counter() - begin:.1f} s", flush=True)
    engine = lm.make_engine(
        max_num_seqs=1,
        max_model_len=_longest(args),
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
    )
    print(f"compile {engine.compile_seconds:.1f} s", flush=True)
    calls = {name: _timed_calls(engine.steps, name) for name in ("decode", "redraw")}
    prompt = np.random.default_rng(0).integers(0, lm.config.vocab_size, args.context).tolist()
    rounds: dict[str | None, list[float]] = defaultdict(list)
    for i in range(args.rounds + 1):
        for kind, constraint in held.items():
            rounds[kind].append(_ms_per_token(engine, prompt, constraint, args.tokens))
        if not i:  # the first round warms up
            for spent in (
                *calls.values(),
                *rounds.values(),
                *(s for c in held.values() if c for s in c.spent.values()),
            ):
                spent.clear()
    print(f"vocabulary {lm.config.vocab_size:,}, {args.context:,} tokens of context, {args.tokens} a round")
    print(f"{'output':<8}{'ms/token':>9}{'range':>18}{'to free':>9}{'range':>18}", end="")
    print(f"{'mask us':>9}{'push us':>9}{'allowed':>9}")
    rows = [_row(kind, rounds, held[kind]) for kind in held]
    for row in rows:
        low, high = row["range"]
        line = f"{row['output']:<8}{row['ms']:>9.3f}{f'{low:.3f} to {high:.3f}':>18}"
        if "cost" in row:
            low, high = row["cost_range"]
            line += f"{row['cost']:>+9.1%}{f'{low:+.1%} to {high:+.1%}':>18}"
            line += f"{row['mask_us']:>9.1f}{row['push_us']:>9.1f}{row['allowed']:>9.1%}"
        print(line, flush=True)
    for name, spent in calls.items():
        rows[0][f"{name}_call_us"] = 1e6 * statistics.median(spent)
    print("host us in the calls: " + ", ".join(f"{name} {rows[0][f'{name}_call_us']:.0f}" for name in calls))
    return rows


def _checked(args: argparse.Namespace) -> list[str]:
    kinds = args.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise RequestError(f"--kinds {unknown[0]}: need {', '.join(_KINDS)}, or some of them, comma-separated")
    for name, least in (("context", 1), ("tokens", SKIPPED + 2), ("rounds", 1)):
        if getattr(args, name) < least:
            raise RequestError(f"--{name} {getattr(args, name)}: need at least {least}")
    return kinds


def _longest(args: argparse.Namespace) -> int:
    """The engine's context: a server has room for more than this bench needs, and attention on a CPU pays for it."""
    return max(2048, args.context + args.tokens + 1)


def _model(args: argparse.Namespace) -> LanguageModel:
    """The checkpoint, or random weights made on the device as ``bench decode`` makes them, with a vocabulary."""
    if args.model is not None:
        from loaders import embedded_checkpoint

        path = str(embedded_checkpoint()) if args.model == "embedded" else args.model
        return load(path, kernels=args.kernels, progress=False)
    from flint_jax import tiles
    from flint_jax.random_weights import random_weights
    from loaders import vocabulary
    from loaders.synthetic import preset, spread
    from loaders.tokenizer import Tokenizer

    config = preset(args.preset, args.layers)
    numerics = Numerics("serving", "bfloat16")
    weights = random_weights(config, numerics, weight_format=args.format, spread=spread)
    if tiles.wanted(config, numerics, args.kernels):
        weights = tiles.tile_weights(weights)
    jax.block_until_ready(weights)
    longest = _longest(args)
    model = Flint(config, weights, numerics, max_positions=longest)
    tokenizer = Tokenizer.from_gguf(vocabulary.build(config.vocab_size).gguf_metadata())
    return LanguageModel(model, tokenizer, max_context=longest)


def _timed_calls(steps: Any, name: str) -> list[float]:
    """Have a method of the steps note the seconds that each call takes."""
    spent: list[float] = []
    call = getattr(steps, name)

    def timed(*args, **kwargs):
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        spent.append(time.perf_counter() - begin)
        return result

    setattr(steps, name, timed)
    return spent


def _ms_per_token(engine: Any, prompt: Sequence[int], constraint: Any, tokens: int) -> float:
    times: list[float] = []
    params = SamplingParams(
        temperature=1.0, top_k=20, top_p=0.95, max_tokens=tokens, seed=1, ignore_eos=constraint is None
    )
    engine.submit(prompt, params, on_event=lambda _: times.append(time.perf_counter()), constraint=constraint)
    while engine.step():
        pass
    if len(times) < tokens:
        raise RuntimeError(f"the output ended after {len(times)} of {tokens} tokens")
    return 1e3 * (times[-1] - times[SKIPPED]) / (len(times) - 1 - SKIPPED)


def _row(kind: str | None, rounds: dict[str | None, list[float]], constraint: _Timed | None) -> dict:
    times = rounds[kind]
    row = {"output": kind or "free", "ms": statistics.median(times), "range": (min(times), max(times))}
    if constraint is None:
        return row
    costs = [mine / free - 1 for mine, free in zip(times, rounds[None], strict=True)]  # neighbours in time
    return row | {
        "cost": statistics.median(costs),
        "cost_range": (min(costs), max(costs)),
        "mask_us": 1e6 * statistics.median(constraint.spent["mask"]),
        "push_us": 1e6 * statistics.median(constraint.spent["push"]),
        "allowed": statistics.median(constraint.allowed),
    }
