"""``cache_salt`` reaches the engine from every route, for every choice; a bad one is refused."""

import pytest

MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
ROUTES = [
    ("/v1/chat/completions", MESSAGES | {"n": 2}, 2),
    ("/v1/completions", {"prompt": ["hi", "ho"], "n": 2}, 4),
    ("/v1/messages", MESSAGES, 1),
    ("/v1/responses", {"input": "hi"}, 1),
]


@pytest.mark.parametrize(("path", "body", "requests"), ROUTES)
def test_it_reaches_the_engine(server, path, body, requests):
    assert server.post(path, body | {"cache_salt": "tenant 7"}).status_code == 200
    assert server.post(path, body).status_code == 200
    salts = [r.cache_salt for r in server.engine.submitted]
    assert salts == ["tenant 7"] * requests + [None] * requests


@pytest.mark.parametrize("salt", ["", 7, "x" * 1025])
def test_a_bad_one_is_refused(server, salt):
    reply = server.post("/v1/completions", {"prompt": "hi", "cache_salt": salt})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "cache_salt"
    assert not server.engine.submitted
