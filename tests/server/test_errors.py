"""Bad requests: each gets a 4xx in OpenAI's shape, none a 500, and the next request is answered as if nothing was."""

import json

import httpx
import openai
import pytest

from tests.server.harness import running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}


def chat(**fields):
    return CHAT, HI | fields


def text(**fields):
    return TEXT, {"prompt": "a"} | fields


def message(**fields):
    return CHAT, {"messages": [fields]}


# (request, field that the error names)
BAD = [
    ((CHAT, {}), "messages"),
    ((CHAT, {"messages": None}), "messages"),
    ((CHAT, {"messages": []}), "messages"),
    ((CHAT, {"messages": "hi"}), "messages"),
    ((CHAT, {"messages": {"role": "user"}}), "messages"),
    ((CHAT, {"messages": ["hi"]}), "messages[0]"),
    (message(content="x"), "messages[0].role"),
    (message(role=3, content="x"), "messages[0].role"),
    (message(role="robot", content="x"), "messages[0].role"),
    (message(role=["user"], content="x"), "messages[0].role"),
    (message(role="user", content=7), "messages[0].content"),
    (message(role="user", content={"type": "text"}), "messages[0].content"),
    (message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0]"),
    (message(role="user", content=[{"type": "text", "text": 3}]), "messages[0].content[0].text"),
    (message(role="user", content=[7]), "messages[0].content[0]"),
    (message(role="assistant", content="", tool_calls=[{"id": "x"}]), "messages[0].tool_calls[0]"),
    (message(role="assistant", content="", tool_calls="f"), "messages[0].tool_calls"),
    (message(role="assistant", content="", reasoning=3), "messages[0].reasoning"),
    (chat(temperature="0.5"), "temperature"),
    (chat(temperature=True), "temperature"),
    (chat(temperature=-1), "temperature"),
    (chat(temperature=1e400), None),
    (chat(temperature=10**400), "temperature"),
    (chat(temperature=[]), "temperature"),
    (chat(top_p=1.5), "top_p"),
    (chat(top_p=-0.1), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(top_k=1.5), "top_k"),
    (chat(min_p=2), "min_p"),
    (chat(n=0), "n"),
    (chat(n=129), "n"),
    (chat(n="2"), "n"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens=1.5), "max_tokens"),
    (chat(max_completion_tokens="5"), "max_completion_tokens"),
    (chat(min_tokens=-1), "min_tokens"),
    (chat(min_tokens=5, max_tokens=2), "min_tokens"),
    (chat(seed="x"), "seed"),
    (chat(seed=2**70), "seed"),
    (chat(stop=5), "stop"),
    (chat(stop=[5]), "stop"),
    (chat(stop=""), "stop"),
    (chat(stop=["a", ""]), "stop"),
    (chat(stop=["x"] * 65), "stop"),
    (chat(stop="x" * 5000), "stop"),
    (chat(stop_token_ids=[512]), "stop_token_ids"),
    (chat(stop_token_ids=[-1]), "stop_token_ids"),
    (chat(stop_token_ids=["a"]), "stop_token_ids"),
    (chat(stop_token_ids=[10**400]), "stop_token_ids"),
    (chat(stop_token_ids=list(range(20))), "stop_token_ids"),
    (chat(stop_token_ids=5), "stop_token_ids"),
    (chat(logit_bias={"99999999": 5}), "logit_bias"),
    (chat(logit_bias={"512": 5}), "logit_bias"),
    (chat(logit_bias={"-1": 5}), "logit_bias"),
    (chat(logit_bias={"a": 5}), "logit_bias"),
    (chat(logit_bias={"²": 5}), "logit_bias"),
    (chat(logit_bias={"5": "x"}), "logit_bias"),
    (chat(logit_bias={"5": 101}), "logit_bias"),
    (chat(logit_bias={"5": -(10**400)}), "logit_bias"),
    (chat(logit_bias={"5": None}), "logit_bias"),
    (chat(logit_bias=[1]), "logit_bias"),
    (chat(presence_penalty=3), "presence_penalty"),
    (chat(frequency_penalty=-3), "frequency_penalty"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(repetition_penalty=-1), "repetition_penalty"),
    (chat(logprobs=5), "logprobs"),
    (chat(logprobs="yes"), "logprobs"),
    (chat(top_logprobs=3), "top_logprobs"),
    (chat(logprobs=False, top_logprobs=3), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
    (chat(stream="yes"), "stream"),
    (chat(stream=1), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options="x"), "stream_options"),
    (chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (chat(model=5), "model"),
    (chat(tools="x"), "tools"),
    (chat(tools=[5]), "tools[0]"),
    (chat(tools=[{"type": "function"}]), "tools[0]"),
    (chat(tools=[{"type": "web_search", "function": {"name": "x"}}]), "tools[0]"),
    (chat(tools=[{"type": "function", "function": {"name": ""}}]), "tools[0].function.name"),
    (
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": "x"}}]),
        "tools[0].function.parameters",
    ),
    (chat(tools=[TOOL], tool_choice="required"), "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "ping"}}), "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "nope"}}), "tool_choice"),
    (chat(tools=[TOOL], tool_choice="maybe"), "tool_choice"),
    (chat(tools=[TOOL], tool_choice=7), "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "function": "ping"}), "tool_choice"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(functions=[{"name": "f"}]), "functions"),
    (chat(response_format={"type": "json_object"}), "response_format"),
    (chat(response_format={"type": "json_schema", "json_schema": {"$ref": "#/nope"}}), "response_format"),
    (chat(response_format="json"), "response_format"),
    (chat(structured_outputs={"regex": "("}), "structured_outputs"),
    (chat(guided_regex="("), "guided_regex"),
    (chat(modalities=["audio"]), "modalities"),
    (chat(reasoning_effort="extreme"), "reasoning_effort"),
    (chat(reasoning_effort=3), "reasoning_effort"),
    (chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    (chat(chat_template="x"), "chat_template"),
    (chat(continue_final_message=True), "continue_final_message"),
    (chat(include_reasoning="no"), "include_reasoning"),
    (chat(documents="x"), "documents"),
    (chat(use_beam_search=True), "use_beam_search"),
    (chat(prompt_logprobs=21), "prompt_logprobs"),
    (chat(return_token_ids=True), "return_token_ids"),
    (text(return_tokens_as_token_ids=True), "return_tokens_as_token_ids"),
    (text(truncate_prompt_tokens=5), "truncate_prompt_tokens"),
    (chat(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (text(prompt_logprobs=-1), "prompt_logprobs"),
    (text(response_format={"type": "json_object"}), "response_format"),
    (text(guided_choice=["a"]), "guided_choice"),
    (chat(ignore_eos="true"), "ignore_eos"),
    ((TEXT, {}), "prompt"),
    (text(prompt=None), "prompt"),
    (text(prompt=""), "prompt"),
    (text(prompt=[]), "prompt"),
    (text(prompt=[[]]), "prompt"),
    (text(prompt=["a", ""]), "prompt"),
    (text(prompt=[1, "a"]), "prompt"),
    (text(prompt=[True]), "prompt"),
    (text(prompt=[1.5]), "prompt"),
    (text(prompt=[512]), "prompt"),
    (text(prompt=[-1]), "prompt"),
    (text(prompt=[10**30]), "prompt"),
    (text(prompt=[10**400]), "prompt"),
    (text(prompt=[[1, "a"]]), "prompt"),
    (text(prompt=[[[1]]]), "prompt"),
    (text(prompt={"a": 1}), "prompt"),
    (text(prompt=7), "prompt"),
    (text(prompt=[5] * 256), "prompt"),
    (text(prompt=["a"] * 100, n=128), "prompt"),
    (text(max_tokens=-1), "max_tokens"),
    (text(logprobs=21), "logprobs"),
    (text(logprobs=True), "logprobs"),
    (text(logprobs=-1), "logprobs"),
    (text(echo="x"), "echo"),
    (text(suffix="x"), "suffix"),
    (text(best_of=3), "best_of"),
    (text(prompt_embeds="x"), "prompt_embeds"),
    (("/tokenize", {}), "prompt"),
    (("/tokenize", {"prompt": 3}), "prompt"),
    (("/tokenize", {"messages": []}), "messages"),
    (("/detokenize", {}), "tokens"),
    (("/detokenize", {"tokens": "x"}), "tokens"),
    (("/detokenize", {"tokens": [512]}), "tokens"),
    (("/detokenize", {"tokens": [1.0]}), "tokens"),
]

# bodies that are no JSON object at all
BROKEN = [
    b"",
    b"{",
    b"[]",
    b"3",
    b"null",
    b'"x"',
    b"hello",
    b'{"messages": NaN}',
    b'{"temperature": Infinity}',
    b'{"metadata": {"a": 1e999}}',
    b"\xff\xfe{}",
    b'{"prompt": "\xff"}',
    b'{"a": ' * 3000 + b"1" + b"}" * 3000,
    b"[" * 100_000,
    b'{"n": ' + b"9" * 5000 + b"}",
    b"{'prompt': 'x'}",
]


def check(response, status=400):
    """The error object of a response that must have OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] == "invalid_request_error" or status != 400
    assert "Traceback" not in error["message"]
    assert response.headers["x-request-id"]
    return error


def check_alive(server):
    assert server.chat().json()["choices"][0]["message"]["content"] == "abc"


@pytest.mark.parametrize(("request_", "param"), BAD, ids=lambda v: json.dumps(v)[:60] if isinstance(v, tuple) else "")
def test_bad_field(server, request_, param):
    path, body = request_
    # httpx would refuse to write 1e400, which json reads as infinity
    raw = json.dumps(body).replace("Infinity", "1e400")
    error = check(server.http.post(path, content=raw))
    if param is not None:
        assert error["param"] == param
        assert param.rpartition(".")[2].rpartition("]")[2] in error["message"]
    assert not server.engine.submitted
    check_alive(server)


@pytest.mark.parametrize("body", BROKEN, ids=lambda b: repr(b[:20]))
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
def test_broken_body(server, path, body):
    error = check(server.http.post(path, content=body))
    assert error["code"] == "invalid_json"
    check_alive(server)


@pytest.mark.parametrize("levels", [900, 990])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_what_json_may_nest_but_nothing_later_can_follow(server, path, levels):
    """About 1,000 levels are read. Half an emoji makes the reader walk through them, a tool the template."""
    deep = '{"a":' * levels + "1" + "}" * levels
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 50_000}}
    for body in (
        '{"messages": [{"role": "user", "content": "\\ud83d"}], "input": "hi", "metadata": DEEP}',
        '{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": DEEP}, "input": "\\u00e9"}',
        json.dumps({"messages": [*HI["messages"], {"role": "assistant", "tool_calls": [call]}]}),
    ):
        response = server.http.post(path, content=body.replace("DEEP", deep))
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            check(response)
    check_alive(server)


def test_streaming_errors_come_before_the_stream(server):
    for path, body in (chat(stream=True, n=0), text(stream=True, prompt=[5] * 300)):
        check(server.post(path, body))


def test_official_client_raises_typed_errors(server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(model="x", messages=[])
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("nope")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", "/v1/nope", 404),
        ("POST", "/v1/chat/completions/x", 404),
        ("GET", CHAT, 405),
        ("PUT", TEXT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/no/such", 404),
    ],
)
def test_unknown_routes_and_methods(server, method, path, status):
    response = server.http.request(method, path)
    check(response, status)
    if status == 405:
        assert response.headers["allow"]


def test_a_missing_v1_is_pointed_out(server):
    error = check(server.http.post("/chat/completions", json=HI), 404)
    assert "/v1/chat/completions" in error["message"]


def test_body_limit():
    with running(max_request_bytes=2000) as server:
        assert server.chat(user="x" * 1000).is_success
        check(server.chat(user="x" * 3000), 413)
        check(server.chat(user="x" * 3_000_000), 413)

        def endless():
            for _ in range(100):
                yield b" " * 1000

        check(server.http.post(CHAT, content=endless()), 413)
        assert server.chat().is_success


def test_unforeseen_errors_are_500_without_a_traceback(server, caplog):
    def broken(prompt, params):
        raise ZeroDivisionError("secret detail")

    for stream in (False, True):
        server.engine.script = broken
        response = server.chat(stream=stream)
        error = check(response, 500)
        assert error["type"] == "server_error"
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in error["message"]
    assert "secret detail" in caplog.text
    server.reset()
    check_alive(server)


@pytest.mark.parametrize("path_body", [chat(), text(), text(prompt=["a", "b", "c"])])
def test_an_engine_error_fails_only_its_request(server, path_body):
    path, body = path_body
    script = server.engine.script
    with httpx.Client(base_url=server.url) as http:
        server.says("abc", fail_after=1)
        response = http.post(path, json=body)
        assert response.headers["x-request-id"] in check(response, 500)["message"]
        server.engine.script = script
        check_alive(server)


def test_an_engine_error_after_the_first_byte_is_an_event(server):
    server.says("abcdef", token_s=0.01, fail_after=3)
    response = server.chat(stream=True)
    assert response.status_code == 200
    last = response.text.rstrip("\n").rpartition("\n\n")[2]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "[DONE]" not in response.text
    with pytest.raises(openai.APIError, match="internal server error"):
        list(server.client().chat.completions.create(model="x", messages=HI["messages"], stream=True))


def test_a_grammar_that_meets_its_limits_is_the_requests_own_fault(server):
    """A 500 would be tried again by every client, three times in vain."""
    server.says("abcdef", fail_after=3, refused=True)
    error = check(server.chat(), 400)
    assert error["code"] == "grammar_limit"
    assert "scripted failure" in error["message"]
    last = server.chat(stream=True).text.rstrip("\n").rpartition("\n\n")[2]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "invalid_request_error"
    server.reset()
    check_alive(server)


def test_request_ids(server):
    assert server.chat().headers["x-request-id"] != server.chat().headers["x-request-id"]
    mine = {"x-request-id": "abc-123"}
    assert server.http.get("/v1/models", headers=mine).headers["x-request-id"] == "abc-123"
    for bad in ("a b", "x" * 200, "{}"):
        assert server.http.get("/v1/models", headers={"x-request-id": bad}).headers["x-request-id"] != bad
