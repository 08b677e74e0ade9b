"""bench score says what it did; how fast is for the device to say."""

import json

from flint_jax.bench import main


def test_bench_score(capsys):
    sizes = {"layers": 3, "length": 100, "texts": 3, "tokens": 128, "rounds": 1, "questions": 2}
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    assert main(["score", "--preset", "tiny", "--format", "bf16", *flags]) == 0
    out = capsys.readouterr().out
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert row["same_bits"]
    assert row["sane"]
    assert row["context_tokens"] == 2 * 500
    assert row["of_prefill"] == row["tokens_per_s"] / row["prefill_tokens_per_s"] > 0
    assert row["share"] is None  # no peak is known for a CPU
    assert "of prefill" in out
