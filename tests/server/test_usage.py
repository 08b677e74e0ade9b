"""Who gets token counts, where and how often."""

import json

import pytest

from tests.server.harness import running, sse_data

ROUTES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "hi"}),
]


def parts(server, path, body, **fields):
    *data, done = sse_data(server.post(path, body | {"stream": True} | fields).text)
    assert done == "[DONE]"
    return [json.loads(d) for d in data]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_usage_comes_once_and_only_when_asked(server, path, body):
    server.says("abcdef", token_s=0.002)
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        assert not [p for p in parts(server, path, body, **options) if "usage" in p]
    got = parts(server, path, body, stream_options={"include_usage": True})
    assert [p.get("usage") for p in got[:-1]] == [None] * (len(got) - 1)
    assert got[-1]["choices"] == []
    whole = server.post(path, body).json()["usage"]
    assert got[-1]["usage"] == whole
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_continuous_usage_grows(server, path, body):
    server.says("abcdef", token_s=0.002)
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = parts(server, path, body, stream_options=options)
    counts = [p["usage"]["completion_tokens"] for p in got]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    alone = parts(server, path, body, stream_options={"continuous_usage_stats": True})
    assert not [p for p in alone if "usage" in p]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_cached_tokens_are_told_once_per_prompt(server, path, body):
    server.engine.cached_tokens = 2
    usage = server.post(path, body | {"n": 3}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["prompt_tokens"] == len(server.engine.submitted[0].prompt)


def test_usage_can_be_forced():
    with running(force_usage=True) as server:
        for path, body in ROUTES:
            assert parts(server, path, body)[-1]["usage"]["completion_tokens"] == 3
            quiet = parts(server, path, body, stream_options={"include_usage": False})
            assert quiet[-1]["usage"]["completion_tokens"] == 3
