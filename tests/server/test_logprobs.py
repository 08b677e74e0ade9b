"""Log-probabilities in both formats, with true bytes and finite numbers."""

import json

import pytest

from flint_jax.server.choices import Token
from flint_jax.server.logprobs import completion_logprobs, token_text
from tests.server.harness import sse_data, tokenizer

HELLO = [{"role": "user", "content": "hi"}]


def test_chat_format_through_the_official_client(server):
    server.says("a🦜")
    reply = server.client().chat.completions.create(model="x", messages=HELLO, logprobs=True, top_logprobs=3)
    entries = reply.choices[0].logprobs.content
    assert bytes(b for e in entries for b in e.bytes).decode() == "a🦜"
    assert [len(e.top_logprobs) for e in entries] == [3] * 5
    assert {e.logprob for e in entries} == {-0.25}
    assert entries[0].token == "a"
    assert entries[1].token == "bytes:\\xf0"
    assert entries[0].top_logprobs[0].token == "a"
    assert entries[0].top_logprobs[1].logprob == -9999.0


def test_chat_format_without_alternatives(server):
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        entries = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
        assert entries[0]["top_logprobs"] == []
    assert server.chat(top_logprobs=0).json()["choices"][0]["logprobs"] is None


def test_chat_stream_carries_the_same_entries(server):
    server.says("a🦜b", token_s=0.001)
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    streamed = []
    for data in sse_data(server.chat(stream=True, **fields).text):
        if data != "[DONE]":
            streamed += (json.loads(data)["choices"][0].get("logprobs") or {"content": []})["content"]
    assert streamed == whole


def test_completion_format_through_the_official_client(server):
    server.says("ab🦜c")
    reply = server.client().completions.create(model="x", prompt="p", logprobs=2)
    lp = reply.choices[0].logprobs
    ids = tokenizer().encode("ab🦜c")
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset) == len(ids)
    assert lp.token_logprobs == [-0.25] * len(ids)
    assert all(top[token] == -0.25 for token, top in zip(lp.tokens, lp.top_logprobs, strict=True))
    assert {v for top in lp.top_logprobs for v in top.values()} == {-0.25, -9999.0}
    text = reply.choices[0].text
    assert text == "ab🦜c"
    for token, offset in zip(lp.tokens, lp.text_offset, strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    assert lp.text_offset[-1] == 3


@pytest.mark.parametrize("own", [-3.0, -0.5])
def test_of_two_tokens_with_the_same_text_the_sampled_one_counts(own):
    """Padding rows, for instance, all have the empty text."""
    spare = [i for i in range(2000) if tokenizer().token_bytes(i) == b""][:3]
    token = Token(spare[0], own, ((spare[1], -1.0), (5, -2.0), (spare[2], -4.0)), 0)
    lists = completion_logprobs(tokenizer(), [token], top=True, shift=0)
    assert lists["token_logprobs"] == [own]
    assert lists["top_logprobs"] == [{"": own, token_text(tokenizer(), 5): -2.0}]


def test_completion_format_with_no_alternatives(server):
    lp = server.post("/v1/completions", {"prompt": "p", "logprobs": 0}).json()["choices"][0]["logprobs"]
    assert lp["top_logprobs"] is None
    assert lp["token_logprobs"] == [-0.25] * len(lp["tokens"])


def test_completion_stream_carries_the_same_lists(server):
    server.says("ab🦜c", token_s=0.001)
    body = {"prompt": "p", "logprobs": 1}
    whole = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    joined = {name: [] for name in whole}
    for data in sse_data(server.post("/v1/completions", body | {"stream": True}).text):
        if data != "[DONE]":
            for name, values in json.loads(data)["choices"][0]["logprobs"].items():
                joined[name] += values
    assert joined == whole


def test_nothing_on_the_wire_that_json_does_not_have(server):
    text = server.chat(logprobs=True, top_logprobs=20).text
    json.loads(text, parse_constant=lambda name: (_ for _ in ()).throw(AssertionError(name)))
    assert "Infinity" not in text
