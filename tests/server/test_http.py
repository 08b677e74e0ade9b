"""How clients write URLs and pack bodies: what is meant is served, else the answer says what was meant."""

import functools
import gzip
import json
import tracemalloc
import zlib

import pytest

from flint_jax.server import body
from flint_jax.server.errors import ApiError
from tests.server.harness import prompt_of, running

HI = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"max_tokens": 9, "messages": HI},
    "/v1/responses": {"input": "hi"},
    "/tokenize": {"prompt": "a"},
}
CHAT = "/v1/chat/completions"
RAW = json.dumps(BODIES[CHAT]).encode()
# Without the time, which would give a test another name in each of pytest's workers.
squeeze = functools.partial(gzip.compress, mtime=0)


# -- URLs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", BODIES)
def test_slashes_too_many_change_nothing(server, route):
    for path in (f"{route}/", f"{route}//", route.replace("/v1/", "/v1//"), f"{route}/?beta=true"):
        assert server.post(path, BODIES[route]).status_code == 200, path


def test_slashes_of_other_routes(server):
    assert server.http.get("/v1/models/").json() == server.http.get("/v1/models").json()
    assert server.http.get("/v1/models/alias/two/").json()["id"] == "alias/two"
    assert server.http.get("/health/").json()["status"] == "ready"
    assert server.http.get("/", headers={"accept": "text/html"}).text.startswith("<!doctype html>")


def test_slashes_open_no_door():
    with running(api_keys=("k",)) as server:
        for path in ("/v1/models/", "//metrics", "/health/../v1/models", "/v1//models"):
            assert server.http.get(server.url + path).status_code == 401, path
        assert server.http.get("/health/").status_code == 200


def test_slashes_behind_a_proxy():
    """The proxy takes the prefix off; the server is told to put it back."""
    with running(root_path="/flint") as server:
        for path in ("/", "/health/", "/v1//models"):
            assert server.http.get(path).status_code == 200, path
        assert server.post("/v1/chat/completions/", BODIES[CHAT]).status_code == 200


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/response", "/v1/responses"),
        ("/models", "/v1/models"),
        ("/v1/embeddings", None),
        ("/api/chat", None),
        ("/" + "v1/" * 3000, None),
    ],
)
def test_the_route_that_was_meant(server, path, meant):
    message = server.post(path, {}).json()["error"]["message"]
    assert message.startswith("there is no route POST ")
    assert (f"; did you mean {meant}?" in message) if meant else ("did you mean" not in message)
    if path in ("/chat/completions", "/v1/v1/messages"):
        assert "base URLs end in /v1 for OpenAI's clients, and have none for Anthropic's" in message


def test_options_say_what_a_route_takes(server):
    reply = server.http.options(CHAT)
    assert (reply.status_code, reply.headers["allow"], reply.content) == (204, "POST", b"")
    assert server.http.options("/v1/nothing").status_code == 404
    assert server.http.request("HEAD", "/").status_code == server.http.request("HEAD", "/v1/models").status_code == 200


# -- bodies ------------------------------------------------------------------------------------------------------------


def packed(server, encoding, data):
    return server.http.post(CHAT, content=data, headers={"content-encoding": encoding})


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", squeeze), ("GZIP", squeeze), ("x-gzip", squeeze), ("deflate", zlib.compress)],
)
def test_packed_bodies(show, encoding, pack):
    assert packed(show, encoding, pack(RAW)).status_code == 200
    assert prompt_of(show) == "[user]hi<|assistant|>"
    assert packed(show, "identity", RAW).status_code == 200


@pytest.mark.parametrize(
    ("encoding", "data", "status", "words"),
    [
        ("zstd", RAW, 415, "encoding 'zstd' cannot be read here; send it plain or with gzip"),
        ("gzip, gzip", squeeze(squeeze(RAW)), 415, "'gzip, gzip'"),
        ("gzip", RAW, 400, "is not gzip, as its Content-Encoding says"),
        ("gzip", squeeze(RAW)[:-9], 400, "is cut short"),
        ("gzip", squeeze(RAW) * 2, 400, "goes on after its end"),
        ("gzip", b"", 400, "is cut short"),
        ("deflate", squeeze(b"{"), 400, "not valid JSON"),
    ],
)
def test_packed_bodies_that_cannot_be_read(server, encoding, data, status, words):
    reply = packed(server, encoding, data)
    assert reply.status_code == status
    assert words in reply.json()["error"]["message"]
    assert not server.engine.submitted
    assert str(status) in server.http.get("/openapi.json").json()["paths"][CHAT]["post"]["responses"]


def test_a_small_body_that_unpacks_to_a_huge_one_is_too_large():
    with running(max_request_bytes=2000) as server:
        bomb = squeeze(b" " * 10**7)
        assert len(bomb) > 2000
        assert packed(server, "gzip", bomb).status_code == 413
        assert packed(server, "gzip", squeeze(RAW + b" " * 1990)).status_code == 413
        assert packed(server, "gzip", squeeze(RAW.ljust(2000))).status_code == 200
    tracemalloc.start()
    with pytest.raises(ApiError):
        body._unpacked(bomb, "gzip", 2000)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


@pytest.mark.parametrize("data", [b"", b"  \n"])
def test_an_empty_body_is_called_so(server, data):
    assert "the body is empty" in server.http.post(CHAT, content=data).json()["error"]["message"]
