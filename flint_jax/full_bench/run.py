"""The command: a checkpoint, a cold start, the levels, a warm start; a table, and JSON on the last line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flint_jax.command_line import Parser
from flint_jax.config import FlintConfig
from flint_jax.full_bench import floors
from flint_jax.full_bench.levels import FULL, TINY, Client, Lengths, LevelError, levels
from flint_jax.full_bench.process import ServerError, ServerProcess
from flint_jax.number_flags import whole
from flint_jax.roofline import DEVICES, Device

FORMATS = ("nvfp4", "bf16")
_REST = 20.0  # seconds of --limit that are left for stopping the server and for the table


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when every level of every format was measured, else 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    args = _parser().parse_args(words[:at])
    bench = Bench(args, words[at + 1 :])
    if threading.current_thread() is not threading.main_thread():
        return bench.run()
    # Whoever ends the bench with SIGTERM gets what was measured, too, and no server is left behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return bench.run()
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="flint bench full",
        description="Start serve.py on random weights, measure it over HTTP, start it again with a warm compile cache. "
        "Flags after -- are serve.py's.",
    )
    parser.add_argument("--format", type=_formats, default=FORMATS, help="comma-separated (default: nvfp4,bf16)")
    parser.add_argument("--preset", choices=("full", "tiny"), default="full", help="tiny: a look, on any machine")
    parser.add_argument(
        "--weights",
        choices=("dummy", "file"),
        default="dummy",
        help="dummy: made on the device; file: a whole checkpoint is written first and loaded (23 or 80 GB at full)",
    )
    parser.add_argument(
        "--levels",
        choices=("quick", "all"),
        default="quick",
        help="quick: one prompt of the longest length; all: three (default: quick)",
    )
    parser.add_argument("--warm-start", action=argparse.BooleanOptionalAction, default=True, help="time a second start")
    parser.add_argument("--device", choices=sorted(DEVICES), default="h200", help="for the floors (default: h200)")
    parser.add_argument("--limit", type=whole(30), default=1800, metavar="S", help="for all of it (default: 1800)")
    parser.add_argument("--ready-limit", type=whole(1), default=600, metavar="S", help="for one start (default: 600)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work there and leave it: checkpoint, cache, logs")
    return parser


def _formats(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if bad := [n for n in names if n not in FORMATS]:
        raise argparse.ArgumentTypeError(f"{bad[0]!r}: need {' or '.join(FORMATS)}, or both with a comma")
    return names


class Bench:
    """One run. args: the command's flags. flags: more of serve.py's."""

    def __init__(self, args: argparse.Namespace, flags: Sequence[str]):
        from loaders.synthetic import preset

        self._args, self._flags = args, list(flags)
        self._deadline = time.monotonic() + args.limit
        self._config: FlintConfig = preset(args.preset)
        self._device: Device = DEVICES[args.device]
        self._sizes: Lengths = FULL if args.preset == "full" else TINY
        self.rows: list[dict[str, Any]] = []
        self.starts: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def run(self) -> int:
        """Everything, in order; what was measured is printed whatever happens."""
        folder = self._args.keep or Path(tempfile.mkdtemp(prefix="flint-bench-"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for weight_format in self._args.format:
                try:
                    self._format(folder, weight_format)
                except ServerError as error:
                    self._failed(f"{weight_format}: {error}")
        finally:
            if self._args.keep is None:
                shutil.rmtree(folder, ignore_errors=True)
            print(_table(self.rows, self.starts), flush=True)
            facts = {"bench": "full", "preset": self._args.preset, "weights": self._args.weights}
            facts |= {"device_of_floors": self._device.name, "flags": self._flags}
            print(json.dumps(facts | {"starts": self.starts, "rows": self.rows, "failures": self.failures}), flush=True)
        return int(bool(self.failures))

    def _format(self, folder: Path, weight_format: str) -> None:
        argv = [*self._checkpoint(folder, weight_format), *self._flags]
        cache = folder / f"cache-{weight_format}"
        shutil.rmtree(cache, ignore_errors=True)  # of a run before: this start is a cold one
        with self._served(argv, folder / f"{weight_format}-cold.log", cache, weight_format, "cold") as server:
            self._levels(server, weight_format)
        if self._args.warm_start:
            with self._served(argv, folder / f"{weight_format}-warm.log", cache, weight_format, "warm"):
                pass

    def _checkpoint(self, folder: Path, weight_format: str) -> list[str]:
        """Write what the server needs; returns its flags."""
        from loaders import synthetic

        begin = time.monotonic()
        if self._args.weights == "dummy":
            synthetic.write_description(folder / "model", self._config)
            quantization = {"nvfp4": "nvfp4", "bf16": "none"}[weight_format]
            return [str(folder / "model"), "--load-format", "dummy", "--quantization", quantization]
        path = folder / ("model.gguf" if weight_format == "nvfp4" else "model-bf16")
        if not path.exists():
            write = synthetic.write_gguf if weight_format == "nvfp4" else synthetic.write_safetensors
            size = write(path, self._config)
            print(f"{path.name}: {size / 1e9:.1f} GB written in {time.monotonic() - begin:.0f} s", flush=True)
        return [str(path)]

    @contextlib.contextmanager
    def _served(self, argv: Sequence[str], log: Path, cache: Path, weight_format: str, kind: str):
        left = self._deadline - time.monotonic() - _REST
        if left <= 0:
            raise ServerError(f"no time is left for the {kind} start (--limit {self._args.limit})")
        print(f"\n{weight_format}, {kind} start: serve.py {' '.join(argv)}", flush=True)
        server = ServerProcess(argv, log, cache)
        try:
            ready = server.wait_ready(min(left, self._args.ready_limit))
            phases = server.phases()
            print(f"ready {ready:.1f} s after the start of the process; its own account:\n    {phases}", flush=True)
            start = {"format": weight_format, "start": kind, "ready_s": round(ready, 2), "phases": phases}
            self.starts.append(start)
            yield server
        finally:
            seconds, code = server.stop()
            print(f"stopped in {seconds:.1f} s, exit code {code}", flush=True)
        start |= {"stop_s": round(seconds, 2), "exit_code": code}
        if code:
            self._failed(f"{weight_format}: the server, told to stop, ended with exit code {code}")

    def _levels(self, server: ServerProcess, weight_format: str) -> None:
        assert server.url
        client = Client(server.url, server.model(), self._config.vocab_size, self._deadline - _REST)
        for name, measure in levels(client, self._sizes, 3 if self._args.levels == "all" else 1):
            server.check()  # gone: nothing more to ask
            begin = time.monotonic()
            try:
                row = asyncio.run(measure())
            except (LevelError, OSError) as error:
                self._failed(f"{weight_format}, {name}: {error}")
                continue
            row = {"format": weight_format, "level": name} | row | self._floors(weight_format, row)
            self.rows.append(row)
            print(f"{_line(row)}   ({time.monotonic() - begin:.1f} s)", flush=True)
            for text in row.get("warnings", []):
                self._failed(f"{weight_format}, {name}: {text}")

    def _floors(self, weight_format: str, row: dict[str, Any]) -> dict[str, float]:
        batch = row.get("batch", 1)
        new = row["prompt_tokens"] - row["cached_tokens"]
        first = floors.first_ms(self._config, self._device, weight_format, max(1, new), row["cached_tokens"])
        token = floors.token_ms(self._config, self._device, weight_format, row["context"], batch)
        return {"ttft_floor_ms": float(f"{first:.4g}"), "token_floor_ms": float(f"{token:.4g}")}

    def _failed(self, text: str) -> None:
        self.failures.append(text)
        print(f"FAILED {text}", flush=True)


_COLUMNS = (
    "format", "level", "TTFT ms", "p90", "floor", "cached", "tokens/s", "ms a token", "floor", "ITL p50", "p90", "p99",
    "max",
)  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    itl, first = row["itl_ms"], row.get("ttft_ms_quantiles", {})
    cells = [row["format"], row["level"], first.get("p50", row["ttft_ms"]), first.get("p90"), row["ttft_floor_ms"]]
    cells += [row["cached_tokens"], row["tokens_per_s"], row["token_ms"], row["token_floor_ms"]]
    cells += [itl.get(k) for k in ("p50", "p90", "p99", "max")]
    return "| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |"


def _table(rows: Sequence[dict[str, Any]], starts: Sequence[dict[str, Any]]) -> str:
    lines = ["", "| format | start | ready s | stop s |", "| --- | --- | --- | --- |"]
    lines += [f"| {s['format']} | {s['start']} | {s['ready_s']} | {s.get('stop_s', '-')} |" for s in starts]
    lines += ["", "| " + " | ".join(_COLUMNS) + " |", "| " + " | ".join("---" for _ in _COLUMNS) + " |"]
    return "\n".join([*lines, *map(_line, rows)])


if __name__ == "__main__":
    sys.exit(main())
