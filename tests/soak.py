"""``python -m tests.soak``: many streams for minutes on the tiny model, with random hang-ups; nothing may be left over.

Starts ``serve.py``, runs every prompt alone, then ``--streams`` at a time for ``--seconds``. Every reply must be what
it was alone. Afterwards slots, pages, snapshots, threads and open files must be back at their counts, memory must not
have grown by more than 2 % and 8 MB since the first fifth, and nothing may have been compiled.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flint_jax.load_test.http import Connection, Failed

ROOT = Path(__file__).parents[1]
_ALLOWED_GROWTH = 0.02, 8 << 20  # share, bytes: what the allocator of a server at work goes up and down by
COUNTS = ("running", "waiting", "free_slots", "free_pages", "snapshots", "slots", "pages")


class Server:
    """``python serve.py`` on a free port, float32. Raises RuntimeError when it does not get ready."""

    def __init__(self, *flags: str, log: Path | None = None):
        exact = ["--dtype", "float32", "--numerics", "transformers", "--disable-uvicorn-access-log"]
        self._log = open(log or os.devnull, "w")  # noqa: SIM115 (closed in stop)
        self.process = subprocess.Popen(
            [sys.executable, "serve.py", "--port", "0", *exact, *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"FLINT_API_KEY": "", "VLLM_API_KEY": ""},
        )
        self.url = ""
        for line in self.process.stdout:
            found = re.search(r"http://[\d.]+:\d+", line)
            self.url = self.url or (found[0] if found else "")
            if line.startswith("Try: "):
                return
        raise RuntimeError(f"serve.py ended with {self.process.wait()}")

    def stop(self) -> int:
        """The exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        self._log.close()
        return self.process.returncode


def process_facts(pid: int) -> dict[str, int]:
    """Threads, open files and resident bytes of a process."""
    proc = Path("/proc") / str(pid)
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    return {
        "threads": int(status["Threads"]),
        "files": len(list((proc / "fd").iterdir())),
        "bytes": int(status["VmRSS"].split()[0]) << 10,
    }


@dataclasses.dataclass
class Report:
    """What happened. different: replies that were not as alone."""

    replies: int = 0
    aborts: int = 0
    tokens: int = 0
    different: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)


def prompts(count: int, longest: int, seed: int = 0) -> list[dict[str, Any]]:
    """Requests of many lengths, some with a long common beginning; greedy, and sampled with a seed of their own.

    longest: words of the longest one.
    """
    rng = random.Random(seed)
    words = "river stone lantern quiet harbour winter copper garden signal market thunder paper".split()  # noqa: SIM905
    shared = " ".join(rng.choice(words) for _ in range(longest // 2))
    bodies = []
    for n in range(count):
        own = " ".join(rng.choice(words) for _ in range(rng.randint(1, longest // 2)))
        body = {
            "messages": [{"role": "user", "content": f"{shared} {own}" if n % 3 == 0 else own}],
            "max_tokens": rng.randint(4, 32),
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": n % 4 != 0,
        }
        body |= {"temperature": 0} if n % 2 else {"temperature": 0.8, "seed": n}
        if n % 5 == 0:
            body["stop"] = ["e"]
        bodies.append(body)
    return bodies


async def reply(connection: Connection, body: dict[str, Any]) -> tuple:
    """What one request got: its text, why it ended, its tokens; the part that must not depend on others."""
    thought, text, reason, usage = "", "", None, {}
    async for _, block in connection.events("/v1/chat/completions", body):
        if not block.startswith("data: {"):
            continue
        chunk = json.loads(block.removeprefix("data: "))
        if "error" in chunk:
            raise Failed(0, chunk["error"]["message"])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            thought += delta.get("reasoning") or ""
            text += delta.get("content") or ""
            reason = choice["finish_reason"] or reason
    return thought, text, reason, usage["completion_tokens"]


async def hang_up(connection: Connection, body: dict[str, Any], rng: random.Random) -> None:
    """Leave a request at a random moment: while it waits, is read, or speaks."""
    events = connection.events("/v1/chat/completions", body)
    try:
        async with asyncio.timeout(rng.choice([0.001, 0.01, 0.05, 0.2, 1.0])):
            for _ in range(rng.randint(1, 12)):
                await anext(events)
    except (TimeoutError, StopAsyncIteration):
        pass
    await connection.close()
    await events.aclose()


async def soak(
    url: str, pid: int, bodies: Sequence[dict[str, Any]], *, streams: int, seconds: float, aborts: int, seed: int = 0
) -> Report:
    """Load the server at ``url``, whose process is ``pid``; see the module's text."""
    report = Report()
    connection = Connection(url)
    alone = [await reply(connection, body) for body in bodies]
    before, facts = await settled(connection), process_facts(pid)
    ends = time.monotonic() + seconds

    async def worker(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        own = Connection(url)
        while time.monotonic() < ends or report.aborts < aborts:
            n = rng.randrange(len(bodies))
            left = max(ends - time.monotonic(), 0.0)
            # hang-ups are spread over the time that is left
            if report.aborts < aborts and rng.random() < max(0.2, 1 - left / seconds):
                report.aborts += 1
                await hang_up(own, bodies[n], rng)
                continue
            try:
                got = await reply(own, bodies[n])
            except Failed as e:
                report.problems.append(f"prompt {n}: {e}")
                await own.close()
                continue
            report.replies += 1
            report.tokens += got[3]
            if got != alone[n]:
                report.different.append(f"prompt {n}: {got}, alone {alone[n]}")
        await own.close()

    async def watch() -> None:
        while True:
            report.memory.append(process_facts(pid)["bytes"])
            await asyncio.sleep(max(seconds / 50, 0.2))

    watcher = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(worker(number))
    watcher.cancel()
    await connection.close()  # idle for minutes: the server has closed its end
    after = await settled(connection)
    compare(report, before, after, facts, process_facts(pid))
    for n, body in enumerate(bodies):
        if (again := await reply(connection, body)) != alone[n]:
            report.different.append(f"prompt {n} afterwards: {again}, alone {alone[n]}")
    text = await connection.text("/metrics")
    late = re.search(r"^vllm:recompilations_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    if float(late[1]):
        report.problems.append(f"{late[1]} compilations after the server was ready")
    await connection.close()
    return report


async def settled(connection: Connection) -> dict[str, int]:
    """The engine's counts once nothing runs."""
    for _ in range(600):
        stats = (await connection.get("/health"))["engine"]
        if stats["running"] == stats["waiting"] == 0 and not (await connection.get("/load"))["server_load"]:
            return {name: stats[name] for name in COUNTS if name in stats}
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the server does not come to rest: {stats}")


def compare(report: Report, before: dict, after: dict, facts_before: dict, facts_after: dict) -> None:
    """Put into ``report.problems`` what is not as it was before the load."""
    for name in before:
        if before[name] != after[name]:
            report.problems.append(f"{name}: {before[name]} before, {after[name]} after")
    # sockets of the watching connection and of those just closed
    for name in ("threads", "files"):
        if facts_after[name] > facts_before[name]:
            report.problems.append(f"{name}: {facts_before[name]} before, {facts_after[name]} after")
    fifth = max(1, len(report.memory) // 5)
    early, late = max(report.memory[:fifth]), max(report.memory[-fifth:])
    if late - early > early * _ALLOWED_GROWTH[0] + _ALLOWED_GROWTH[1]:
        report.problems.append(f"memory grew from {early / 1e6:.1f} to {late / 1e6:.1f} MB")


def main() -> int:
    """Run it; exit code 1 when something was not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--aborts", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--log", type=Path, help="file for what the server logs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    size = ["--max-num-seqs", str(args.max_num_seqs), "--max-model-len", str(args.max_model_len)]
    server = Server(*size, log=args.log)
    try:
        bodies = prompts(args.prompts, args.max_model_len // 4, args.seed)
        how = {"streams": args.streams, "seconds": args.seconds, "aborts": args.aborts, "seed": args.seed}
        report = asyncio.run(soak(server.url, server.process.pid, bodies, **how))
    finally:
        code = server.stop()
    if code:
        report.problems.append(f"exit code {code} after SIGTERM")
    print(
        f"{report.replies} replies, {report.tokens} tokens, {report.aborts} hang-ups in {args.seconds:g} s; "
        f"memory {report.memory[0] / 1e6:.1f} MB at first, {max(report.memory) / 1e6:.1f} at most, "
        f"{report.memory[-1] / 1e6:.1f} at last"
    )
    for text in [*report.problems[:20], *(f"not as alone: {d}" for d in report.different[:5])]:
        print(f"PROBLEM: {text}")
    print("nothing left over, every reply as alone" if not (report.problems or report.different) else "FAILED")
    return int(bool(report.problems or report.different))


if __name__ == "__main__":
    raise SystemExit(main())
