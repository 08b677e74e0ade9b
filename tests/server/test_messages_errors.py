"""Anthropic's protocol, what goes wrong: requests that are refused, and streams that break off."""

import re
import threading

import anthropic
import pytest

from tests.server.fake_engine import Script
from tests.server.harness import call, prompt_of, running, tokenizer, wait_until
from tests.server.test_messages import DOCUMENT, HI, WEATHER, events

UNCOUNTED = {"max_tokens", "stop_sequences", "temperature", "output_config", "compaction"}  # mean nothing to a count


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image' cannot be read"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "strange"}]}]}]},
            "messages.0.content.0.content.0: a block of the type 'strange'",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, *HI]}, "content.0.name"),
        (
            {"messages": [{"role": "user", "content": [DOCUMENT | {"source": {"type": "base64", "data": "x"}}]}]},
            "'document' cannot be read",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "search_result", "content": [{"type": "image"}]}]}]},
            "messages.0.content.0.content.0",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124', whose form only Anthropic's models"),
        ({"tools": [{"type": "text_editor_20250728", "name": "e"}]}, "need its input_schema"),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice.name is 'web_search', a tool that Anthropic's servers run",
        ),
        ({"compaction": {"type": "compact"}}, "compaction is not supported"),
        ({"messages": [{"role": "system", "content": []}]}, "none of them says anything"),
        ({"mcp_servers": [{"type": "url", "name": "n", "url": "u"}]}, "mcp_servers is not supported"),
        ({"container": {"skills": []}}, "container is not supported"),
        ({"system": 3}, "system"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"tools": [{"name": ""}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "nope"}, "tools": [WEATHER]}, "nope"),
        ({"tool_choice": {"type": "both"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
def test_bad_requests_have_anthropics_shape(server, fields, words):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path.endswith("tokens") and set(fields) & UNCOUNTED:
            continue
        response = server.post(path, {"max_tokens": 9, "messages": HI} | fields)
        body = response.json()
        assert response.status_code == 400, body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert words in body["error"]["message"]
        assert body["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_context_is_refused_with_the_words_that_agents_look_for(server, stream):
    limit = server.engine.max_model_len
    messages = [{"role": "user", "content": "\x00" * limit}]
    count = server.anthropic().messages.count_tokens(model="x", messages=messages).input_tokens
    with pytest.raises(anthropic.BadRequestError) as refused:
        server.anthropic().messages.create(model="x", max_tokens=9, messages=messages, stream=stream)
    assert refused.value.body["error"]["message"] == f"prompt is too long: {count} tokens > {limit - 1} maximum"


def test_errors_of_the_server_have_the_same_shape():
    with running(loaded=False) as server:
        response = server.post("/v1/messages", {"max_tokens": 5, "messages": HI})
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "overloaded_error"
        assert "retry-after" in response.headers
    with running(strict_model=True) as server:
        with pytest.raises(anthropic.NotFoundError):
            server.anthropic().messages.create(model="other", max_tokens=9, messages=HI)
        assert server.http.get("/v1/messages").json()["type"] == "error"
        assert server.http.post("/v1/messages", content=b"{").json()["error"]["type"] == "invalid_request_error"


def test_an_error_after_the_first_event_ends_the_stream(server):
    server.says("abcdef", fail_after=3, token_s=0.002)
    got = events(server)
    assert got[0]["type"] == "message_start"
    assert (got[-1]["type"], got[-1]["error"]["type"]) == ("error", "api_error")
    assert re.fullmatch("[0-9a-f]{32}", got[-1]["request_id"])  # the request's, as in the log and the header
    with (
        pytest.raises(anthropic.APIStatusError),
        server.anthropic().messages.stream(model="x", max_tokens=9, messages=HI) as stream,
    ):
        stream.until_done()


def test_an_early_failure_is_an_ordinary_error(server):
    server.says("abc", fail_after=0)
    with pytest.raises(anthropic.InternalServerError) as failed:
        server.anthropic().messages.create(model="x", max_tokens=9, messages=HI, stream=True)
    assert failed.value.body["error"]["type"] == "api_error"


def test_a_stream_stopped_before_its_beginning_is_an_ordinary_error(server):
    server.says("abc", gate=threading.Event())
    replies = []
    body = {"max_tokens": 9, "messages": HI, "stream": True}
    thread = threading.Thread(target=lambda: replies.append(server.post("/v1/messages", body)))
    thread.start()
    wait_until(lambda: server.engine.submitted)
    server.engine.abort(server.engine.submitted[0].id)
    thread.join()
    assert (replies[0].status_code, replies[0].json()["error"]["type"]) == (503, "overloaded_error")


def test_a_hang_up_frees_the_slot(server):
    server.says("abc " * 50, token_s=0.005)
    with server.anthropic().messages.stream(model="x", max_tokens=100, messages=HI) as stream:
        next(iter(stream.text_stream))
    wait_until(lambda: server.engine.aborted == 1 and server.engine.idle())


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, {"type": "x"}, 3, {}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_threads_are_refused_in_the_words_that_make_clients_send_everything(server, thread, stream):
    """Ignored, the next request would bring its new messages only, and nobody would notice that the rest is gone."""
    body = {"max_tokens": 9, "messages": HI, "stream": stream}
    reply = server.post("/v1/messages", body | {"thread": thread})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "send the whole conversation" in error["message"]
    assert not server.engine.submitted
    assert server.post("/v1/messages", body | {"thread": None}).status_code == 200
    assert server.post("/v1/messages/count_tokens", body | {"thread": thread}).status_code == 200
    assert "details" not in server.post("/v1/messages", body | {"max_tokens": 0}).json()["error"]


def test_the_official_tool_runner_sends_the_whole_conversation(show):
    """It threads by itself, and falls back on the refusal."""

    @anthropic.beta_tool
    def weather(city: str, days: int = 1) -> str:
        """Tell the weather."""
        return f"sunny in {city} for {days}"

    says = [call("weather", city="Oslo", days="3"), "It is sunny."]
    show.engine.script = lambda prompt, params: Script(tokenizer().encode(says[len(show.engine.submitted)]))
    runner = show.anthropic().beta.messages.tool_runner(model="x", max_tokens=99, messages=HI, tools=[weather])
    replies = [message.content for message in runner]
    assert [block.type for block in replies[0]] == ["tool_use"]
    assert replies[1][0].text == "It is sunny."
    prompt = prompt_of(show)
    assert prompt.startswith(
        '[user]hi[assistant](call weather {"city": "Oslo", "days": 3});[tool]sunny in Oslo for 3{tool'
    )
    thread = show.anthropic().beta.messages.thread(model="x", max_tokens=9)
    with pytest.raises(anthropic.BadRequestError, match="keeps nothing between requests"):
        thread.send("hi")
