"""Text completions: prompts of all four kinds, echo, limits, several choices, streams."""

import json

import pytest

from tests.server.fake_engine import Script
from tests.server.harness import running, sse_data, tokenizer


def ids(text):
    return tokenizer().encode(text)


def complete(server, **fields):
    """The reply to a completion that must succeed."""
    response = server.post("/v1/completions", {"prompt": "ab"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server, **fields):
    response = server.post("/v1/completions", {"prompt": "ab", "stream": True} | fields)
    assert response.status_code == 200, response.text
    *data, done = sse_data(response.text)
    assert done == "[DONE]"
    return [json.loads(d) for d in data]


def test_official_client(server):
    server.says("Hello")
    client = server.client()
    reply = client.completions.create(model="flint-test", prompt="Say")
    assert (reply.object, reply.choices[0].text, reply.choices[0].finish_reason) == ("text_completion", "Hello", "stop")
    assert reply.usage.prompt_tokens == len(ids("Say"))
    stream = client.completions.create(model="flint-test", prompt="Say", stream=True)
    assert "".join(c.choices[0].text for c in stream) == "Hello"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab c", ["ab c"]),
        (["one", "two"], ["one", "two"]),
        ("<|user|>x", ["<|user|>x"]),
    ],
)
def test_text_prompts(server, prompt, expected):
    reply = complete(server, prompt=prompt)
    assert [list(r.prompt) for r in server.engine.submitted] == [ids(text) for text in expected]
    assert [c["index"] for c in reply["choices"]] == list(range(len(expected)))
    assert reply["usage"]["prompt_tokens"] == sum(len(ids(text)) for text in expected)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ([[5, 6]], [[5, 6]]),
        (["ab", [9]], None),
    ],
)
def test_token_prompts_are_used_as_they_are(server, prompt, expected):
    complete(server, prompt=prompt)
    assert [list(r.prompt) for r in server.engine.submitted] == (expected or [ids("ab"), [9]])


def test_default_limit_is_16_tokens(server):
    server.says("x" * 40)
    assert complete(server)["usage"]["completion_tokens"] == 16
    assert complete(server, max_tokens=None)["usage"]["completion_tokens"] == 16
    assert complete(server)["choices"][0]["finish_reason"] == "length"


def test_replies_belong_to_their_prompts(server):
    server.engine.script = lambda prompt, params: Script(prompt[::-1], token_s=0.001 * len(prompt))
    prompts = ["abcdef", "xy", "123", "q"]
    expected = [tokenizer().decode(ids(p)[::-1]) for p in prompts]
    assert [c["text"] for c in complete(server, prompt=prompts)["choices"]] == expected
    texts = [""] * 4
    for chunk in chunks(server, prompt=prompts):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == expected


def test_n_choices_of_two_prompts_are_numbered_prompt_by_prompt(server):
    server.engine.script = lambda prompt, params: Script([*prompt, 16 + params.seed])
    reply = complete(server, prompt=["a", "b"], n=3, seed=0)
    digits = [tokenizer().decode([16 + i]) for i in range(3)]
    assert [c["text"] for c in reply["choices"]] == [p + d for p in "ab" for d in digits]
    assert reply["usage"]["prompt_tokens"] == 2
    assert reply["usage"]["completion_tokens"] == 12


# -- echo and max_tokens 0 ---------------------------------------------------------------------------------------------


def test_echo_puts_the_prompt_first(server):
    server.says("cd")
    assert complete(server, echo=True)["choices"][0]["text"] == "abcd"
    assert complete(server, prompt=[ids("ab"), ids("x")], echo=True)["choices"][1]["text"] == "xcd"
    texts = {0: "", 1: "", 2: "", 3: ""}
    for chunk in chunks(server, prompt=["ab", "x"], echo=True, n=2):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == ["abcd", "abcd", "xcd", "xcd"]


BIRD = "🦜"  # four bytes, each a token of its own


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_ends_within_a_character(server, cut, stream):
    """The output says the character whole when it completes it; nothing of it is said twice or as U+FFFD."""
    whole = ids("a" + BIRD)
    prompt, rest = whole[: 1 + cut], whole[1 + cut :]
    assert len(whole) == 5

    def text(**fields):
        if not stream:
            return complete(server, prompt=prompt, **fields)["choices"][0]["text"]
        return "".join(c["choices"][0]["text"] for c in chunks(server, prompt=prompt, **fields))

    server.says([*rest, *ids("b")])
    assert text() == BIRD + "b"
    assert text(echo=True) == "a" + BIRD + "b"
    assert text(stop=BIRD) == ""
    server.says(ids("b"))  # does not complete it
    assert text() == "b"
    assert text(echo=True) == "a\ufffdb"
    assert text(echo=True, max_tokens=0) == "a\ufffd"
    server.says([])
    assert text() == ""


def test_offsets_of_a_prompt_that_ends_within_a_character(server):
    whole = ids("a" + BIRD)
    server.says([*whole[3:], *ids("b")])
    choice = complete(server, prompt=whole[:3], echo=True, logprobs=0)["choices"][0]
    assert choice["text"] == "a" + BIRD + "b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("echo", [False, True])
def test_no_tokens_at_all(server, echo):
    reply = complete(server, max_tokens=0, echo=echo)
    assert reply["choices"][0]["text"] == ("ab" if echo else "")
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    parts = chunks(server, max_tokens=0, echo=echo)
    assert "".join(p["choices"][0]["text"] for p in parts) == ("ab" if echo else "")
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert not server.engine.submitted
    whole_context = [5] * server.engine.max_model_len
    assert server.post("/v1/completions", {"prompt": whole_context, "max_tokens": 0}).status_code == 200
    assert server.post("/v1/completions", {"prompt": [*whole_context, 5], "max_tokens": 0}).status_code == 400


def test_think_tags_are_plain_text_here(server):
    server.says("<think>a</think>b")
    assert complete(server)["choices"][0]["text"] == "<think>a</think>b"


def test_special_tokens_are_shown_on_request(server):
    server.says("a<sop>b")
    assert complete(server)["choices"][0]["text"] == "ab"
    assert complete(server, skip_special_tokens=False)["choices"][0]["text"] == "a<sop>b"


# -- names -------------------------------------------------------------------------------------------------------------


def test_model_names(server):
    assert complete(server)["model"] == "flint-test"
    assert complete(server, model="alias/two")["model"] == "alias/two"
    assert complete(server, model="gpt-4o")["model"] == "flint-test"


def test_strict_model_names():
    with running(strict_model=True) as server:
        response = server.post("/v1/completions", {"prompt": "a", "model": "gpt-4o"})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert complete(server, model="alias/two")["model"] == "alias/two"


def test_model_list_tells_the_context_length(server):
    client = server.client()
    cards = client.models.list().data
    assert [c.id for c in cards] == ["flint-test", "alias/two"]
    assert cards[0].model_extra["max_model_len"] == server.engine.max_model_len
    assert client.models.retrieve("flint-test").id == "flint-test"
    assert server.http.get("/v1/models/alias/two").json()["id"] == "alias/two"
    missing = server.http.get("/v1/models/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
