"""``bench full`` on the tiny preset: a server of its own, every level, and what it says when things go wrong."""

import asyncio
import dataclasses
import json
import time

import pytest

from flint_jax.__main__ import main
from flint_jax.config import FULL as FULL_LAYER
from flint_jax.full_bench import floors, levels, run
from flint_jax.full_bench.process import ServerError, ServerProcess
from flint_jax.roofline import DEVICES
from loaders.synthetic import preset
from tests.server.fake_engine import Script
from tests.server.harness import running, tokenizer

SMALL = levels.Lengths(((16, 4), (64, 8)), (100, 4), (600, 4), 20, (2, 20, 4), 80, (5, 9, 4), 3, 800)
FLAGS = "--max-num-seqs 2 --max-num-batched-tokens 64 --max-model-len 1024"


def last_json(printed):
    return json.loads(printed.splitlines()[-1])


@pytest.mark.slow
def test_every_level_of_a_server_with_dummy_weights(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "TINY", SMALL)
    argv = ["--preset", "tiny", "--format", "nvfp4", "--limit", "300", "--keep", str(tmp_path), "--", *FLAGS.split()]
    assert main(["bench", "full", *argv]) == 0
    printed = capsys.readouterr().out
    found = last_json(printed)
    assert found["failures"] == []
    assert [(s["start"], s["exit_code"]) for s in found["starts"]] == [("cold", 0), ("warm", 0)]
    for start in found["starts"]:
        assert 0 < start["ready_s"] < 300
        assert start["phases"].startswith("ready after ")
        assert "weights" in start["phases"]
    rows = {row["level"]: row for row in found["rows"]}
    assert list(rows) == [
        "16/4", "64/8", "100/4", "600/4", "the same 600 again", "20 new behind 600", "20/4, 2 at a time",
        "agent, 3 turns", "600 beside a stream",
    ]  # fmt: skip
    assert all(row["ttft_ms"] > row["ttft_floor_ms"] > 0 for row in found["rows"])
    assert len(rows["16/4"]["ttft_ms_each"]) == 3
    assert rows["600/4"]["cached_tokens"] == 0
    assert rows["the same 600 again"]["cached_tokens"] > 300
    assert 300 < rows["20 new behind 600"]["cached_tokens"] <= rows["20 new behind 600"]["prompt_tokens"] - 20
    assert rows["agent, 3 turns"]["cached_share"] > 0.3
    assert rows["600 beside a stream"]["pieces"] > 0
    assert printed.count("| nvfp4 | agent, 3 turns |") == 2  # when it was measured, and in the table


def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(capsys):
    assert main(["bench", "full", "--preset", "tiny", "--format", "bf16", "--", "--frobnicate"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED bf16: the server ended with exit code 2; the end of its log:" in printed
    assert "unknown flag --frobnicate" in printed
    assert last_json(printed)["rows"] == []


def test_a_server_that_takes_too_long(tmp_path):
    server = ServerProcess(["--kernels", "xla"], tmp_path / "log", tmp_path / "cache")
    try:
        with pytest.raises(ServerError, match="not ready after 0 s; the end of its log"):
            server.wait_ready(0)
    finally:
        seconds, _ = server.stop()
    assert seconds < 30


def test_the_levels_on_a_server_that_fails_midway():
    with running() as server:
        server.says("a b " * 40, token_s=0.0)
        client = levels.Client(server.url, "", 300, time.monotonic() + 60)
        found = dict(levels.levels(client, SMALL, 1))
        with pytest.raises(levels.LevelError, match="the long prompt before it failed"):
            asyncio.run(found["the same 600 again"]())
        late = levels.Client(server.url, "", 300, time.monotonic() - 1)
        with pytest.raises(levels.LevelError, match="--limit"):
            asyncio.run(late.ask([1, 2], 4))
        with pytest.raises(levels.LevelError, match="HTTP 4"):  # an id beyond the vocabulary
            asyncio.run(client.ask([1 << 30], 4))


def test_gaps_of_a_stream_are_those_while_the_prompt_was_read():
    with running() as server:
        tokens = tokenizer().encode("some words and " * 400)
        server.engine.script = lambda prompt, params: Script(
            tokens[: params.max_tokens], token_s=0.005, prefill_s=0.1 if params.max_tokens == 1 else 0.0
        )
        client = levels.Client(server.url, "", 300, time.monotonic() + 60)
        sizes = dataclasses.replace(SMALL, long=(150, 4), stream=180)  # the context is 256
        row = asyncio.run(dict(levels.levels(client, sizes, 1))["150 beside a stream"]())
    assert row["pieces"] > 3
    assert row["itl_ms"]["max"] >= row["itl_ms"]["p50"] > 0
    assert row["itl_ms_before"]


def test_floors():
    config, device = preset("full"), DEVICES["h200"]
    # 100,000 tokens: products, and 14 full layers that see half of them on average
    full = config.layer_types.count(FULL_LAYER)
    attention = full * 4 * config.q_size * 100_000**2 / 2 / device.flops
    first = floors.first_ms(config, device, "nvfp4", 100_000) / 1e3
    assert attention < first < 2.5 * attention
    # one token behind nothing is a decode step
    assert floors.first_ms(config, device, "nvfp4", 1) == pytest.approx(
        floors.token_ms(config, device, "nvfp4", 1), rel=0.02
    )
    assert floors.token_ms(config, device, "bf16", 1000) > 3 * floors.token_ms(config, device, "nvfp4", 1000)
    assert floors.first_ms(config, device, "nvfp4", 2000, 100_000) > floors.first_ms(config, device, "nvfp4", 2000)


@pytest.mark.parametrize(
    ("line", "match"),
    [("--format fp8", "need nvfp4 or bf16"), ("--limit 3", "30"), ("--levles all", "did you mean --levels?")],
)
def test_flags(line, match, capsys):
    assert main(["bench", "full", *line.split()]) == 2
    assert match in capsys.readouterr().err
