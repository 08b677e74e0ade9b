"""Look inside and change things: logit lens, attention sinks, and what each branch of each block is worth.

    python -m examples.research.capture_patch --out plots

Draws lens.png, sinks.png and ablations.png.
"""

import argparse
from pathlib import Path

import jax
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
    tokens, _ = rows(lm.tokenizer, 2, 48)
    layers = range(lm.config.num_hidden_layers)

    # -- capture: how soon does the stream know the next token, and how much attention rests on nothing? -------------
    run = research.capture(lm, tokens, ["blocks.*.lens", "blocks.*.attn.probs.*"])
    final = np.asarray(run.logits).argmax(-1)
    agree = [float((np.asarray(run[f"blocks.{i}.lens"]).argmax(-1) == final).mean()) for i in layers]
    figure = Figure(figsize=(6, 3.5))
    axes = figure.add_subplot(xlabel="block", ylabel="share of positions", title="The lens says what the model says")
    axes.plot(layers, agree, marker="o")
    figure.savefig(args.out / "lens.png")

    heads = range(lm.config.num_attention_heads)
    sinks = [[float(run[f"blocks.{i}.attn.probs.{h}"][..., -1].mean()) for h in heads] for i in layers]
    figure = Figure(figsize=(6, 3.5))
    axes = figure.add_subplot(xlabel="head", ylabel="block", title="Mean attention on the sink")
    figure.colorbar(axes.imshow(sinks, aspect="auto", vmin=0), ax=axes)
    figure.savefig(args.out / "sinks.png")

    # -- patch: what does each branch do for the likelihood of the text? ---------------------------------------------
    branches = [f"blocks.{i}.{branch}.out" for branch in ("attn", "mlp") for i in layers]

    def likelihood(without: str | None) -> float:
        # Factors are traced: one program serves all of these.
        patch = {name: research.scale(0.0 if name == without else 1.0) for name in branches}
        logits = research.capture(lm, tokens, patch=patch).logits
        logp = np.asarray(jax.nn.log_softmax(logits[:, :-1], axis=-1))
        return float(np.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean())

    base = likelihood(None)
    change = {
        branch: [likelihood(name) - base for name in branches if f".{branch}." in name] for branch in ("attn", "mlp")
    }
    figure = Figure(figsize=(6, 3.5))
    axes = figure.add_subplot(xlabel="block", ylabel="change of log p a token, nats", title="Without this branch")
    for shift, (branch, values) in zip((-0.2, 0.2), change.items(), strict=True):
        axes.bar(np.asarray(layers) + shift, values, width=0.4, label=branch)
    axes.legend()
    figure.savefig(args.out / "ablations.png")
    halfway = agree[len(agree) // 2]
    print(f"mean log p {base:.3f}; halfway, the lens agrees with the model at {halfway:.0%} of positions")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
