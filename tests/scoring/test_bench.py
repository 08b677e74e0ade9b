"""bench score says what it did; how fast is for the device to say."""

import json

import pytest

from flint_jax.__main__ import main as command
from flint_jax.bench import main


def test_bench_score(capsys):
    sizes = {"layers": 3, "length": 100, "texts": 3, "tokens": 128, "rounds": 1, "questions": 2}
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    assert main(["score", "--preset", "tiny", "--format", "bf16", "--profile", *flags]) == 0
    out = capsys.readouterr().out
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert row["same_bits"]
    assert row["sane"]
    assert row["context_tokens"] == 2 * 500
    assert row["of_prefill"] == row["tokens_per_s"] / row["prefill_tokens_per_s"] > 0
    assert row["share"] is None  # no peak is known for a CPU
    assert "of prefill" in out
    assert "/device:" in out  # the table of the profile


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("bench score --tokens 0", "--tokens: 0: need a multiple of 64 from 64"),
        ("bench score --texts 0", "--texts: 0: need a whole number from 1"),
        ("bench score --length 1", "--length: 1: need a whole number from 2"),
        ("bench score --rounds 0", "--rounds: 0"),
        ("bench score --layers 0", "--layers: 0"),
        ("bench decode --steps 0", "--steps: 0"),
        ("bench decode --context 1024,0", "--context: 0"),
        ("bench decode --batch x", "--batch: x: need a whole number from 1"),
        ("bench load nowhere --tokens -1", "--tokens: -1: need a whole number from 0"),
        ("synthetic nowhere/x.gguf --threads 0", "--threads: 0: need a whole number from 1"),
        ("synthetic nowhere/x.gguf --seed -1", "--seed: -1"),
    ],
)
def test_numbers_that_make_no_sense_end_before_the_work(line, text, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command(line.split()) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
