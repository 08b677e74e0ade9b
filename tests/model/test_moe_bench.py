"""bench experts checks every way of cutting the experts' work; how fast each is, is for the device to say."""

import json
from types import SimpleNamespace

import pytest

from flint_jax import moe_bench
from flint_jax.__main__ import main as command
from flint_jax.bench import main


def bench(capsys, *more):
    flags = ["--size=small", "--tokens=24", "--layers=1", "--repeats=1", *more]
    assert main(["experts", *flags]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])["rows"]


def test_every_cut_is_checked_and_timed(capsys):
    out, rows = bench(capsys, "--cuts=auto,8x1+all", "--format=nvfp4,bf16", "--uneven")
    assert [(row["format"], row["cut"]) for row in rows] == [
        (form, cut) for form in ("nvfp4", "bf16") for cut in ("auto", "8x1+all")
    ]
    assert [(row["rows"], row["skip"]) for row in rows] == 2 * [(12, True), (8, False)]
    assert all(row["ok"] and row["ms"] > 0 and row["share"] > 0 for row in rows)
    assert "WRONG" not in out


def test_a_wrong_result_is_said(capsys, monkeypatch):
    monkeypatch.setattr(moe_bench, "reference", lambda *args: -moe_bench.chain(*args, 1, None))
    out, (row,) = bench(capsys, "--cuts=8x1")
    assert not row["ok"]
    assert "WRONG" in out


def test_time_that_is_over_ends_it(capsys, monkeypatch):
    monkeypatch.setattr(moe_bench, "measure", lambda *_: pytest.fail("began with a cut"))
    clock = iter(range(0, 100_000, 100))
    monkeypatch.setattr(moe_bench, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    out, rows = bench(capsys, "--cuts=8x1", "--seconds=50")
    assert rows == []
    assert "stopped before nvfp4 24 8x1" in out


@pytest.mark.parametrize("cut", ["", "x", "0x1", "8", "8x", "8x1+some", "auto,8x-1"])
def test_cuts_that_make_no_sense_end_before_the_work(cut, capsys):
    assert command(["bench", "experts", f"--cuts={cut}"]) == 2
    assert "need ROWSxMIB" in capsys.readouterr().err
