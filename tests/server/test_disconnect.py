"""A client that hangs up frees its slot, at whatever stage, streaming or not."""

import json
import socket
import threading
import time

import pytest

from tests.server.fake_engine import Script
from tests.server.harness import tokenizer, wait_until

SOON = 10.0  # seconds; a busy machine needs one or two, a request that was not aborted never ends
ROUTES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/responses", {"input": "hi"}),
]


class Caller:
    """A client of bare sockets, that can hang up."""

    def __init__(self, server, path, body):
        raw = json.dumps(body).encode()
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        self.socket.sendall(head.encode() + raw)

    def hang_up(self):
        self.socket.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
def test_hanging_up_frees_everything(server, path, body, stream, stage):
    gate, late = threading.Event(), threading.Event()
    tokens = tokenizer().encode("a" * 200)
    callers = []
    if stage == "queue":  # others hold every slot
        server.engine.script = lambda prompt, params: Script(tokens, gate=gate)
        callers = [Caller(server, *ROUTES[0]) for _ in range(server.engine.slots)]
        wait_until(lambda: server.engine.stats()["free_slots"] == 0)
    before = len(server.engine.submitted)
    if stage == "decode":
        server.engine.script = lambda prompt, params: Script(tokens, token_s=0.02)
    else:
        server.engine.script = lambda prompt, params: Script(tokens, gate=late)
    caller = Caller(server, path, body | {"stream": stream, "max_tokens": 200})
    expected = len(body["prompt"]) * body["n"] if isinstance(body.get("prompt"), list) else 1
    wait_until(lambda: len(server.engine.submitted) == before + expected)
    if stage == "decode":
        wait_until(lambda: server.engine.submitted[-1].sent > 1)
    caller.hang_up()
    started = time.monotonic()
    wait_until(lambda: server.engine.aborted == expected, SOON)
    assert time.monotonic() - started < SOON
    assert server.engine.stats()["running"] == len(callers)
    gate.set()
    for other in callers:
        answer = b""
        while b"finish_reason" not in answer:
            answer += other.socket.recv(65536)
        other.hang_up()
    server.says("ok")
    assert server.chat().json()["choices"][0]["message"]["content"] == "ok"


def test_more_aborts_than_slots_leave_no_zombies(server):
    server.says("a" * 100, token_s=0.01)
    for n in range(20):
        caller = Caller(server, ROUTES[n % 2][0], ROUTES[n % 2][1] | {"stream": n % 3 == 0})
        time.sleep(0.003 * (n % 5))
        caller.hang_up()
    wait_until(server.engine.idle)
    wait_until(lambda: not server.state.jobs)
    server.says("ok")
    for _ in range(8):
        assert server.chat().json()["choices"][0]["message"]["content"] == "ok"


def test_hanging_up_inside_the_body_is_no_error(server, caplog):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.05)
    assert server.chat().is_success
    assert "Traceback" not in caplog.text


def test_a_slow_reader_does_not_slow_the_others(server):
    """It reads nothing while megabytes wait for it; others are answered, and it gets all of its text in the end."""
    tokens = tokenizer().encode("a") * 240
    server.engine.script = lambda prompt, params: Script(tokens)
    slow = Caller(
        server,
        "/v1/completions",
        {"prompt": "hi", "stream": True, "n": 60, "logprobs": 5, "max_tokens": 240},
    )
    wait_until(lambda: len(server.engine.submitted) == 60)
    wait_until(server.engine.idle)
    started = time.monotonic()
    assert server.chat(max_tokens=3).is_success
    assert time.monotonic() - started < SOON
    answer = b""
    while not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        answer += slow.socket.recv(1 << 20)
    assert answer.count(b'"finish_reason":"length"') == 60
    slow.hang_up()


def test_two_requests_on_one_connection(server):
    """The watcher for a disconnect must not swallow the next request."""
    for stream in (True, False, True):
        assert server.chat(stream=stream).is_success
    assert server.engine.aborted == 0
