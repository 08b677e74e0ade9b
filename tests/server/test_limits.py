"""Limits before work: what cannot fit is refused before it is encoded, and what nobody waits for is not done."""

import json
import socket
import threading
import time

import httpx
import pytest

from flint_jax.server import lengths
from flint_jax.server import running as server_running
from tests.server.fake_engine import FakeEngine, Script
from tests.server.harness import running, tokenizer, wait_until
from tests.server.test_disconnect import Caller

BIG = "The harbour was quiet. " * (1 << 18)  # 6 MB
ROUTES = [
    ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    ("/v1/completions", lambda text: {"prompt": text}),
    ("/v1/messages", lambda text: {"max_tokens": 5, "messages": [{"role": "user", "content": text}]}),
    ("/v1/responses", lambda text: {"input": text}),
]


class Counting:
    """The tokenizer, counting the characters it encodes; it waits for ``gate`` before long texts."""

    def __init__(self, served):
        self._inner, self.seen, self.gate = served.tokenizer, 0, threading.Event()
        self.gate.set()
        self.longest = 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def encode(self, text, **options):
        self.seen += len(text)
        self.longest = max(self.longest, len(text))
        if len(text) > 5000:
            assert self.gate.wait(30)
        return self._inner.encode(text, **options)


@pytest.fixture
def counted(server, monkeypatch):
    served = server.state.served
    counting = Counting(served)
    object.__setattr__(served, "tokenizer", counting)
    yield counting
    counting.gate.set()
    wait_until(lambda: not server_running.threads_busy())
    object.__setattr__(served, "tokenizer", counting._inner)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_text_that_cannot_fit_is_never_encoded(server, counted, path, body):
    started = time.monotonic()
    response = server.post(path, body(BIG))
    assert response.status_code == 400
    words = "prompt is too long: " if "messages" in path else "maximum context length is 256 tokens"
    assert words in response.json()["error"]["message"]
    assert counted.seen < 100
    assert time.monotonic() - started < 5
    assert not server.engine.submitted


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_long_text_of_control_tokens_is_refused_as_fast(server, counted, role):
    text = "<|user|></think>" * 1_250_000
    started = time.monotonic()
    messages = [{"role": role, "content": text}, {"role": "user", "content": "x"}]
    assert server.chat(messages=messages).json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - started < 4
    assert counted.seen < 100


def test_the_longest_token_bounds_the_tokens_of_any_text():
    longest = lengths.longest_token(tokenizer())
    for text in ("a", "The harbour was quiet.", "äöü" * 50, " " * 999, "<|user|>" * 9, "\n\t" * 33):
        assert len(tokenizer().encode(text)) >= len(text.encode()) / longest


def test_a_text_of_long_tokens_is_encoded_no_further_than_it_fits(monkeypatch):
    """Where bytes prove nothing, as with a vocabulary that has a token of very many spaces."""
    monkeypatch.setattr(lengths, "longest_token", lambda tokenizer: 1 << 20)
    with running(engine=FakeEngine(max_model_len=1000)) as server:
        counting = Counting(server.state.served)
        object.__setattr__(server.state.served, "tokenizer", counting)
        for path, body in ROUTES:
            counting.seen = 0
            response = server.post(path, body(BIG))
            assert response.status_code == 400
            assert "too long" in response.text or "maximum context length" in response.text
            assert lengths._SLICE <= counting.seen < 2 * lengths._SLICE


@pytest.mark.parametrize("text", ["x " * 130, "x " * 118, "xyz " * 62, "quiet " * 40])
def test_what_nearly_fits_is_judged_by_its_tokens(server, text):
    count = len(tokenizer().encode(text))
    response = server.post("/v1/completions", {"prompt": text, "max_tokens": 1})
    assert response.status_code == (200 if count + 1 <= 256 else 400)
    if count + 1 > 256:
        assert f"you requested {count} tokens" in response.json()["error"]["message"]


def test_counting_has_no_limit(server):
    text = "x " * 20000
    body = {"messages": [{"role": "user", "content": text}]}
    assert server.post("/v1/messages/count_tokens", body).json()["input_tokens"] > 20000
    assert server.post("/tokenize", {"prompt": text}).json()["count"] >= 20000


def test_a_short_text_does_not_wait_for_long_ones(server, counted):
    counted.gate.clear()
    long = {"prompt": "x " * 100_000}
    callers = [Caller(server, "/tokenize", long) for _ in range(5)]
    wait_until(lambda: counted.seen >= 400_000)  # two at a time
    assert server.chat(messages=[{"role": "user", "content": "x" * 100}]).is_success
    assert server.post("/tokenize", {"prompt": "x" * 4999}).is_success  # off the loop as well
    for caller in callers:
        caller.hang_up()


def test_texts_whose_sender_left_are_not_encoded(server, counted):
    counted.gate.clear()
    callers = [Caller(server, "/tokenize", {"prompt": "x " * 100_000}) for _ in range(6)]
    wait_until(lambda: counted.seen >= 400_000)
    wait_until(lambda: len(server.state.preparing) == 6)
    for caller in callers:
        caller.hang_up()
    wait_until(lambda: len(server.state.preparing) == 0)
    counted.gate.set()
    wait_until(lambda: not server_running.threads_busy())
    assert counted.seen == 400_000  # the two that had begun


def test_a_full_queue_refuses_before_encoding():
    gate = threading.Event()
    with running(engine=FakeEngine(slots=1, max_model_len=100_000), max_queued=0) as server:
        server.engine.script = lambda prompt, params: Script([65], gate=gate)
        caller = Caller(server, "/v1/completions", {"prompt": "a"})
        wait_until(lambda: server.engine.submitted)
        counting = Counting(server.state.served)
        object.__setattr__(server.state.served, "tokenizer", counting)
        for path, body in ROUTES:
            assert server.post(path, body("some words " * 1000)).status_code == 429
        assert counting.seen == 0
        gate.set()
        caller.hang_up()


@pytest.mark.parametrize(("path", "body"), [*ROUTES[:2], ("/v1/completions", lambda text: {"prompt": [[5, 6], [7]]})])
def test_a_prompt_is_checked_once_for_all_choices(server, monkeypatch, path, body):
    made = []

    def checked(ids):
        made.append(tuple(ids))
        return made[-1]

    monkeypatch.setattr(server.engine, "checked", checked, raising=False)
    assert server.post(path, body("hi") | {"n": 4}).is_success
    assert len(server.engine.submitted) == 4 * len(made)
    assert all(any(r.prompt is ids for ids in made) for r in server.engine.submitted)


def test_expect_100_continue_is_answered_before_the_body():
    with running(max_request_bytes=2048) as server:
        for size, answer in ((1 << 20, b"HTTP/1.1 413"), (20, b"HTTP/1.1 100")):
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=5) as caller:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n"
                started = time.monotonic()
                caller.sendall(f"{head}Expect: 100-Continue\r\n\r\n".encode())
                assert caller.recv(4096).startswith(answer)
                assert time.monotonic() - started < 3
                if size == 20:
                    caller.sendall(json.dumps({"prompt": "hello"}).encode().ljust(20))
                    assert b"200 OK" in caller.recv(4096)


def test_a_client_without_expect_still_gets_to_read_the_413():
    with running(max_request_bytes=2048) as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 3_000_000}).status_code == 413
