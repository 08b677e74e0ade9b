"""How far a prompt is, as clients that ask and /health hear it."""

import threading

import pytest

from tests.server.harness import wait_until
from tests.server.test_chat import HELLO, chunks


def test_a_stream_tells_how_far_the_prompt_is(server):
    """In llama.cpp's shape, after the role and before the first text."""
    server.says("abc", token_s=0.002)
    parts = chunks(server, messages=HELLO, return_progress=True)
    told = [i for i, p in enumerate(parts) if "prompt_progress" in p]
    assert told
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    texts = [i for i, p in enumerate(parts) if p["choices"][0]["delta"].get("content")]
    assert max(told) < min(texts)
    last = parts[told[-1]]
    total = len(server.engine.submitted[-1].prompt)
    assert last["prompt_progress"] == {"total": total, "cache": 1, "processed": total, "time_ms": 12}
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
    assert last["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("fields", [{}, {"return_progress": False}, {"return_progress": None}])
def test_who_does_not_ask_is_not_told(server, fields):
    server.says("abc")
    assert not [p for p in chunks(server, messages=HELLO, **fields) if "prompt_progress" in p]


def test_several_choices_share_one_prompt(server):
    server.says("abc", token_s=0.002)
    parts = chunks(server, messages=HELLO, n=3, return_progress=True)
    assert {p["choices"][0]["index"] for p in parts if "prompt_progress" in p} == {0}
    assert {p["choices"][0]["index"] for p in parts} == {0, 1, 2}


def test_a_whole_reply_has_no_place_for_it(server):
    server.says("abc")
    reply = server.chat(return_progress=True)
    assert reply.json()["choices"][0]["message"]["content"] == "abc"
    assert "prompt_progress" not in reply.json()


def test_anything_but_a_boolean_is_refused(server):
    error = server.chat(stream=True, return_progress="often").json()["error"]
    assert error["param"] == "return_progress"


def test_the_official_client_reads_such_a_stream(server):
    server.says("Hello", token_s=0.002)
    stream = server.client().chat.completions.create(
        model="x", messages=HELLO, stream=True, extra_body={"return_progress": True}
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "Hello"


def test_health_tells_how_far_prompts_are(server):
    gate = threading.Event()
    server.says("abc", gate=gate)
    thread = threading.Thread(target=lambda: server.chat(messages=HELLO))
    thread.start()
    wait_until(lambda: server.http.get("/health").json()["prompts"])
    total = len(server.engine.submitted[-1].prompt)
    health = server.http.get("/health").json()
    assert health["prompts"] == [{"total": total, "cache": 0, "processed": total // 2, "time_ms": 1500}]
    assert health["engine"]["running"] == 1
    gate.set()
    thread.join()
    assert server.http.get("/health").json()["prompts"] == []
