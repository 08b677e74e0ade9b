"""Checkpoints of Flint: open one, look at it, stream its weights to the device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from loaders.assemble import LoadReport
from loaders.checkpoint import Checkpoint, describe_checkpoint, load_weights, open_checkpoint, weight_shapes
from loaders.embedded import embedded_checkpoint
from loaders.export import save_checkpoint

__all__ = [
    "Checkpoint", "LoadReport", "describe_checkpoint", "embedded_checkpoint", "load_tokenizer", "load_weights",
    "open_checkpoint", "save_checkpoint", "weight_shapes",
]  # fmt: skip


if TYPE_CHECKING:
    from loaders.tokenizer import Tokenizer


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Tokenizer of a folder or a .gguf file; see loaders.tokenizer.load_tokenizer."""
    from loaders import tokenizer  # imported late: it needs the tokenizers library, loading weights does not

    return tokenizer.load_tokenizer(path)
