"""Log-probabilities of the prompt on the wire: echo as evaluation harnesses ask for it, and vLLM's prompt_logprobs."""

import json

import pytest

from tests.server.harness import sse_data, tokenizer

HI = "<|user|>\nhi<|assistant|>\n"  # the chat prompt of ``server.chat``


def ids(text):
    return tokenizer().encode(text)


def complete(server, **fields):
    reply = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 2} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def test_echo_with_logprobs_scores_prompt_and_output(server):
    server.says("xyz")
    choice = complete(server, echo=True, logprobs=1)[0]
    assert choice["text"] == "abcxy"
    scores = choice["logprobs"]
    assert scores["tokens"] == ["a", "b", "c", "x", "y"]
    assert scores["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert scores["top_logprobs"] == [None, {"b": -0.25}, {"c": -0.25}, {"x": -0.25}, {"y": -0.25}]
    assert scores["text_offset"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("limit", [0, 1])
def test_as_evaluation_harnesses_ask(server, limit):
    """Batched prompts of token ids, echoed; the harness cuts context and last token off itself."""
    server.says("z")
    prompts = [ids("ab cd"), ids("x"), ids("ein Text, é 北")]
    choices = complete(server, prompt=prompts, max_tokens=limit, temperature=0, echo=True, logprobs=1, seed=1)
    assert [c["index"] for c in choices] == [0, 1, 2]
    for prompt, choice in zip(prompts, choices, strict=True):
        scores = choice["logprobs"]
        assert len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == len(prompt) + limit
        assert scores["token_logprobs"][0] is None
        assert all(lp == -0.25 for lp in scores["token_logprobs"][1:])
        assert all(len(top) >= 1 for top in scores["top_logprobs"][1:])
        offsets = scores["text_offset"]
        assert offsets[0] == 0
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(choice["text"])
        assert choice["text"] == tokenizer().decode(prompt) + "z" * limit
        assert choice["finish_reason"] == "length"


def test_a_prompt_may_fill_the_context_when_nothing_is_generated(server):
    whole = [5] * server.engine.max_model_len
    choices = complete(server, prompt=whole, max_tokens=0, echo=True, logprobs=0)
    assert choices[0]["logprobs"]["top_logprobs"] is None
    assert choices[0]["logprobs"]["token_logprobs"] == [None, *[-0.25] * (len(whole) - 1)]
    body = {"prompt": [*whole, 5], "max_tokens": 0, "echo": True, "logprobs": 0}
    assert server.post("/v1/completions", body).json()["error"]["code"] == "context_length_exceeded"
    assert server.post("/v1/completions", body | {"prompt": ""}).json()["error"]["param"] == "prompt"


def test_offsets_of_control_tokens_and_cut_characters(server):
    prompt = "a<|user|>\n🦜b"
    choice = complete(server, prompt=prompt, max_tokens=0, echo=True, logprobs=0)[0]
    pieces = [tokenizer().token_bytes(i) for i in ids(prompt)]
    wanted = [len(b"".join(pieces[:n]).decode(errors="ignore")) for n in range(len(pieces))]
    assert choice["logprobs"]["text_offset"] == wanted
    assert choice["text"] == prompt


def test_streamed_echo_begins_with_the_prompts_scores(server):
    server.says("xyz")
    body = {"prompt": ["abc", "d"], "max_tokens": 2, "echo": True, "logprobs": 2, "stream": True, "n": 2}
    tokens, texts = {}, {}
    for data in sse_data(server.post("/v1/completions", body).text):
        if data == "[DONE]":
            continue
        choice = json.loads(data)["choices"][0]
        tokens.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert tokens == {0: list("abcxy"), 1: list("abcxy"), 2: list("dxy"), 3: list("dxy")}
    assert texts == {i: "".join(t) for i, t in tokens.items()}


def test_the_engine_is_asked_for_the_larger_number(server):
    server.says("x")
    choice = complete(server, echo=True, logprobs=1, prompt_logprobs=3)[0]
    assert server.engine.submitted[-1].prompt_logprobs == 3
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1
    complete(server, logprobs=1)
    assert server.engine.submitted[-1].prompt_logprobs is None


def test_vllms_field_in_completions(server):
    choice = complete(server, prompt_logprobs=2, max_tokens=0)[0]
    assert choice["text"] == ""
    assert choice["logprobs"] is None
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    token = {"logprob": -0.25, "rank": 1, "decoded_token": "b"}
    assert second[str(ids("b")[0])] == token
    assert len(second) == 2
    assert third[str(ids("c")[0])] == token | {"decoded_token": "c"}
    assert "prompt_logprobs" not in complete(server)[0]


def test_vllms_field_in_chat(server):
    reply = server.chat(prompt_logprobs=0, n=2, max_tokens=1).json()
    prompt = ids(HI)
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert [next(iter(e)) for e in reply["prompt_logprobs"][1:]] == [str(i) for i in prompt[1:]]
    assert reply["prompt_logprobs"][0] is None
    assert [r.prompt_logprobs for r in server.engine.submitted] == [0, None]
    assert "prompt_logprobs" not in server.chat().json()
