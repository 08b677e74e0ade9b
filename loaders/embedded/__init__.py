"""The model that is used when none is named: a small Flint that was trained for it (docs/tiny.md), in the package.

Beside it: the chat template and the corpus of the random checkpoints' vocabulary (``loaders.vocabulary``).
"""

from __future__ import annotations

from pathlib import Path

from flint_jax.errors import CheckpointError

HERE = Path(__file__).parent
_FILES = {"bf16": "flint-tiny", "nvfp4": "flint-tiny-NVFP4.gguf"}


def embedded_checkpoint(format: str = "bf16") -> Path:
    """Path of the embedded model: "bf16" (a safetensors folder, 11 MB) or "nvfp4" (one GGUF file, 3.5 MB).

    Both hold tokenizer, chat template and sampling defaults. BF16 is the default everywhere: on a CPU it decodes twice
    as fast, because NVFP4 is unpacked there in every step. Raises CheckpointError for another format, and where the
    files are missing.
    """
    if format not in _FILES:
        raise CheckpointError(f"embedded model, format {format!r}: need one of {', '.join(_FILES)}")
    path = HERE / _FILES[format]
    if not path.exists():
        raise CheckpointError(f"{path}: this installation lacks the embedded model; name a model, or reinstall")
    return path
