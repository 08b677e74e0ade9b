"""Compare every op with its reference on a kind of device that no kernel was measured on, before it is relied on.

A few cases an op, tens of seconds in all, most of them compiling. What is wrong, does not repeat its bits or does not
run is switched off for this process: ``dispatch`` then takes the next implementation.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from pallas_kernels import bench, device, dispatch, emit, tuned

log = logging.getLogger(__name__)

# Per op: the names that its kernels begin with, and the cases to try.
OPS = {
    "add_rms_norm": (("add_rms_norm",), ("m8",)),
    "nvfp4_gemv": (
        ("gemv_",),
        ("qkv m1 nvfp4", "o m8 nvfp4", "dense_gate_up m8 nvfp4", "head m1 nvfp4", "qkv m8 bf16", "head m8 bf16"),
    ),
    "moe_gemv": (
        ("moe_router", "moe_gate_up", "moe_down", "moe_block"),
        ("router m8", "experts m8 nvfp4", "block m1 nvfp4", "experts m1 bf16"),
    ),
    "moe_gemm": (("moe_gemm_",), ("experts m512 nvfp4", "experts m512 bf16")),
    "sink_attention": (("attend_", "write_tokens"), ("window b2", "full b1 8K", "full b8 8K")),
    "flash_attention": (("flash_attention_", "write_cache"), ("pages several", "ring several")),
    "sample": (("sample",), ()),  # all of them
}


def needed() -> bool:
    """Whether the device at hand runs the kernels and is of a kind without measured settings."""
    here = device.current()
    return here.kernels and not tuned.path_of(here.kind).exists()


def run(record: Path | None = None) -> dict[str, str]:
    """Check all ops; why each that failed is switched off. record: a file that keeps the outcome for other processes
    (the caller names it after all that it depends on)."""
    failed = _read(record)
    if failed is None:
        failed = {op: reason for op in OPS if (reason := _check(op)) is not None}
        _write(record, failed)
    for op, reason in failed.items():
        emit.OFF.update(OPS[op][0])
        log.warning("%s: the kernels are wrong on this %s and stay off: %s", op, device.current().kind, reason)
    return failed


def _check(op: str) -> str | None:
    wanted = OPS[op][1]
    for case in bench.cases(op):
        if wanted and case.name.partition("/")[2] not in wanted:
            continue
        try:
            with dispatch.force("kernels"):
                row = bench.measure(case, 0.0, check_only=True)
        except Exception as error:
            return f"{case.name}: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        if not row["ok"]:
            what = f"row error {row['error']:.1e}, allowed {case.tolerance:.1e}" if row["repeatable"] else "other bits"
            return f"{case.name}: {what}"
    return None


def _read(record: Path | None) -> dict[str, str] | None:
    try:
        return None if record is None else {op: why for op, why in json.loads(record.read_text()).items() if op in OPS}
    except (OSError, ValueError, AttributeError):
        return None


def _write(record: Path | None, failed: dict[str, str]) -> None:
    if record is not None:
        try:
            record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            record.write_text(json.dumps(failed))
        except OSError as error:
            log.info("the check of the kernels is not kept: %s", error)
