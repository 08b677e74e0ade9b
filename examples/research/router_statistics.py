"""Which experts do the work: load, company and certainty of every router over a corpus.

    python -m examples.research.router_statistics --out plots

Draws load.png, together.png and entropy.png.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import flint_jax
from examples.research.text import rows
from flint_jax import research


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="default: the small embedded model")
    parser.add_argument("--out", type=Path, default=Path("plots"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    lm = flint_jax.load(args.model, dtype="float32", kernels="xla", progress=False)
    tokens, lengths = rows(lm.tokenizer, 32, 64)
    batches = [(tokens[i : i + 8], lengths[i : i + 8]) for i in range(0, 32, 8)]
    found = research.router_statistics(lm, batches)

    even = lm.config.num_experts_per_tok / lm.config.num_experts
    figure = Figure(figsize=(7, 3.5))
    axes = figure.add_subplot(xlabel="expert", ylabel="layer", title="Load over the even share")
    axes.set_yticks(range(len(found.layers)), found.layers)
    figure.colorbar(axes.imshow(found.load / even, aspect="auto", cmap="coolwarm", vmin=0, vmax=2), ax=axes)
    figure.savefig(args.out / "load.png")

    # How much more often two experts meet than they would by chance.
    last = found.together[-1] / found.tokens
    chance = np.outer(found.load[-1], found.load[-1])
    lift = np.where(chance > 0, last / np.where(chance > 0, chance, 1), 0)
    np.fill_diagonal(lift, np.nan)
    figure = Figure(figsize=(5, 4))
    axes = figure.add_subplot(title=f"Company of experts, layer {found.layers[-1]}")
    figure.colorbar(axes.imshow(lift, cmap="coolwarm", vmin=0, vmax=2), ax=axes)
    figure.savefig(args.out / "together.png")

    figure = Figure(figsize=(6, 3.5))
    axes = figure.add_subplot(xlabel="layer", ylabel="nats", title="Entropy")
    axes.axhline(np.log(lm.config.num_experts), color="gray", linestyle=":", label="all experts alike")
    axes.plot(found.layers, found.load_entropy, marker="o", label="of the load")
    axes.plot(found.layers, found.token_entropy, marker="o", label="of a token's scores, mean")
    axes.legend()
    figure.savefig(args.out / "entropy.png")
    print(f"{found.tokens} tokens; busiest expert {found.load.max() / even:.2f} times the even share")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
