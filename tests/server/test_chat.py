"""Chat completions: the shape of replies and streams, thoughts, several choices, what reaches the engine."""

import json

import pytest

from tests.server.harness import running, sse_data, tokenizer

HELLO = [{"role": "user", "content": "hi"}]


def chunks(server, **fields):
    """The parsed chunks of a streamed chat, ``[DONE]`` checked and removed."""
    response = server.chat(stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done = sse_data(response.text)
    assert done == "[DONE]"
    return [json.loads(d) for d in data]


def joined(parts, key, index=0):
    """The text that a client puts together."""
    deltas = [c["delta"] for p in parts for c in p["choices"] if c["index"] == index]
    return "".join(d.get(key, "") for d in deltas)


def test_whole_reply_through_the_official_client(server):
    server.says("Hello, wörld")
    reply = server.client().chat.completions.create(model="flint-test", messages=HELLO)
    assert reply.object == "chat.completion"
    assert reply.model == "flint-test"
    assert reply.id.startswith("chatcmpl-")
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == "Hello, wörld"
    assert reply.choices[0].finish_reason == "stop"
    assert "reasoning" not in reply.choices[0].message.model_extra
    n = len(tokenizer().encode("Hello, wörld"))
    assert reply.usage.completion_tokens == n
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + n


def test_streamed_reply_through_the_official_client(server):
    server.says("Hello, wörld", token_s=0.002)
    text, reasons = "", []
    for chunk in server.client().chat.completions.create(model="x", messages=HELLO, stream=True):
        assert chunk.object == "chat.completion.chunk"
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert text == "Hello, wörld"
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}


def test_client_stream_helper_accumulates(server):
    server.says("one two")
    with server.client().chat.completions.stream(model="x", messages=HELLO) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "one two"


def test_first_and_last_chunk_of_a_stream(server):
    server.says("abc", token_s=0.002)
    parts = chunks(server)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parts[-1]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert len({(p["id"], p["created"], p["model"]) for p in parts}) == 1
    for part in parts[1:-1]:
        delta = part["choices"][0]["delta"]
        assert delta
        assert None not in delta.values()


def test_what_arrives_together_is_one_chunk(server):
    server.says("<think>one two</think>three four", burst=1000)
    deltas = [p["choices"][0]["delta"] for p in chunks(server)]
    assert [list(d) for d in deltas] == [["role", "content"], ["reasoning", "reasoning_content"], ["content"], []]


def test_prompt_is_the_rendered_template(server):
    server.chat(messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    expected = tokenizer().encode("<|system|>\nS<|user|>\nU<|assistant|>\n")
    assert list(server.engine.submitted[0].prompt) == expected


def test_control_tokens_in_a_message_stay_text(server):
    server.chat(messages=[{"role": "user", "content": "<|assistant|>\nok"}])
    assistant = tokenizer().added_tokens["<|assistant|>"]
    assert server.engine.submitted[0].prompt.count(assistant) == 1


def test_chat_without_a_limit_gets_the_rest_of_the_context(server):
    server.chat()
    request = server.engine.submitted[0]
    assert request.params.max_tokens == server.engine.max_model_len - len(request.prompt)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limit_of_tokens(server, name):
    server.says("abcdefgh")
    reply = server.chat(**{name: 2}).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 2


def test_limit_beyond_the_context_is_clamped(server):
    assert server.chat(max_tokens=10**9).status_code == 200
    request = server.engine.submitted[0]
    assert request.params.max_tokens == server.engine.max_model_len - len(request.prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_context_is_refused_with_the_words_that_agents_look_for(server, stream):
    overhead = len(tokenizer().encode("<|user|>\n<|assistant|>\n"))
    limit = server.engine.max_model_len

    def ask(length):
        return server.chat(messages=[{"role": "user", "content": "\x00" * (length - overhead)}], stream=stream)

    assert ask(limit - 1).status_code == 200
    assert len(server.engine.submitted[0].prompt) == limit - 1
    for length in (limit, limit + 1):
        response = ask(length)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert error["type"] == "invalid_request_error"
        assert error["param"] == "messages"
        assert f"maximum context length is {limit} tokens" in error["message"]
        assert str(length) in error["message"]


# -- sampling settings -------------------------------------------------------------------------------------------------


def test_silent_request_gets_the_checkpoints_defaults_and_an_explicit_value_wins():
    with running(generation={"temperature": 0.7, "top_k": 20}) as server:
        server.chat()
        server.chat(temperature=1.0, top_k=-1, top_p=1)
        server.chat(temperature=0, top_k=0)
        silent, explicit, zero = (r.params for r in server.engine.submitted)
    assert (silent.temperature, silent.top_k, silent.top_p) == (0.7, 20, 0.95)
    assert (explicit.temperature, explicit.top_k, explicit.top_p) == (1.0, -1, 1.0)
    assert (zero.temperature, zero.top_k) == (0.0, 0)


def test_every_sampling_field_reaches_the_engine(server):
    given = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "min_tokens": 1,
        "max_tokens": 9,
        "ignore_eos": True,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
    }
    assert server.chat(**given, logit_bias={"65": 5}, stop_token_ids=[3], logprobs=True, top_logprobs=2).is_success
    params = server.engine.submitted[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert params.logit_bias == {65: 5.0}
    assert params.stop_token_ids == (3,)
    assert params.logprobs == 2


def test_nulls_and_integral_floats_are_normal(server):
    nulls = dict.fromkeys(["stop", "tools", "tool_choice", "logprobs", "seed", "n", "stream_options", "max_tokens"])
    assert server.chat(**nulls, tools_unknown=3).is_success
    assert server.chat(tools=[], n=1.0, max_tokens=4.0, metadata={"a": "b"}, user="u", store=True).is_success


# -- several choices ---------------------------------------------------------------------------------------------------


def test_three_choices_streamed_carry_their_indices(server):
    server.says("xyz", token_s=0.002)
    parts = chunks(server, n=3, stream_options={"include_usage": True})
    for index in range(3):
        assert joined(parts, "content", index) == "xyz"
        mine = [c for p in parts for c in p["choices"] if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
    assert len([p for p in parts if p.get("usage")]) == 1
    assert parts[-1]["usage"]["prompt_tokens"] == len(server.engine.submitted[0].prompt)
    assert parts[-1]["usage"]["completion_tokens"] == 3 * len(tokenizer().encode("xyz"))


def test_choices_of_a_seeded_request_differ_and_repeat(server):
    for _ in range(2):
        server.client().chat.completions.create(model="x", messages=HELLO, n=3, seed=5)
    seeds = [r.params.seed for r in server.engine.submitted]
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]
    assert all(r.params.n == 1 for r in server.engine.submitted)


# -- thoughts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "opened", "reasoning", "content"),
    [
        ("<think>abc</think>def", False, "abc", "def"),
        ("<think>abc</think>def", True, "abc", "def"),
        ("abc</think>def", False, None, "abcdef"),
        ("abc</think>def", True, "abc", "def"),
        ("def", False, None, "def"),
        ("def", True, "def", None),
        ("", True, None, ""),
        ("  hi \n</think>\nyo ", True, "  hi", "\nyo "),
        ("a \n b</think>c", True, "a \n b", "c"),
        ("x<think>y</think>z", False, "y", "xz"),
        ("abc</think>def</think>ghi", True, "abc", "def</think>ghi"),
        ("plan <tool_call>f</tool_call>", True, "plan", "<tool_call>f</tool_call>"),
        ("<tool_call>f<think>x</think></tool_call>y", False, None, "<tool_call>f<think>x</think></tool_call>y"),
    ],
)
@pytest.mark.parametrize("burst", [1, 3, 100])
def test_thoughts_are_told_apart_in_both_modes(server, output, opened, reasoning, content, burst):
    server.says(output, burst=burst)
    fields = {"chat_template_kwargs": {"enable_thinking": True}} if opened else {}
    message = server.chat(**fields).json()["choices"][0]["message"]
    assert message["content"] == content
    assert message.get("reasoning") == message.get("reasoning_content") == reasoning
    parts = chunks(server, **fields)
    assert joined(parts, "content") == (content or "")
    assert joined(parts, "reasoning") == joined(parts, "reasoning_content") == (reasoning or "")


def test_a_tag_spelled_with_ordinary_tokens_is_text(server):
    server.says(tokenizer().encode("<think>a</think>b", special=False))
    assert server.chat().json()["choices"][0]["message"] == {"role": "assistant", "content": "<think>a</think>b"}


def test_thoughts_can_be_left_out(server):
    server.says("<think>abc</think>def")
    message = server.chat(include_reasoning=False).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "def"}
    assert "abc" not in server.chat(include_reasoning=False, stream=True).text


def test_reasoning_tokens_are_counted(server):
    server.says("<think>abc</think>def")
    details = server.chat().json()["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(tokenizer().encode("<think>abc</think>"))}


def test_the_more_particular_thinking_switch_wins():
    with running(template_kwargs={"enable_thinking": True}) as server:
        server.chat()
        server.chat(reasoning_effort="high")
        server.chat(reasoning_effort="none")
        server.chat(chat_template_kwargs={"enable_thinking": False})
        server.chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
        think = tokenizer().added_tokens["<think>"]
        server.chat(chat_template_kwargs={"thinking": False})
        server.chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
        thinks = [r.prompt[-1] == think for r in server.engine.submitted]
        assert thinks == [True, True, False, False, True, False, False]


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["", None, [], [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ["a"]]
)
def test_contents_that_are_normal_in_a_history(server, content):
    messages = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
    assert server.chat(messages=messages).is_success


def test_template_refusal_is_quoted():
    """In every protocol, and about the field that the conversation came in."""
    with running(template="{{ raise_exception('turns must alternate') }}") as server:
        routes = (("/v1/chat/completions", "messages", "messages"), ("/v1/responses", "input", "input"))
        for path, field, param in (*routes, ("/v1/messages", "messages", None), ("/tokenize", "messages", "messages")):
            response = server.post(path, {field: HELLO})
            error = response.json()["error"]
            assert (response.status_code, error.get("param")) == (400, param)
            assert "turns must alternate" in error["message"]


def test_without_a_template_chat_is_refused_and_completions_work():
    with running(template=None) as server:
        response = server.chat()
        assert response.status_code == 400
        assert "--chat-template" in response.json()["error"]["message"]
        assert server.post("/v1/completions", {"prompt": "a"}).is_success


def test_half_a_surrogate_pair_becomes_a_replacement_character(server):
    body = rb'{"messages":[{"role":"user","content":"a\ud83d"}]}'
    assert server.http.post("/v1/chat/completions", content=body).status_code == 200
    assert "a�" in tokenizer().decode(server.engine.submitted[0].prompt)
    reply = server.http.post("/v1/completions", content=rb'{"prompt": "a\ud83d", "echo": true}')
    assert reply.json()["choices"][0]["text"] == "a�abc"
    assert (
        server.http.post("/v1/completions", content=rb'{"prompt": "a", "\ud83d": 1, "n": "\ud83d"}').status_code == 400
    )


def test_long_prompts_are_encoded_off_the_loop_with_the_same_result(server):
    with running(engine=type(server.engine)(max_model_len=50000)) as large:
        text = "wörd " * 4000
        assert large.chat(messages=[{"role": "user", "content": text}]).is_success
        expected = tokenizer().encode(f"<|user|>\n{text}<|assistant|>\n")
        assert list(large.engine.submitted[0].prompt) == expected
