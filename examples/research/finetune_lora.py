"""Learn 32 sequences by heart: adapters on every matrix, experts included, over frozen NVFP4 weights.

    python -m examples.research.finetune_lora --out plots

Saves adapters.safetensors, merges them into a BF16 folder that transformers reads, and draws loss.png. Fails unless the
loss ends below BY_HEART.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import flint_jax
from examples.research.text import rows
from flint_jax.research import lora, train
from loaders import embedded_checkpoint, save_checkpoint

BY_HEART = 0.1  # mean -log p of a token, nats


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="default: the small embedded model in NVFP4")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("plots"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.model or embedded_checkpoint("nvfp4")
    lm = flint_jax.load(path, dtype="float32", numerics="transformers", kernels="xla", progress=False)
    tokens, lengths = rows(lm.tokenizer, 32, 16)
    batch = train.Batch(jnp.asarray(tokens), jnp.asarray(lengths))

    adapters = lora.create(lm.config, lora.targets(lm.config), rank=8, alpha=16)
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, args.steps, 0.05))
    step = train.make_step(lora.adapters_over(lm.config, lm.model.numerics), optimizer)
    state, history = train.fit(
        step,
        train.start(adapters, optimizer),
        [batch] * args.steps,
        frozen=lora.weights_of(lm),
        report=lambda n, metrics: print(f"step {n}: loss {metrics['loss']:.3f}"),
        every=5,
    )
    figure = Figure(figsize=(6, 3.5))
    figure.add_subplot(xlabel="step", ylabel="-log p a token, nats", yscale="log").plot(history["loss"])
    figure.savefig(args.out / "loss.png")

    lora.save(args.out / "adapters.safetensors", state.params)
    adapted = lora.apply(lm, lora.load(args.out / "adapters.safetensors", lm.config))
    guesses = np.asarray(adapted.logits(tokens)).argmax(-1)[:, :-1]
    right = float((guesses == tokens[:, 1:]).mean())
    print(f"loss {history['loss'][-1]:.4f}; {right:.0%} of the tokens are the model's first choice")

    merged = lora.merge(lora.weights_of(lm), state.params)
    folder = args.out / "merged"
    if not folder.exists():
        save_checkpoint(folder, lm.config, merged, tokenizer=lm.tokenizer, generation=lm.generation)
        print(f"{folder}: BF16 safetensors")
    assert history["loss"][-1] < BY_HEART, f"loss {history['loss'][-1]:.3f}, want less than {BY_HEART}"
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
