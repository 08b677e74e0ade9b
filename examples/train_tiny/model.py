"""The small Flint: every structural feature of the big one, 5.6 million weights."""

from __future__ import annotations

from examples.train_tiny.tokenizer import ROWS
from flint_jax.config import FlintConfig
from loaders.synthetic import preset


def config(rows: int = ROWS) -> FlintConfig:
    """Layers 0, 1, 5, 7 see everything, without positions; 2, 3, 4, 6 see 129 tokens, with RoPE; 2 of 4 experts.

    Few wide experts: training computes all of them for every token, and both checkpoints stay below 16 MB.
    """
    return preset(
        "tiny",
        vocab_size=rows,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=129,
        max_position_embeddings=4096,
    )
