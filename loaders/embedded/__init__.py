"""The model that is used when none is named: a small Flint that was trained for it (docs/tiny.md), in the package.

Beside it: the chat template and the corpus of the random checkpoints' vocabulary (``loaders.vocabulary``).
"""

from __future__ import annotations

from pathlib import Path

from flint_jax.errors import CheckpointError

HERE = Path(__file__).parent
_FILES = {"bf16": "flint-tiny", "nvfp4": "flint-tiny-NVFP4.gguf"}


def shipped(format: str = "bf16") -> bool:
    """Whether this installation holds the trained weights in a format."""
    return (HERE / _FILES[format]).exists()


def embedded_checkpoint(format: str = "bf16") -> Path:
    """Path of the embedded model: "bf16" (a safetensors folder, 11 MB) or "nvfp4" (one GGUF file, 3.5 MB).

    Both hold tokenizer, chat template and sampling defaults. BF16 is the default everywhere: on a CPU it decodes twice
    as fast, because NVFP4 is unpacked there in every step. Raises CheckpointError for another format.
    """
    if format not in _FILES:
        raise CheckpointError(f"embedded model, format {format!r}: need one of {', '.join(_FILES)}")
    if not shipped(format):
        from loaders.synthetic import random_checkpoint

        return random_checkpoint({"bf16": "safetensors", "nvfp4": "gguf"}[format])
    return HERE / _FILES[format]
