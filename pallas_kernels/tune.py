"""``python -m pallas_kernels.tune``: time kernel configurations on this GPU and keep the fastest.

Every candidate is first compared with the op's reference and timed as ``bench`` times. It replaces the rule's choice
only if it is 2 % faster over all cases that share a key (lengths of the context, which a compiled step does not know).
The result goes to ``pallas_kernels/tuned/<device>.json``, which ``tuned`` reads; entries of other runs stay.

Candidates run in a child process. One that takes too long kills it (a GPU that hangs answers to nothing less); the
next child goes on with the next candidate.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MARGIN = 0.02  # runs differ by about 1 %
CANDIDATES: dict[str, list[dict[str, int]]] = {
    "nvfp4_gemv": [{"warps": n} for n in (4, 8, 12, 16)],
    "attend_ring": [{"splits": s, "warps": n} for s in (1, 2, 4, 8) for n in (4, 8)],
    "attend_spans": [
        {"cluster": 8, "parts": 3, "stages": 2},
        {"cluster": 8, "parts": 3, "stages": 3},
        {"cluster": 4, "parts": 7},
        {"cluster": 2, "parts": 16},
        {"cluster": 2, "parts": 16, "stages": 3},
        {"cluster": 1, "parts": 33},
    ],
    "attend_pages": [
        {"warps": 8, "stages": 2},
        {"warps": 8, "stages": 3},
        {"warps": 4, "stages": 3, "blocks_per_core": 2},
        {"warps": 4, "stages": 2, "blocks_per_core": 3},
    ],
}


def cases(ops: str = "", only: str = ""):
    """What is tuned: the model's matrices and both kinds of attention, at the batch sizes that are compiled."""
    from pallas_kernels.nvfp4_gemv import cases as gemv
    from pallas_kernels.sink_attention import cases as attention

    found = [
        gemv.case(shape, tokens, nvfp4=nvfp4)
        for shape in gemv.SHAPES
        for nvfp4 in (True, False)
        for tokens in (1, 2, 4, 8, 16)
        if shape not in ("head", "shared_gate_up", "shared_down")  # no such choice; part of the experts' kernels
    ]
    found += [attention.ring_case(rows) for rows in (1, 2, 4, 8, 16)]
    lengths = [(1, 1), (1, 8), (1, 100), (2, 8), (2, 100), (4, 8), (8, 8), (8, 100), (16, 8)]
    found += [attention.page_case(rows, 1024 * context) for rows, context in lengths]
    names = [name for name in ops.split(",") if name]
    return [case for case in found if only in case.name and (not names or case.op in names)]


def asked(case) -> tuple[str, str, dict[str, int]]:
    """(op, key, rule) of the one configuration that the case looks up."""
    import jax

    from pallas_kernels import tuned

    with tuned.recording() as seen:
        jax.eval_shape(functools.partial(case.run, 0), *jax.eval_shape(case.make, jax.random.key(0)))
    (one,) = seen
    return one


def configured(case, config: dict[str, int]):
    """The case in this configuration."""
    from pallas_kernels import tuned

    def run(*args):
        with tuned.force(config):
            return case.run(*args)

    return dataclasses.replace(case, run=run)


def child(options, measure: Callable[..., dict] | None = None) -> int:
    """Measure what ``options.rows`` does not hold yet, in this process; a line before and one after each candidate."""
    import jax

    from pallas_kernels import bench, device, dispatch

    dev = device.current()
    if not dev.kernels:
        print(f"{dev.kind} does not run the kernels: nothing to tune", file=sys.stderr)
        return 2
    known = {(row["case"], json.dumps(row["config"])) for row in read_rows(options.rows)}
    with open(options.rows, "a", buffering=1) as out, dispatch.force("kernels"):
        for case in cases(options.ops, options.only):
            op, key, rule = asked(case)
            candidates = [rule] + [rule | c for c in CANDIDATES[op] if rule | c != rule]
            for config in candidates:
                if (case.name, json.dumps(config)) in known:
                    continue
                row = {"device": dev.kind, "jax": jax.__version__, "op": op, "key": key, "case": case.name}
                row |= {"config": config, "rule": config == rule}
                out.write(json.dumps(row) + "\n")
                signal.alarm(options.limit)
                try:
                    found = (measure or bench.measure)(configured(case, config), 1.0)
                    row |= {"us": found["us"]} if found["ok"] else {"failed": f"wrong, row error {found['error']:.1e}"}
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
                signal.alarm(0)
                out.write(json.dumps(row) + "\n")
                options_text = " ".join(f"{name} {value}" for name, value in config.items())
                result = row.get("failed") or f"{row['us']:9.2f} us" + ("  (rule)" if row["rule"] else "")
                print(f"{case.name:40s} {options_text:40s} {result}", flush=True)
    return 0


def read_rows(path) -> list[dict]:
    """One row of each candidate, the last line about it. A candidate without a result has neither "us" nor "failed"."""
    if not os.path.exists(path):
        return []
    rows = {}
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        rows[row["case"], json.dumps(row["config"])] = row
    return list(rows.values())


def in_children(options, command: list[str] | None = None) -> list[dict]:
    """All rows, from as many child processes as it takes."""
    command = command or [sys.executable, "-m", "pallas_kernels.tune"]
    command = [*command, "--ops", options.ops, "--only", options.only, "--limit", str(options.limit)]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.jsonl")
        while True:
            before = len(read_rows(path))
            done = subprocess.run([*command, "--rows", path], check=False)
            rows = read_rows(path)
            if done.returncode in (0, 2):
                return rows
            if len(rows) == before:
                raise SystemExit(f"the measuring process ended with {done.returncode} before it measured anything")
            if "us" in rows[-1] or "failed" in rows[-1]:
                continue  # it died between two candidates
            died = f"no result: the process ended with {done.returncode} (limit {options.limit} s)"
            print(f"{rows[-1]['case']} {rows[-1]['config']}: {died}", flush=True)
            with open(path, "a") as out:
                out.write(json.dumps(rows[-1] | {"failed": died}) + "\n")


def choose(rows: list[dict], date: str) -> dict[str, dict[str, dict]]:
    """{op: {key: entry}} of the fastest configurations; the rule's own where no other is clearly faster."""
    times: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    rules: dict[tuple[str, str], str] = {}
    for row in rows:
        place, config = (row["op"], row["key"]), json.dumps(row["config"])
        if row["rule"]:
            rules[place] = config
        if "us" in row:
            times.setdefault(place, {}).setdefault(config, {})[row["case"]] = round(row["us"], 2)
    table: dict[str, dict[str, dict]] = {}
    for place, rule in rules.items():
        base = times.get(place, {}).get(rule)
        if base is None:
            continue  # without the rule's time there is nothing to compare with
        scores = {
            config: statistics.mean(us[case] / base[case] for case in base)
            for config, us in times[place].items()
            if us.keys() >= base.keys()
        }
        best = min(scores, key=lambda config: (scores[config], config))
        if scores[best] > 1 - MARGIN:
            best = rule
        entry = {"config": json.loads(best), "us": times[place][best]}
        entry |= {} if best == rule else {"rule": json.loads(rule), "rule_us": base}
        entry |= {"jax": rows[0]["jax"], "date": date}
        table.setdefault(place[0], {})[place[1]] = entry
    return table


def dump(kind: str, ops: dict[str, dict[str, dict]]) -> str:
    """The file's text: sorted, an entry a line."""
    blocks = []
    for op in sorted(ops):
        lines = [f"      {json.dumps(key)}: {json.dumps(ops[op][key])}" for key in sorted(ops[op])]
        blocks.append(f"    {json.dumps(op)}: {{\n" + ",\n".join(lines) + "\n    }")
    return f'{{\n  "device": {json.dumps(kind)},\n  "ops": {{\n' + ",\n".join(blocks) + "\n  }\n}\n"


def write(path: Path, kind: str, fresh: dict[str, dict[str, dict]]) -> None:
    """Put fresh entries into the file, which appears whole or not at all."""
    ops = json.loads(path.read_text())["ops"] if path.exists() else {}
    merged = {op: ops.get(op, {}) | fresh.get(op, {}) for op in ops.keys() | fresh.keys()}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(dump(kind, merged))
    part.replace(path)


def main(argv: list[str] | None = None, run: Callable[..., list[dict]] = in_children) -> int:
    """Tune the kernels for the GPU at hand. 1: nothing was measured."""
    from pallas_kernels import tuned

    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__.split("\n\n")[0])
    parser.add_argument("--ops", default="", help="comma-separated, of nvfp4_gemv, sink_attention; both when left out")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--limit", type=int, default=60, help="seconds for one candidate (default 60)")
    parser.add_argument("--out", default="", help="file to write; the package's own for this device when left out")
    parser.add_argument("--rows", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.rows:
        return child(options)
    rows = run(options)
    table = choose(rows, datetime.date.today().isoformat())
    if not table:
        return 1
    kind = rows[0]["device"]
    path = Path(options.out) if options.out else tuned.path_of(kind)
    write(path, kind, table)
    print(f"{sum(map(len, table.values()))} entries -> {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
