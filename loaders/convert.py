"""``python -m flint_jax convert SRC DST``: between GGUF, safetensors and Orbax."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flint_jax.command_line import Parser
from loaders import export, gguf, orbax
from loaders.checkpoint import Checkpoint, load_weights, open_checkpoint
from loaders.parts import FileWeights, TreeWeights


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str | None = None,
    weight_format: str = "keep",
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
    clear_scale_signs: bool = False,
    progress: bool = False,
) -> Path:
    """Write checkpoint ``source`` as ``target``; see ``loaders.export`` for formats and what happens to a weight.

    tokenizer: a folder or .gguf whose tokenizer is written instead, or "none". clear_scale_signs: see open_checkpoint.
    From files to files, memory stays small; an Orbax folder, on either side, is held on the default device as a whole.
    """
    target = Path(target)
    to = export.format_of(target, to)
    export.check(target, to, weight_format)
    without = str(tokenizer) == "none"
    ckpt = open_checkpoint(
        source, config=config, tokenizer=None if without else tokenizer, clear_scale_signs=clear_scale_signs
    )
    about = {
        "generation": ckpt.generation,
        "name": ckpt.name,
        "tokenizer": None if without else ckpt.tokenizer,
        "tokenizer_folder": None if without else ckpt.tokenizer_path,
    }
    if to == "orbax":
        export._refuse_conversion(weight_format)
        tree = load_weights(ckpt, dtype="stored", progress=progress)
        orbax.save(target, ckpt.config, tree, **about)
        return target
    stored = ckpt.format == "orbax"
    if stored:
        weights = TreeWeights(load_weights(ckpt, dtype="stored", progress=progress))
    else:
        weights = FileWeights(ckpt.plan, clear_scale_signs=clear_scale_signs)
    return export.write(
        target,
        ckpt.config,
        weights,
        to=to,
        weight_format=weight_format,
        **about,
        gguf_tokenizer=None if without else _gguf_tokenizer(ckpt),
        progress=progress,
    )


def _gguf_tokenizer(ckpt: Checkpoint) -> dict | None:
    """The tokenizer's keys of a GGUF file, to be taken over as they are."""
    path = ckpt.tokenizer_path
    if path is None or not path.is_file() or not gguf.is_gguf(path):
        return None
    return {key: value for key, value in gguf.read_metadata(path).items() if key.startswith("tokenizer.")}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = Parser(
        prog="flint convert",
        description="Convert a checkpoint. Kinds that the target can hold are kept bit for bit.",
    )
    parser.add_argument("source", help="folder, .gguf file, Orbax folder or hub id")
    parser.add_argument(
        "target",
        type=Path,
        help="a name ending in .gguf or .orbax says the format; a name without an ending is a safetensors folder",
    )
    parser.add_argument("--to", choices=export.FORMATS, help="format of the target, whatever its name")
    parser.add_argument(
        "--format",
        choices=export.WEIGHT_FORMATS,
        default="keep",
        help="of the matrices: keep (default; safetensors decode NVFP4 to BF16), bf16, nvfp4 (only .gguf)",
    )
    parser.add_argument("--config", help="folder whose config.json wins over the checkpoint's own")
    parser.add_argument("--tokenizer", help="folder or .gguf whose tokenizer is written instead, or: none")
    parser.add_argument(
        "--clear-scale-signs",
        action="store_true",
        help="take NVFP4 block scales of 0x80 to 0xFE without their sign bit, which is not allowed there",
    )
    args = parser.parse_args(argv)
    began = time.monotonic()
    made = convert(
        args.source,
        args.target,
        to=args.to,
        weight_format=args.format,
        config=args.config,
        tokenizer=args.tokenizer,
        clear_scale_signs=args.clear_scale_signs,
        progress=sys.stderr.isatty(),
    )
    files = [made] if made.is_file() else [f for f in made.rglob("*") if f.is_file()]
    size, took = sum(f.stat().st_size for f in files), time.monotonic() - began
    print(f"{made}: {size / 1e9:.3f} GB in {took:.1f} s")
    return 0
