"""The load itself: workers that each keep one request going, and what they measured."""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from flint_jax.command_line import Parser
from flint_jax.load_test.conformance import Checker
from flint_jax.load_test.http import Connection, Failed

_TEXT = (
    "harbour quiet lantern river stone winter copper garden signal market thunder paper window silver forest engine "
    "morning bridge valley candle orange shadow summer castle bottle yellow ticket corner pencil rocket"
)
_WORDS = _TEXT.split()
_ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclasses.dataclass
class Outcome:
    """One request: seconds to the first piece of text, between pieces, in all; tokens; what was wrong.

    began: when it was sent, by time.perf_counter.
    """

    began: float = 0.0
    first: float = 0.0
    gaps: list[float] = dataclasses.field(default_factory=list)
    total: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    cached: int = 0
    warnings: list[str] = dataclasses.field(default_factory=list)
    error: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """A table, then one line of JSON. Exit code 1 when a request failed or a chunk was not as it should be."""
    args = _parser().parse_args(argv)
    rows = asyncio.run(_levels(args))
    print(json.dumps({"bench": "serve", "url": args.url, "rows": rows}))
    return int(any(row["failed"] or row["warnings"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="flint bench serve", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of any OpenAI-compatible server")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--endpoint", choices=list(_ROUTES), default="chat")
    parser.add_argument("--concurrency", default="1,8", metavar="N,N", help="requests at a time (default: 1,8)")
    parser.add_argument("--requests", type=int, default=16, help="at each level, at least one a worker (default: 16)")
    parser.add_argument("--input-tokens", type=int, default=128, help="of the user's text, about (default: 128)")
    parser.add_argument("--shared-tokens", type=int, default=0, help="that all requests begin with (default: 0)")
    parser.add_argument("--output-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--openai-only", action="store_true", help="no ignore_eos; replies may be shorter")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="for one request (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default: 0)")
    return parser


async def _levels(args: argparse.Namespace) -> list[dict[str, Any]]:
    connection = Connection(args.url, args.api_key)
    try:
        model = args.model or (await connection.get("/v1/models"))["data"][0]["id"]
        texts = _Texts(args, await _tokens_a_word(connection))
    except (Failed, OSError, KeyError, IndexError) as e:
        print(f"bench serve: error: {args.url}: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        await connection.close()
    print(f"{args.url}, {model}: about {args.input_tokens} tokens in, {args.output_tokens} out, {args.endpoint}")
    print(_TITLES)
    rows = []
    for level in map(int, args.concurrency.split(",")):
        row = await _level(args, model, texts, level)
        rows.append(row)
        print(_line(row), flush=True)
        for text, count in row["warnings"].items():
            print(f"    warning, {count} times: {text}")
        for text, count in row["failed"].items():
            print(f"    failed, {count} times: {text}")
    return rows


async def _level(args: argparse.Namespace, model: str, texts: _Texts, level: int) -> dict[str, Any]:
    left = collections.deque(range(max(args.requests, level)))
    outcomes: list[Outcome] = []

    async def worker() -> None:
        connection = Connection(args.url, args.api_key)
        while left:
            left.popleft()
            outcomes.append(await request(args, model, texts.next(), connection))
        await connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(level)))
    return _summary(level, outcomes, time.perf_counter() - began)


async def request(
    args: Any, model: str, text: str | Sequence[int], connection: Connection, outcome: Outcome | None = None
) -> Outcome:
    """One request of ``text`` (for completions also token ids), checked and timed.

    args: the bench's flags; endpoint, output_tokens, openai_only and timeout count. outcome: filled while it runs.
    """
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": args.output_tokens,
    }
    body |= {"messages": [{"role": "user", "content": text}]} if args.endpoint == "chat" else {"prompt": text}
    if not args.openai_only:
        body["ignore_eos"] = True
    outcome = outcome or Outcome()
    checker = Checker(args.endpoint, wanted=args.output_tokens, exact=not args.openai_only)
    began = last = outcome.began = time.perf_counter()
    try:
        async with asyncio.timeout(args.timeout):
            async for at, block in connection.events(_ROUTES[args.endpoint], body):
                if not checker.block(block):
                    continue
                if outcome.first:
                    outcome.gaps.append(at - last)
                else:
                    outcome.first = at - began
                last = at
    except (Failed, OSError, TimeoutError) as e:
        await connection.close()
        outcome.error = str(e) or f"no end after {args.timeout:g} s"
        return outcome
    outcome.total = time.perf_counter() - began
    outcome.warnings = checker.end()
    usage = checker.usage or {}
    outcome.prompt_tokens, outcome.tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    outcome.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return outcome


class _Texts:
    """Prompts of a wanted length that share nothing but what they are told to."""

    def __init__(self, args: argparse.Namespace, tokens_a_word: float):
        self._random = random.Random(args.seed)
        self._own = max(1, round((args.input_tokens - args.shared_tokens) / tokens_a_word))
        self._shared = self._words(round(args.shared_tokens / tokens_a_word))

    def next(self) -> str:
        """The next prompt."""
        return " ".join([*self._shared, *self._words(self._own)])

    def _words(self, count: int) -> list[str]:
        return [self._random.choice(_WORDS) for _ in range(count)]


async def _tokens_a_word(connection: Connection) -> float:
    """Measured with /tokenize where the server has it, else a guess for large vocabularies."""
    try:
        return (await connection.post("/tokenize", {"prompt": _TEXT}))["count"] / len(_WORDS)
    except (Failed, KeyError, TypeError):
        await connection.close()
        return 1.2


def _summary(level: int, outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    good = [o for o in outcomes if not o.error]
    gaps = [gap for o in good for gap in o.gaps]
    tokens = sum(o.tokens for o in good)
    return {
        "concurrency": level,
        "requests": len(outcomes),
        "failed": dict(collections.Counter(o.error for o in outcomes if o.error)),
        "warnings": dict(collections.Counter(text for o in good for text in o.warnings)),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(o.prompt_tokens for o in good),
        "cached_tokens": sum(o.cached for o in good),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 2),
        "requests_per_s": round(len(good) / seconds, 3),
        "ttft_ms": quantiles([o.first for o in good]),
        "itl_ms": quantiles(gaps),
        "e2e_ms": quantiles([o.total for o in good]),
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median, 90 and 99 %, and the largest, in ms."""
    if not seconds:
        return {}
    ranked = sorted(seconds)
    at = {f"p{p}": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in (90, 99)}
    return {k: round(1000 * v, 2) for k, v in {"p50": statistics.median(ranked), **at, "max": ranked[-1]}.items()}


_TITLES = (
    "| at a time | requests | tokens/s | TTFT p50 ms | p90 | p99 | ITL p50 ms | p90 | p99 | max | cached | warnings |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def _line(row: dict[str, Any]) -> str:
    first, gap = row["ttft_ms"], row["itl_ms"]
    cells = [row["concurrency"], row["requests"], row["tokens_per_s"]]
    cells += [first.get(k, "-") for k in ("p50", "p90", "p99")] + [
        gap.get(k, "-") for k in ("p50", "p90", "p99", "max")
    ]
    cells += [row["cached_tokens"], sum(row["warnings"].values())]
    return "| " + " | ".join(map(str, cells)) + " |"
