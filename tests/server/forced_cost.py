"""What holding the output to a grammar costs a token: ``python -m tests.server.forced_cost [--model PATH]``.

One request alone in the engine, the same number of tokens free and held to a regular expression, alternately; medians.
"""

import argparse
import statistics
import time

import flint_jax
from flint_jax import sampling
from flint_jax.server.forced import Forced, Structured
from flint_jax.server.launch import _constrain
from loaders.synthetic import random_checkpoint


def ms_per_token(engine, constraint, tokens: int) -> float:
    """Milliseconds a token, the first four left out."""
    times = []
    params = sampling.SamplingParams(
        temperature=1.0, top_k=20, top_p=0.95, min_p=0.0, repetition_penalty=1.0, max_tokens=tokens, seed=1,
        ignore_eos=constraint is None,
    )  # fmt: skip
    engine.submit(
        list(range(10, 40)), params, on_event=lambda _: times.append(time.perf_counter()), constraint=constraint
    )
    while engine.step():
        pass
    assert len(times) >= tokens - 1, "the output ended early"
    return 1e3 * (times[-1] - times[4]) / (len(times) - 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="checkpoint (default: a tiny random model)")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    lm = flint_jax.load(args.model or str(random_checkpoint()), progress=False)
    engine = lm.make_engine(max_num_seqs=1, max_model_len=2048)
    held = _constrain(lm)(Forced(structured=Structured("regex", f"[a-z ]{{{8 * args.tokens}}}", "structured_outputs")))
    rounds = [
        (ms_per_token(engine, None, args.tokens), ms_per_token(engine, held, args.tokens)) for _ in range(args.rounds)
    ]
    free, under = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
    print(f"free {free:.3f} ms a token, held {under:.3f} ms: {under / free - 1:+.1%}")


if __name__ == "__main__":
    main()
