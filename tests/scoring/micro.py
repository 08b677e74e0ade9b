"""A very small Flint with random weights: window and full layers, dense and expert blocks, steps of a few ms."""

import functools

from flint_jax.lm import LanguageModel
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from flint_jax.random_weights import random_weights
from loaders import open_checkpoint
from loaders.synthetic import preset, spread
from tests.model import golden

VOCAB = 96


@functools.cache
def language_model(dtype="float32", numerics="serving", text=False):
    """4 layers, window 33, context 1024, no tokenizer; with ``text`` that of the T2-nvfp4 golden and its vocabulary."""
    vocabulary = 512 if text else VOCAB
    config = preset(
        "tiny", 4, vocab_size=vocabulary, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=32, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, sliding_window=33, max_position_embeddings=1024,
    )  # fmt: skip
    rules = Numerics(numerics, dtype)
    weights = random_weights(config, rules, weight_format="bf16", spread=spread)
    checkpoint = open_checkpoint(golden.FOLDER / "T2-nvfp4")
    more = {"tokenizer": checkpoint.tokenizer, "chat_template": checkpoint.chat_template} if text else {}
    return LanguageModel(Flint(config, weights, rules), **more)
