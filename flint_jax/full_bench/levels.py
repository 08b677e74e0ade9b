"""What is asked of the server, level by level. Prompts are random token ids; every reply has the length asked for."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from flint_jax.load_test.http import Connection
from flint_jax.load_test.run import Outcome, quantiles, request

REQUEST_S = 180.0  # for one request
STREAM_BEGINS_S = 30.0  # within which the stream beside a long prompt has to flow
STREAM_PIECES = 32  # that it has sent before the long prompt arrives


class LevelError(Exception):
    """A level that could not be measured."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens: prompts and replies of the levels."""

    short: tuple[tuple[int, int], ...]  # (prompt, reply), asked three times
    middle: tuple[int, int]
    long: tuple[int, int]
    more: int  # new tokens behind the long prompt
    together: tuple[int, int, int]  # at a time, prompt, reply
    prefix: int  # of an agent's session
    turn: tuple[int, int, int]  # new tokens of a turn from, to; reply
    turns: int
    stream: int  # most tokens of the stream beside a long prompt


FULL = Lengths(
    ((64, 16), (512, 256)), (8192, 128), (100_000, 128), 2000, (8, 512, 256), 30_000, (1000, 2000, 300), 32, 30_000
)
TINY = Lengths(((16, 4), (64, 16)), (256, 8), (1500, 8), 64, (4, 64, 16), 300, (10, 20, 8), 6, 1500)


class Client:
    """Asks one server. deadline: of time.monotonic, after which nothing is waited for. Raises LevelError."""

    def __init__(self, url: str, model: str, vocab: int, deadline: float, seed: int = 0):
        self._url, self._model, self._vocab, self._deadline = url, model, vocab, deadline
        self._random = random.Random(seed)

    def ids(self, count: int) -> list[int]:
        """Random token ids, other ones each time."""
        return self._random.choices(range(self._vocab), k=count)

    def between(self, low: int, high: int) -> int:
        """A random whole number."""
        return self._random.randint(low, high)

    async def ask(self, prompt: Sequence[int], reply: int, outcome: Outcome | None = None) -> Outcome:
        """The outcome of one request on a connection of its own."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise LevelError("the time of the bench is over (--limit)")
        args = argparse.Namespace(
            endpoint="completions", output_tokens=reply, openai_only=False, timeout=min(left, REQUEST_S)
        )
        connection = Connection(self._url)
        try:
            outcome = await request(args, self._model, list(prompt), connection, outcome)
        finally:
            await connection.close()
        if outcome.error:
            raise LevelError(outcome.error)
        return outcome


Level = Callable[[], Awaitable[dict[str, Any]]]


def levels(client: Client, sizes: Lengths, repeat_long: int) -> list[tuple[str, Level]]:
    """(name, what measures it), in the order in which they have to run. repeat_long: times of the middle and the long
    prompt, each with ids of its own."""
    kept: dict[str, list[int]] = {}

    async def long() -> dict[str, Any]:
        prompts = [client.ids(sizes.long[0]) for _ in range(repeat_long)]
        row = await _alone(client, prompts, sizes.long[1])
        kept["long"] = prompts[-1]
        return row

    def behind_long(extra: int) -> Level:
        async def measure() -> dict[str, Any]:
            if "long" not in kept:
                raise LevelError("the long prompt before it failed")
            return await _alone(client, [[*kept["long"], *client.ids(extra)]], sizes.long[1])

        return measure

    found: list[tuple[str, Level]] = []
    for prompt, reply in sizes.short:
        found.append((f"{prompt:,}/{reply}", _repeated(client, prompt, reply, 3)))
    found += [
        (f"{sizes.middle[0]:,}/{sizes.middle[1]}", _repeated(client, *sizes.middle, max(3, repeat_long))),
        (f"{sizes.long[0]:,}/{sizes.long[1]}", long),
        (f"the same {sizes.long[0]:,} again", behind_long(0)),
        (f"{sizes.more:,} new behind {sizes.long[0]:,}", behind_long(sizes.more)),
        (f"{sizes.together[1]}/{sizes.together[2]}, {sizes.together[0]} at a time", lambda: _together(client, sizes)),
        (f"agent, {sizes.turns} turns", lambda: _agent(client, sizes)),
        (f"{sizes.long[0]:,} beside a stream", lambda: _beside(client, sizes)),
    ]
    return found


def _repeated(client: Client, prompt: int, reply: int, times: int) -> Level:
    return lambda: _alone(client, [client.ids(prompt) for _ in range(times)], reply)


async def _alone(client: Client, prompts: Sequence[Sequence[int]], reply: int) -> dict[str, Any]:
    """One after the other."""
    return _row([await client.ask(prompt, reply) for prompt in prompts])


def _row(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of requests that ran one after the other: median time to the first token, and the others."""
    firsts = [1e3 * o.first for o in outcomes]
    # Tokens without text of their own are not seen: the mean over all tokens is not misled by them, gaps are.
    each = [1e3 * sum(o.gaps) / (o.tokens - 1) for o in outcomes if o.tokens > 1 and o.gaps]
    row: dict[str, Any] = {
        "prompt_tokens": outcomes[-1].prompt_tokens,
        "cached_tokens": outcomes[-1].cached,
        "context": outcomes[-1].prompt_tokens + outcomes[-1].tokens // 2,
        "ttft_ms": round(statistics.median(firsts), 2),
        "ttft_ms_each": [round(f, 2) for f in firsts],
        "token_ms": round(statistics.median(each), 3) if each else None,
        "tokens_per_s": round(statistics.median(o.tokens / o.total for o in outcomes), 1),
        "itl_ms": quantiles([gap for o in outcomes for gap in o.gaps]),
    }
    return row | _warned(outcomes)


def _warned(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    warnings = sorted({text for o in outcomes for text in o.warnings})
    return {"warnings": warnings} if warnings else {}


async def _together(client: Client, sizes: Lengths) -> dict[str, Any]:
    count, prompt, reply = sizes.together
    began = time.perf_counter()
    outcomes = await _all([client.ask(client.ids(prompt), reply) for _ in range(count)])
    seconds = time.perf_counter() - began
    row = _row(outcomes)
    first = quantiles([o.first for o in outcomes])
    tokens = sum(o.tokens for o in outcomes)
    return row | {"ttft_ms_quantiles": first, "tokens_per_s": round(tokens / seconds, 1), "batch": count}


async def _all(asked: Sequence[Awaitable[Outcome]]) -> list[Outcome]:
    """All outcomes; one that fails takes the others down, so that none of them runs into the next level."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in asked]
    except* LevelError as errors:
        raise LevelError(str(errors.exceptions[0])) from None
    return [task.result() for task in tasks]


async def _agent(client: Client, sizes: Lengths) -> dict[str, Any]:
    """A session that grows: each turn sends all that was before. What the model said is replaced by as many random
    tokens, so those are new to the server, too."""
    low, high, reply = sizes.turn
    prompt = client.ids(sizes.prefix)
    began = time.perf_counter()
    first = await client.ask(prompt, reply)
    turns = []
    for _ in range(sizes.turns - 1):
        prompt += client.ids(reply + client.between(low, high))
        turns.append(await client.ask(prompt, reply))
    row = _row(turns) | {
        "ttft_ms_quantiles": quantiles([o.first for o in turns]),
        "first_turn_ttft_ms": round(1e3 * first.first, 2),
        "cached_share": round(sum(o.cached for o in turns) / sum(o.prompt_tokens for o in turns), 4),
        "seconds": round(time.perf_counter() - began, 2),
    }
    row["ttft_ms_each"] = [round(1e3 * o.first, 2) for o in [first, *turns]]
    return row


async def _beside(client: Client, sizes: Lengths) -> dict[str, Any]:
    """The gaps of a stream while a long prompt is read."""
    stream = Outcome()
    running = asyncio.create_task(client.ask(client.ids(sizes.short[-1][0]), sizes.stream, stream))
    try:
        begin = time.monotonic()
        while len(stream.gaps) < STREAM_PIECES:
            if running.done():
                running.result()
                raise LevelError("the stream ended before the long prompt arrived")
            if time.monotonic() - begin > STREAM_BEGINS_S:
                raise LevelError(f"the stream sent {len(stream.gaps)} pieces in {STREAM_BEGINS_S:.0f} s")
            await asyncio.sleep(0.01)
        before = quantiles(list(stream.gaps))
        prompt = await client.ask(client.ids(sizes.long[0]), 1)
        seen, begin = len(stream.gaps), time.monotonic()  # a gap that the prompt made may still be open
        while len(stream.gaps) == seen and not running.done() and time.monotonic() - begin < STREAM_BEGINS_S:
            await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    at, during = stream.began + stream.first, []
    for gap in stream.gaps:
        if at <= prompt.began + prompt.first and at + gap >= prompt.began:
            during.append(gap)
        at += gap
    row = _row([prompt]) | {"itl_ms": quantiles(during), "itl_ms_before": before, "pieces": len(during)}
    if not during:
        row["warnings"] = [*row.get("warnings", []), "the stream sent nothing while the prompt was read"]
    return row
