"""``python -m flint_jax eval``: exact answers on held-out items, as a table, JSON and a plot."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from flint_jax.errors import FlintError
from flint_jax.evals import suite
from flint_jax.evals.item import TRAIN
from flint_jax.evals.replies import HttpModel, LocalModel


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--url", help="ask a server, e.g. http://127.0.0.1:8000/v1, instead of loading a model")
    parser.add_argument("--api-key", default="none", help="for --url")
    parser.add_argument("--families", default=",".join(suite.NAMES), help=f"of {', '.join(suite.NAMES)}")
    parser.add_argument("--items", type=int, default=50, help="items of each family, of each distance (default 50)")
    parser.add_argument("--distances", default="128,512,1024,2048,3500", help="tokens from a fact to the question")
    parser.add_argument("--sampling", choices=("greedy", "default", "both"), default="greedy")
    parser.add_argument("--split", choices=("held-out", "train"), default="held-out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--slots", type=int, default=16, help="items answered at once")
    parser.add_argument("--output", help="JSON with the table and every wrong reply")
    parser.add_argument("--plot", help="a PNG of the table (needs matplotlib)")


def run(args: argparse.Namespace, load) -> int:
    """Run it. load() gives the LanguageModel that the arguments name."""
    if args.url and args.model:
        raise FlintError("--model and --url name two models; give one of them")
    families, distances = _asked(args)
    lm = None if args.url else load()
    modes = ("greedy", "default") if args.sampling == "both" else (args.sampling,)
    tables, wrong = {}, {}
    for mode in modes:
        # An empty set of values means what the checkpoint or the server has as its default.
        settings = None if mode == "greedy" else {}
        if lm is None:
            model = HttpModel(
                args.url, key=args.api_key, settings=settings, max_tokens=args.max_tokens, slots=args.slots
            )
            length = None
        else:
            model = LocalModel(lm, settings=_defaults(settings), max_tokens=args.max_tokens, slots=args.slots)
            length = model.length
        split = TRAIN if args.split == "train" else suite.HELD_OUT
        asked = suite.items(families, args.items, seed=args.seed, distances=distances, length=length, split=split)
        with tqdm(total=len(asked), desc=mode, leave=False) as bar:
            replies = model.ask(asked, bar.update)
        tables[mode] = suite.table(asked, replies)
        wrong[mode] = [
            _wrong(item, reply)
            for item, reply in zip(asked, replies, strict=True)
            if not (item.right(reply.content, reply.calls) and reply.well_formed)
        ]
        _show(mode, tables[mode])
    if args.output:
        data = {"settings": _settings(args, lm)}
        data |= {m: {"rows": [_as_dict(r) for r in tables[m]], "wrong": wrong[m]} for m in modes}
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump(data, file, ensure_ascii=False, indent=1)
    if args.plot:
        _plot(args.plot, tables)
    return 0


def _asked(args: argparse.Namespace) -> tuple[list[str], list[int]]:
    """Families and distances. Raises FlintError for what would only fail after a load, or after all the answers."""
    families = list(dict.fromkeys(f.strip() for f in args.families.split(",") if f.strip()))
    unknown = [f for f in families if f not in suite.NAMES]
    if unknown or not families:
        raise FlintError(f"--families {args.families}: need some of {', '.join(suite.NAMES)}")
    distances = [d.strip() for d in args.distances.split(",")]
    if not all(d.isdecimal() and int(d) for d in distances):
        raise FlintError(f"--distances {args.distances}: need whole numbers of 1 or more, with commas between")
    for name in ("items", "max_tokens", "slots"):
        if getattr(args, name) < 1:
            raise FlintError(f"--{name.replace('_', '-')} {getattr(args, name)}: need 1 or more")
    if args.url and urllib.parse.urlsplit(args.url).scheme not in ("http", "https"):
        raise FlintError(f"--url {args.url}: need an address such as http://127.0.0.1:8000/v1")
    for path in filter(None, (args.output, args.plot)):
        if not Path(path).absolute().parent.is_dir():
            raise FlintError(f"{path}: no such folder; make it, or give another path")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise FlintError("--plot needs matplotlib: pip install 'flint-jax[research]'")
    return families, [int(d) for d in distances]


def _settings(args: argparse.Namespace, lm) -> dict:
    """What the table is of."""
    asked = {name: getattr(args, name) for name in ("items", "seed", "split", "distances", "max_tokens", "slots")}
    if lm is None:
        return {"model": args.url, **asked}
    return {"model": lm.name, "dtype": args.dtype, "numerics": args.numerics, **asked}


def _defaults(settings):
    if settings is None:
        return None
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return dict.fromkeys(names)  # None: the checkpoint's own


def _wrong(item, reply) -> dict:
    want = item.content if not item.calls else [list(c) for c in item.calls]
    return {
        "family": item.family,
        "detail": item.detail,
        "question": item.messages[-1]["content"][-300:],
        "want": want,
        "content": reply.content,
        "calls": [list(c) for c in reply.calls],
        "finish_reason": reply.finish_reason,
        "well_formed": reply.well_formed,
        "error": reply.error,
    }


def _as_dict(row: suite.Row) -> dict:
    return dataclasses.asdict(row) | {"accuracy": row.accuracy, "format": row.format}


def _show(mode: str, rows: Sequence[suite.Row]) -> None:
    print(f"{mode:<14}{'':<20}{'items':>7}{'exact':>8}{'format':>8}")
    for row in rows:
        print(f"{row.family:<14}{row.detail:<20}{row.items:>7}{row.accuracy:>8.1%}{row.format:>8.1%}")
    total = sum(r.items for r in rows if r.detail != "all")
    shaped = sum(r.well_formed for r in rows if r.detail != "all")
    print(f"{'format':<14}{'all':<20}{total:>7}{'':>8}{shaped / max(total, 1):>8.1%}")
    wanted, thought = (sum(getattr(r, k) for r in rows if r.detail != "all") for k in ("asked_to_think", "thought"))
    if wanted:
        print(f"{'thoughts':<14}{'of those asked for':<20}{wanted:>7}{thought / wanted:>8.1%}")


def _plot(path: str, tables: dict[str, Sequence[suite.Row]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.32 * max(map(len, tables.values())) + 1.5))
    width = 0.8 / len(tables)
    for n, (mode, rows) in enumerate(tables.items()):
        places = [i + n * width for i in range(len(rows))]
        axes.barh(places, [100 * r.accuracy for r in rows], height=width, label=mode)
    axes.set_yticks(range(len(rows)), [f"{r.family}: {r.detail}" for r in rows])
    axes.invert_yaxis()
    axes.set_xlabel("exact replies, %")
    axes.set_xlim(0, 100)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
