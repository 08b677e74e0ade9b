"""``python -m pallas_kernels.bench``: every op against its reference and against the memory's speed.

Each op runs in a child process under a time limit, so that one broken kernel loses one op. A call is timed inside a
captured loop over rotated weights that exceed the L2 cache twice; the ceiling is a copy measured first on the same
device. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time

OPS = ("add_rms_norm", "nvfp4_gemv", "moe_gemv", "moe_gemm", "sink_attention", "flash_attention", "sample")
HEADER = f"{'case':40s} {'us':>9s} {'TB/s':>6s} {'share':>6s} {'row error':>10s} {'compile s':>9s}"


def cases(ops: str = ""):
    """The cases of the named ops (comma-separated; all when empty)."""
    names = [name for name in ops.split(",") if name] or OPS
    unknown = set(names) - set(OPS)
    if unknown:
        raise SystemExit(f"unknown ops {sorted(unknown)}; there are {', '.join(OPS)}")
    return [case for name in names for case in importlib.import_module(f"pallas_kernels.{name}.cases").cases()]


def seconds(function, *args, repeats: int = 5, calls: int = 3) -> float:
    """Median wall time of a call, after two calls of warming up."""
    import jax

    for _ in range(2):
        jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            result = function(*args)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times)


def ceiling() -> float:
    """Bytes per second of a large copy, read and write counted."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((1 << 29,), jnp.float32)
    return 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x)


def chain(case, rounds: int):
    """``rounds`` passes over the case's layers, each call waiting for the one before: one captured loop."""
    import jax
    from jax import lax

    def one_pass(_, carry):
        args, outs = carry
        out, kept = outs[-1], []
        for layer in range(case.layers):
            # Every result leaves the loop through the barrier that orders the next call, so that none can be dropped,
            # hoisted or reordered, and no extra kernel is needed.
            first, out = lax.optimization_barrier((args[0], out))
            kept.append(out)
            out, args = case.step(layer, (first, *args[1:]))
        return args, (*kept[1:], out)

    def run(*args):
        start, args = case.step(0, args)
        args, outs = lax.fori_loop(0, rounds, one_pass, (args, (start,) * case.layers))
        return outs, [args[i] for i in case.in_place]

    return jax.jit(run, donate_argnums=case.in_place)


def timed_chain(case, rounds: int, args: tuple) -> float:
    """Seconds for a call of the chain. Consumes the arguments that the op writes in place."""
    state, function = list(args), chain(case, rounds)

    def call():
        outs, written = function(*state)
        for place, value in zip(case.in_place, written, strict=True):
            state[place] = value
        return outs

    return seconds(call)


def measure(case, copy_rate: float, check_only: bool = False) -> dict:
    """Check and time one case."""
    import jax

    from pallas_kernels.testing import row_error

    args = jax.block_until_ready(jax.jit(case.make)(jax.random.key(int(time.time()) % 2**31)))
    started = time.perf_counter()
    compiled = jax.jit(case.observe(case.run), static_argnums=0)
    errors = []
    for layer in (0, case.layers - 1):
        actual = jax.block_until_ready(compiled(layer, *args))
        if layer == 0:
            compile_s = time.perf_counter() - started
        expected = jax.jit(case.observe(case.reference), static_argnums=0)(layer, *args)
        errors += [row_error(a, e) for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)]
    again = compiled(case.layers - 1, *args)
    repeatable = all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(again), strict=True))
    row = {
        "case": case.name,
        "error": max(errors),
        "ok": max(errors) <= case.tolerance and repeatable,
        "repeatable": repeatable,
        "compile_s": round(compile_s, 2),
    }
    if not check_only:
        # Long enough (some 10 ms) that the loop's own start, about 60 us, does not count.
        rounds = max(2, round(10e-3 / ((case.nbytes / 3e12 + case.operations / 4e14 + 3e-6) * case.layers)))
        took = timed_chain(case, rounds, args) / (rounds * case.layers)
        row |= {"us": took * 1e6, "tb_s": case.nbytes / took / 1e12, "share": case.nbytes / took / copy_rate}
        if case.operations:
            row["tflop_s"] = case.operations / took / 1e12
    return row


def show(row: dict) -> None:
    """One line of the table."""
    if "failed" in row:
        print(f"{row['case']:40s} FAILED {row['failed']}", flush=True)
        return
    timing = (
        f"{row['us']:9.2f} {row['tb_s']:6.2f} {row['share']:6.0%}" if "us" in row else f"{'-':>9s} {'-':>6s} {'-':>6s}"
    )
    note = "" if row["ok"] else "  WRONG" if row["repeatable"] else "  NOT REPEATABLE"
    if "tflop_s" in row:
        note = f"  {row['tflop_s']:.0f} TFLOP/s{note}"
    print(f"{row['case']:40s} {timing} {row['error']:10.2e} {row['compile_s']:9.2f}{note}", flush=True)


def child(options) -> int:
    """Measure the chosen cases in this process; rows go to a file as JSON lines."""
    from pallas_kernels import dispatch

    with open(options.rows, "a", buffering=1) as rows:
        for case in cases(options.ops):
            if options.only not in case.name:
                continue
            try:
                with dispatch.force("kernels"):
                    row = measure(case, options.ceiling, options.check)
            except Exception as error:
                row = {"case": case.name, "ok": False, "failed": f"{type(error).__name__}: {str(error)[:400]}"}
            show(row)
            rows.write(json.dumps(row) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Bench the kernels on the GPU at hand."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("--ops", default="", help=f"comma-separated, of {', '.join(OPS)}; all when left out")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--check", action="store_true", help="compare with the references, time nothing")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one op (default 240)")
    parser.add_argument("--rows", default="", help=argparse.SUPPRESS)
    parser.add_argument("--ceiling", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.rows:
        return child(options)

    rows_path = os.path.join(os.environ.get("OUT", "/tmp"), f"bench-{os.getpid()}.jsonl")
    probe = (
        "import json, jax; from pallas_kernels import bench; d = jax.devices()[0]; "
        "print(json.dumps([d.device_kind, jax.__version__, bench.ceiling()]))"
    )
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    if found.returncode:
        print(found.stderr[-2000:], file=sys.stderr)
        return 1
    kind, version, rate = json.loads(found.stdout.strip().splitlines()[-1])
    print(f"{kind}, jax {version}, copy {rate / 1e12:.2f} TB/s\n{HEADER}", flush=True)
    for op in [name for name in options.ops.split(",") if name] or OPS:
        command = [sys.executable, "-m", "pallas_kernels.bench", "--ops", op, "--only", options.only]
        command += ["--rows", rows_path, "--ceiling", str(rate)] + (["--check"] if options.check else [])
        try:
            subprocess.run(command, timeout=options.limit, check=False)
        except subprocess.TimeoutExpired:
            print(f"{op}: stopped after {options.limit:.0f} s", flush=True)
    rows = []
    if os.path.exists(rows_path):
        with open(rows_path) as lines:
            rows = [json.loads(line) for line in lines]
    print(json.dumps({"device": kind, "jax": version, "copy_tb_s": rate / 1e12, "rows": rows}), flush=True)
    return int(not rows or not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
