"""Where two models part: serving roundings against float32, and NVFP4 weights against BF16, layer by layer.

    python -m examples.research.layer_kl --out plots

Draws kl.png.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

import flint_jax
from examples.research.text import rows
from flint_jax import research
from loaders import embedded_checkpoint


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bf16", default=None, help="default: the small embedded model")
    parser.add_argument("--nvfp4", default=None, help="default: the same weights in NVFP4")
    parser.add_argument("--out", type=Path, default=Path("plots"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    exact = {"dtype": "float32", "numerics": "transformers", "kernels": "xla", "progress": False}
    plain = flint_jax.load(args.bf16, **exact)
    packed = flint_jax.load(args.nvfp4 or embedded_checkpoint("nvfp4"), **exact)
    tokens, lengths = rows(plain.tokenizer, 2, 48)

    others = {"bfloat16 serving": research.with_numerics(plain, "serving", "bfloat16"), "NVFP4 weights": packed}
    figure = Figure(figsize=(8, 3.5))
    for place, isolated in enumerate((False, True), start=1):
        axes = figure.add_subplot(1, 2, place, xlabel="after block", yscale="log", ylabel="KL, nats")
        axes.set_title("each block on the exact stream" if isolated else "errors add up")
        for name, other in others.items():
            kl = research.layer_kl(plain, other, tokens, lengths, isolated=isolated)
            axes.plot(kl.mean, marker="o", label=name)
            print(f"{name}, {'isolated' if isolated else 'together'}: KL of the logits {kl.mean[-1]:.2e} nats a token")
        axes.legend()
    figure.savefig(args.out / "kl.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
