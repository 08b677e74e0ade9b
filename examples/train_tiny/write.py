"""Trained weights as the two checkpoints that are shipped: BF16 safetensors in published names, one NVFP4 GGUF."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np

from flint_jax.config import FlintConfig
from loaders import export
from loaders.convert import convert
from loaders.parts import TreeWeights
from loaders.synthetic import GENERATION
from loaders.tokenizer import load_tokenizer
from loaders.vocabulary import Vocabulary

NAME = "flint-tiny"


def targets(out: Path) -> tuple[Path, Path]:
    """What ``checkpoints`` writes."""
    return out / NAME, out / f"{NAME}-NVFP4.gguf"


def checkpoints(out: Path, config: FlintConfig, weights: dict[str, np.ndarray], vocabulary: Vocabulary) -> None:
    """Write OUT/flint-tiny and OUT/flint-tiny-NVFP4.gguf from float32 stacks."""
    config = dataclasses.replace(config, eos_token_ids=tuple(vocabulary.eos_ids), pad_token_id=vocabulary.eos_ids[0])
    narrow = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in weights.items()}
    folder = out / "tokenizer"
    folder_to, packed = targets(out)
    target = export.write(
        folder_to,
        config,
        TreeWeights(narrow),
        to="safetensors",
        weight_format="keep",
        generation=GENERATION,
        name=NAME,
        tokenizer=load_tokenizer(folder),
        tokenizer_folder=folder,
    )
    convert(target, packed, weight_format="nvfp4")
