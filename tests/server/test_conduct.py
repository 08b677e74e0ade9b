"""How the server behaves around requests: loading, keys, origins, silence, a full queue, a dead engine, tokenising."""

import json
import threading
import time

import httpx
import openai
import pytest

import flint_jax
from flint_jax.server.app import ROUTES
from flint_jax.server.middleware import ALWAYS_PATHS
from flint_jax.server.watchdog import Watchdog
from tests.server.fake_engine import FakeEngine, Script
from tests.server.harness import running, tokenizer, wait_until

HI = {"messages": [{"role": "user", "content": "hi"}]}


def every_route():
    """(method, path) of each route of the app."""
    for route in ROUTES:
        path = route.path.replace("{name:path}", "flint-test")
        yield from ((method, path) for method in sorted(route.methods - {"HEAD"}))


def is_error(response, status, code):
    error = response.json()["error"]
    if response.json().get("type") == "error":  # Anthropic's shape
        assert set(error) == {"type", "message"}
        assert response.status_code == status
        return error
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status_code, error["code"]) == (status, code)
    return error


# -- loading -----------------------------------------------------------------------------------------------------------


def test_503_while_loading_then_200():
    with running(loaded=False) as server:
        server.state.progress("loading weights, 3 of 9")
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "loading", "detail": "loading weights, 3 of 9"}
        for method, path in every_route():
            response = server.http.request(method, path, json=HI)
            if path in ALWAYS_PATHS:
                assert not response.text.startswith('{"error"'), path
                continue
            error = is_error(response, 503, "model_loading")
            assert "3 of 9" in error["message"]
            assert int(response.headers["retry-after"]) > 0
        assert server.http.get("/version").json() == {"version": flint_jax.__version__}
        server.state.set_ready(server.served)
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ready")
        assert health.json()["engine"]["free_slots"] == 4
        assert server.chat().is_success


def test_official_client_waits_for_the_model():
    with running(loaded=False) as server:
        threading.Timer(0.2, lambda: server.state.set_ready(server.served)).start()
        reply = server.client(max_retries=3).chat.completions.create(model="x", messages=HI["messages"])
        assert reply.choices[0].finish_reason == "stop"


# -- keys and origins --------------------------------------------------------------------------------------------------


def test_every_route_but_health_and_ping_asks_for_a_key():
    with running(api_keys=("first-key", "zweiter-schlüssel")) as server:
        for method, path in [*every_route(), ("GET", "/nope"), ("POST", "/health/../v1/models")]:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first-key"}, {"x-api-key": ""}):
                response = server.http.request(method, path, headers=headers)
                if path in ("/health", "/ping"):
                    assert response.status_code == 200
                    continue
                is_error(response, 401, "invalid_api_key")
            assert server.http.options(path).status_code != 401
        good = [
            {"authorization": "Bearer first-key"},
            {"authorization": "bearer first-key"},
            {"x-api-key": "first-key"},
            {"authorization": "Bearer zweiter-schlüssel".encode()},
        ]
        for headers in good:
            assert server.http.get("/v1/models", headers=headers).status_code == 200, headers
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="wrong").models.list()
        assert server.client(api_key="first-key").models.list()


def test_key_is_asked_for_before_anything_is_told():
    with running(loaded=False, api_keys=("k",)) as server:
        is_error(server.http.get("/v1/models"), 401, "invalid_api_key")
        assert server.http.get("/health").status_code == 503


@pytest.mark.parametrize(
    ("allowed", "origin", "granted"),
    [
        ((), "http://localhost:3000", "http://localhost:3000"),
        ((), "http://127.0.0.1", "http://127.0.0.1"),
        ((), "http://evil.example", None),
        ((), "http://localhost.evil.example", None),
        (("*",), "http://any.example", "*"),
        (("http://a.example",), "http://a.example", "http://a.example"),
        (("http://a.example",), "http://localhost:3000", None),
    ],
)
def test_origins(allowed, origin, granted):
    with running(allowed_origins=allowed, api_keys=("k",)) as server:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        preflight = server.http.options("/v1/chat/completions", headers=asked)
        assert preflight.headers.get("access-control-allow-origin") == granted
        assert preflight.is_success is (granted is not None)
        refused = server.http.get("/v1/models", headers={"origin": origin})
        assert refused.status_code == 401
        assert refused.headers.get("access-control-allow-origin") == granted


def test_what_origins_may_send():
    with running(allow_credentials=True, allowed_methods=("GET",), allowed_headers=("x-mine",)) as server:
        asked = {"origin": "http://localhost:3000", "access-control-request-method": "GET"}
        granted = server.http.options("/v1/models", headers=asked).headers
        assert granted["access-control-allow-credentials"] == "true"
        assert granted["access-control-allow-methods"] == "GET"
        assert "x-mine" in granted["access-control-allow-headers"]
        assert server.http.options("/v1/models", headers=asked | {"access-control-request-method": "PUT"}).is_error


def test_root_path():
    with running(root_path="/llm", api_keys=("k",)) as server:
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/v1/models").status_code == 401
        assert server.http.get("/v1/models", headers={"x-api-key": "k"}).status_code == 200


# -- silence, queue ----------------------------------------------------------------------------------------------------


def test_silent_streams_get_comments():
    with running(keep_alive_s=0.05) as server:
        server.says("ab", prefill_s=0.22)
        for path, body in (("/v1/chat/completions", HI), ("/v1/completions", {"prompt": "a"})):
            text = server.post(path, body | {"stream": True}).text
            assert 2 <= text.count(": keep-alive\n\n") <= 4
            assert text.startswith(": keep-alive\n\n")
        stream = server.client().chat.completions.create(model="x", messages=HI["messages"], stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == "ab"
        server.says("abc" * 10, token_s=0.02)
        assert "keep-alive" not in server.chat(stream=True).text
        server.says("ab", prefill_s=0.12)
        assert server.chat().json()["choices"][0]["message"]["content"] == "ab"


def test_no_comments_when_switched_off():
    with running(keep_alive_s=0) as server:
        server.says("ab", prefill_s=0.1)
        assert "keep-alive" not in server.chat(stream=True).text


def test_a_full_queue_answers_429_and_loses_nothing():
    gate = threading.Event()
    with running(engine=FakeEngine(slots=2), max_queued=3) as server:
        server.says("ok", gate=gate)
        replies = []

        def ask():
            replies.append(httpx.post(f"{server.url}/v1/chat/completions", json=HI, timeout=20))

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(replies) == 15)
        gate.set()
        for thread in threads:
            thread.join()
        assert sorted(r.status_code for r in replies) == [200] * 5 + [429] * 15
        for response in replies:
            if response.status_code == 429:
                is_error(response, 429, "queue_full")
                assert int(response.headers["retry-after"]) > 0
        # a request of more choices than there is room for is served when it is alone
        wait_until(lambda: not server.state.jobs)
        assert server.chat(n=10).is_success


def test_replies_are_not_mixed_up_among_many():
    with running(engine=FakeEngine(slots=8)) as server:
        server.engine.script = lambda prompt, params: Script(prompt[2:-2], token_s=0.001)
        answers = {}

        def ask(n):
            with httpx.Client(base_url=server.url, timeout=20) as http:
                body = {"messages": [{"role": "user", "content": f"name-{n}"}], "stream": n % 2 == 0}
                answers[n] = http.post("/v1/chat/completions", json=body).text

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n, text in answers.items():
            others = [m for m in range(24) if m != n and f"name-{m}" not in f"name-{n}"]
            joined = "".join(part.split('"')[0] for part in text.split('"content":"')[1:])
            assert joined == f"name-{n}"
            assert not any(f"name-{m}" in joined for m in others)


# -- a dead engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_fails_what_runs_and_turns_health_red(stream):
    with running() as server:
        server.says("ab", gate=threading.Event())
        got = []
        thread = threading.Thread(target=lambda: got.append(server.chat(stream=stream)))
        thread.start()
        wait_until(lambda: server.engine.stats()["running"] == 1)
        server.engine.break_down(MemoryError("device out of memory"))
        thread.join(5)
        assert got[0].status_code == 500
        wait_until(lambda: server.http.get("/health").status_code == 503)
        assert server.http.get("/health").json()["status"] == "failed"
        is_error(server.chat(), 500, "engine_failed")


def test_a_dying_engine_ends_a_stream_that_has_begun_with_an_error_event():
    with running() as server:
        server.says("a" * 200, token_s=0.02)
        with server.http.stream("POST", "/v1/chat/completions", json=HI | {"stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.engine.break_down(MemoryError("device out of memory"))
            last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], response.status_code) == ("server_error", 200)
        assert "memory" not in error["message"]  # of what killed it, the log tells
        wait_until(lambda: server.http.get("/health").status_code == 503)


def test_an_engine_that_dies_without_a_word_does_not_hang_its_clients():
    with running() as server:
        server.says("ab", gate=threading.Event())
        got = []
        thread = threading.Thread(target=lambda: got.append(server.chat()))
        thread.start()
        wait_until(lambda: server.engine.stats()["running"] == 1)
        server.engine.failed = RuntimeError("gone")
        thread.join(5)
        is_error(got[0], 500, "engine_failed")
        server.engine.failed = None


def test_an_engine_that_stands_still_turns_health_red_until_it_moves(caplog):
    gate = threading.Event()
    with running(stall_timeout_s=0.6) as server:
        assert server.http.get("/health").status_code == 200
        time.sleep(1.2)
        assert server.http.get("/health").status_code == 200  # idle is not still
        server.says("ab", gate=gate)
        got = []
        threads = [threading.Thread(target=lambda: got.append(server.chat()))]
        threads[0].start()
        wait_until(lambda: server.engine.stats()["running"] == 1)
        started = time.monotonic()
        while server.http.get("/health").status_code == 200:  # those who come meanwhile do not make it look alive
            assert time.monotonic() - started < 8
            if len(threads) < 8:
                threads.append(threading.Thread(target=lambda: got.append(server.chat())))
                threads[-1].start()
            time.sleep(0.2)
        health = server.http.get("/health")
        assert (health.json()["status"], health.headers["retry-after"]) == ("stalled", "2")
        assert "nothing for" in health.json()["detail"]
        assert "ready{" in server.http.get("/metrics").text
        assert caplog.text.count("the engine has done nothing") == 1
        gate.set()
        for thread in threads:
            thread.join()
        wait_until(lambda: server.http.get("/health").status_code == 200)
        assert all(r.is_success for r in got)
        assert "the engine moves again" in caplog.text


def test_the_watchdog_can_be_switched_off():
    dog = Watchdog(0.0)
    for now in range(0, 1000, 100):
        dog.look({"running": 1}, now)
        assert not dog.stalled_s


def test_any_move_of_the_engine_counts():
    dog = Watchdog(10.0)
    stats = {"running": 1, "waiting": 1, "prefilled_tokens": 0}
    for now in range(0, 100, 9):
        dog.look(dict(stats), now)
        assert not dog.stalled_s
        stats["prefilled_tokens"] += 64
    dog.look(dict(stats) | {"waiting": 5}, 100)
    dog.look(dict(stats) | {"waiting": 9}, 111)
    assert dog.stalled_s == 11.0
    dog.look({"running": 0, "waiting": 0}, 112)
    assert not dog.stalled_s


# -- tokenising --------------------------------------------------------------------------------------------------------


def test_tokenize_and_back(server):
    text = "hello 🦜 <|user|>"
    reply = server.post("/tokenize", {"prompt": text}).json()
    assert reply["tokens"] == tokenizer().encode(text)
    assert reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == server.engine.max_model_len
    assert server.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": text}
    strings = server.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()["token_strs"]
    assert strings == [tokenizer().token_string(i) for i in tokenizer().encode("ab")]


def test_tokenize_messages_as_the_chat_route_does(server):
    server.chat()
    assert server.post("/tokenize", HI).json()["tokens"] == list(server.engine.submitted[0].prompt)
