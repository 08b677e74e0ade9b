"""``python -m flint_jax score``: log-probabilities for a file of texts or pairs."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flint_jax.errors import RequestError
from flint_jax.number_flags import whole

log = logging.getLogger("flint_jax")
FORMS = '{"context": ..., "continuation": ...} or {"text": ...}, each a string or a list of token ids'


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--input", required=True, type=Path, help=f"one JSON object a line: {FORMS}; an id is kept")
    parser.add_argument(
        "--output", required=True, type=Path, help="one JSON record a line; a file that exists is continued"
    )
    parser.add_argument("--overwrite", action="store_true", help="begin the output anew")
    parser.add_argument(
        "--on-error", choices=("stop", "skip"), default="stop", help="what to do at a bad line (default stop)"
    )
    parser.add_argument("--top-k", type=whole(0), default=0, help="also give the likeliest k tokens at each place")
    parser.add_argument("--brief", action="store_true", help="sums only, no values for each token")
    parser.add_argument("--prefix", default="auto", help="token id before an empty context; auto: BOS, else EOS; none")
    parser.add_argument(
        "--prefix-texts", action="store_true", help="put it before texts too, so that their first token counts"
    )
    parser.add_argument("--max-length", type=whole(1), help="tokens read at once (default: the model's context)")
    parser.add_argument("--long", action="store_true", help="read pairs beyond that in windows, as texts always are")
    parser.add_argument(
        "--tokens",
        type=whole(64, 1 << 20, multiple=64),
        help="token places of a step (default: 256 on the CPU, 4096 on a GPU)",
    )
    parser.add_argument("--batch-invariant", action="store_true", help="the same bits whatever else is in the file")
    parser.add_argument("--batch", type=whole(1), default=1024, help="lines scored between two writes (default 1024)")


def run(args: argparse.Namespace, load: Callable[[], Any]) -> int:
    """Score; exit code. ``load`` gives the LanguageModel, and is called when the arguments and both files are good."""
    from flint_jax.scoring.files import check_files, score_file
    from flint_jax.scoring.scorer import Scorer

    prefix = _prefix(args.prefix)
    check_files(args.input, args.output, overwrite=args.overwrite)
    scorer = Scorer(
        load(),
        tokens=args.tokens,
        max_length=args.max_length,
        top_k=args.top_k,
        batch_invariant=args.batch_invariant,
        prefix=prefix,
    )
    if args.prefix_texts and scorer.prefix is None:
        raise RequestError("--prefix-texts needs a prefix token, and there is none; give --prefix ID")
    bad = score_file(
        scorer,
        args.input,
        args.output,
        stop_on_error=args.on_error == "stop",
        overwrite=args.overwrite,
        text_prefix=scorer.prefix if args.prefix_texts else None,
        long=args.long,
        brief=args.brief,
        lines=args.batch,
    )
    if bad:
        some = ", ".join(map(str, bad[:20])) + (", ..." if len(bad) > 20 else "")
        log.warning("%d bad lines, written as errors: %s", len(bad), some)
    s = scorer.stats
    log.info("%d scored, %d tokens run, %d saved by equal beginnings", s.sequences, s.tokens, s.reused)
    return 0


def _prefix(text: str) -> int | str | None:
    if text in ("auto", "none"):
        return None if text == "none" else text
    if not text.isdecimal():
        raise RequestError(f"--prefix {text}: need a token id, auto or none")
    return int(text)
