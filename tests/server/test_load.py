"""``python -m flint_jax bench serve`` against our server, and the checker against streams that are wrong."""

import asyncio
import json
import os
import re

import pytest

from flint_jax.__main__ import main
from flint_jax.load_test import run
from flint_jax.load_test.conformance import Checker
from flint_jax.load_test.http import Connection, Failed
from tests import soak
from tests.server.fake_engine import Script
from tests.server.harness import running, tokenizer


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_our_streams_have_no_warnings(server, capsys, endpoint):
    tokens = tokenizer().encode("some words and " * 10)
    server.engine.script = lambda prompt, params: Script(tokens[: params.max_tokens], token_s=0.001)
    size = "--concurrency 1,6 --requests 8 --input-tokens 40 --output-tokens 9"
    assert main(["bench", "serve", "--url", f"{server.url}/v1", "--endpoint", endpoint, *size.split()]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(printed.splitlines()[-1])["rows"]
    assert [r["concurrency"] for r in rows] == [1, 6]
    for row in rows:
        assert (row["requests"], row["failed"], row["warnings"], row["tokens"]) == (8, {}, {}, 72)
        assert 0 < row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"]
        assert row["itl_ms"]["max"] > 0
        assert 8 * 30 < row["prompt_tokens"] < 8 * 70
    assert re.search(r"^\| 6 \| 8 \| \d", printed, re.MULTILINE)


def test_failures_are_told_and_fail_the_run(capsys):
    with running(api_keys=("k",)) as server:
        argv = ["--url", server.url, "--requests", "2", "--concurrency", "1"]
        with pytest.raises(SystemExit) as left:
            run.main(argv)
        assert left.value.code == 2
        assert "401" in capsys.readouterr().err
        server.says("abc", fail_after=2, token_s=0.05)
        assert run.main([*argv, "--api-key", "k"]) == 1
        assert "an error event" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        run.main(argv)
    assert left.value.code == 2


def test_a_connection_survives_an_answer_that_is_no_stream(server):
    async def use():
        connection = Connection(server.url)
        with pytest.raises(Failed, match=r"HTTP 400: .*messages"):
            async for _ in connection.events("/v1/chat/completions", {}):
                pass
        models = await connection.get("/v1/models")
        await connection.close()
        return models

    assert asyncio.run(use())["data"][0]["id"] == "flint-test"


# -- the checker -------------------------------------------------------------------------------------------------------

HEAD = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def delta(finish=None, **fields):
    return HEAD | {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def stream(**changes):
    """A stream without fault, with some of its parts replaced; None leaves one out."""
    parts = {
        "first": delta(role="assistant", content=""),
        "text": delta(content="a"),
        "more": delta(content="b"),
        "end": delta("length"),
        "usage": HEAD | {"choices": [], "usage": USAGE},
        "done": "[DONE]",
    } | changes
    return [p if isinstance(p, str) else json.dumps(p) for p in parts.values() if p is not None]


def warnings(blocks):
    checker = Checker("chat", wanted=2, exact=True)
    for block in blocks:
        checker.block(block if block.startswith((":", "raw ")) else f"data: {block}")
    return checker.end()


def test_a_good_stream_passes():
    assert warnings(stream()) == []
    assert warnings([": keep-alive", *stream()]) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"first": None}, "the first delta has no role"),
        ({"text": delta(role="assistant", content="a")}, "a later delta has a role"),
        ({"text": delta(content="a") | {"id": "y"}}, "changes"),
        ({"text": delta(content="a") | {"usage": USAGE}}, "usage on a chunk with choices"),
        ({"text": delta(content="a", tool_calls=None)}, "tool_calls is null"),
        ({"text": "{"}, "not JSON"),
        ({"text": "raw text"}, "not one data line"),
        ({"text": {"error": {"message": "no"}}}, "an error event"),
        ({"text": HEAD | {"choices": [{"index": 1, "delta": {}, "finish_reason": None}]}}, "choice index 1"),
        ({"text": HEAD | {"choices": []}}, "neither choices nor usage"),
        ({"end": None}, "has no finish_reason"),
        ({"end": delta("done")}, "finish_reason 'done'"),
        ({"end": delta("stop")}, "need length"),
        ({"more": delta("length")}, "goes on after its finish_reason"),
        ({"usage": None}, "usage was asked for"),
        ({"usage": HEAD | {"choices": [], "usage": USAGE | {"total_tokens": 9}}}, "total_tokens 9"),
        (
            {"usage": HEAD | {"choices": [], "usage": USAGE | {"completion_tokens": 1, "total_tokens": 4}}},
            "1 completion_",
        ),
        (
            {"usage": HEAD | {"choices": [], "usage": USAGE | {"completion_tokens": 3, "total_tokens": 6}}},
            "2 asked for",
        ),
        (
            {"usage": HEAD | {"choices": [], "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 4}}}},
            "4 cached",
        ),
        ({"done": None}, "no [DONE]"),
        ({"late": delta(content="c")}, "after [DONE]"),
    ],
)
def test_what_is_wrong_is_named(changes, words):
    found = warnings(stream(**changes))
    assert any(words in text for text in found), found


# -- the judge of tests/soak.py ----------------------------------------------------------------------------------------


def test_the_soak_sees_cross_talk(server):
    """Replies that depend on how many requests there are."""
    server.engine.script = lambda prompt, params: Script(
        tokenizer().encode("together" if server.engine.stats()["running"] > 1 else "alone"), token_s=0.01
    )
    bodies = soak.prompts(4, 10)
    report = asyncio.run(soak.soak(server.url, os.getpid(), bodies, streams=4, seconds=0.4, aborts=3))
    assert report.different
    assert "tog" in report.different[0]
    assert report.aborts == 3


def test_the_soak_sees_what_is_left_over():
    before, facts = {"free_slots": 4, "free_pages": 9}, {"threads": 5, "files": 7, "bytes": 0}
    report = soak.Report(memory=[100 << 20] * 5)
    soak.compare(report, before, before, facts, facts)
    assert not report.problems
    soak.compare(report, before, before | {"free_slots": 3}, facts, facts)
    soak.compare(report, before, before, facts, facts | {"threads": 6})
    soak.compare(report, before, before, facts, facts | {"files": 8})
    report.memory[-1] = 120 << 20
    soak.compare(report, before, before, facts, facts)
    assert [p.partition(" ")[0] for p in report.problems] == ["free_slots:", "threads:", "files:", "memory"]
