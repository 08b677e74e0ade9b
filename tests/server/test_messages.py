"""Anthropic's protocol: requests in, messages and events out, errors, through the official client and on the wire."""

import json
import re
import threading

import anthropic
import pytest

from tests.server.harness import call, prompt_of, running, sse_events

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "weather",
    "description": "Tell the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "cache_control": {"type": "ephemeral"},
}


def ask(server, **fields):
    response = server.post("/v1/messages", {"model": "x", "max_tokens": 100, "messages": HI} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(server, **fields):
    """Events of a streamed message, without pings."""
    body = {"model": "x", "max_tokens": 100, "messages": HI, "stream": True} | fields
    response = server.post("/v1/messages?beta=true", body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [e for e in sse_events(response.text) if e["type"] != "ping"]


# -- replies -----------------------------------------------------------------------------------------------------------


def test_whole_message_through_the_official_client(server):
    server.says("<think>Hm.</think>Let me look." + call("weather", city="Oslo", days="3"))
    server.engine.cached_tokens = 2
    message = server.anthropic().messages.create(
        model="flint-test", max_tokens=99, messages=HI, tools=[WEATHER], thinking={"type": "adaptive"}
    )
    thought, text, use = message.content
    assert (message.type, message.role, message.model) == ("message", "assistant", "flint-test")
    assert re.fullmatch("[0-9a-f]{32}", message._request_id)
    assert (thought.type, thought.thinking) == ("thinking", "Hm.")
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Oslo", "days": 3})
    assert use.id.startswith("toolu_")
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert message.usage.input_tokens == len(server.engine.submitted[0].prompt) - 2
    assert message.usage.cache_read_input_tokens == 2
    assert message.usage.output_tokens == len(server.engine.submitted[0].script.tokens)


OUTPUTS = [
    "Hello, wörld",
    "",
    "<think>a</think>",
    "<think>a \n b</think>\n\nc",
    call("weather", city='Zürich "北京" 😀\n', days="x"),
    "<think>t</think>one " + call("weather", city="a") + "\n" + call("weather", days="2") + " two",
    "<think>t" + call("weather", city="cut")[:-25],
    call("other", x="1") + "after",
    call("weather", days='"\\ud83d"'),  # half a character, which UTF-8 cannot hold
    "a<think>b</think>c<think>d</think>",
]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("burst", [1, 1000])
def test_streamed_message_is_the_whole_one(server, output, burst):
    server.says(output, burst=burst)
    whole = ask(server, tools=[WEATHER])
    with server.anthropic().messages.stream(model="x", max_tokens=100, messages=HI, tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    assert final.stop_reason == whole["stop_reason"]
    assert final.usage.output_tokens == whole["usage"]["output_tokens"]

    def shown(blocks):
        return [{k: v for k, v in b.items() if k in ("type", "text", "thinking", "name", "input")} for b in blocks]

    assert shown([b.to_dict() for b in final.content]) == shown(whole["content"])


def test_order_of_events(server):
    server.says("<think>ab</think>cd" + call("weather", city="Oslo") + call("weather"))
    got = events(server, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 1024})
    assert got[0]["type"] == "message_start"
    assert got[0]["message"]["content"] == []
    assert got[0]["message"]["stop_reason"] is None
    assert got[0]["message"]["usage"]["input_tokens"] == len(server.engine.submitted[0].prompt)
    assert [e["type"] for e in got[-2:]] == ["message_delta", "message_stop"]
    assert got[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    kinds, deltas, opened = [], [], None
    for event in got[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert (opened, event["index"]) == (None, len(kinds))
                opened = event["index"]
                kinds.append(event["content_block"]["type"])
                deltas.append({})
            case "content_block_delta":
                assert event["index"] == opened
                kind, text = event["delta"].items()
                deltas[-1][kind[1]] = deltas[-1].get(kind[1], "") + text[1]
            case "content_block_stop":
                assert event["index"] == opened
                opened = None
    assert opened is None
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    thought, *others = deltas
    assert thought["thinking_delta"] == "ab"
    assert thought["signature_delta"]
    assert others == [{"text_delta": "cd"}, {"input_json_delta": '{"city": "Oslo"}'}, {"input_json_delta": "{}"}]


def test_reasons_to_stop(server):
    server.says("one two three")
    assert ask(server)["stop_reason"] == "end_turn"
    assert ask(server, max_tokens=2)["stop_reason"] == "max_tokens"
    stopped = ask(server, stop_sequences=["two"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert stopped["content"] == [{"type": "text", "text": "one "}]
    server.says(call("weather", city="a" * 50))
    assert ask(server, tools=[WEATHER], max_tokens=12)["stop_reason"] == "max_tokens"


def test_silence_begins_the_message_and_pings():
    gate = threading.Event()
    with running(keep_alive_s=0.02) as server:
        server.says("ab", gate=gate)
        body = {"max_tokens": 9, "messages": HI, "stream": True}
        with server.http.stream("POST", "/v1/messages", json=body) as response:
            lines = response.iter_lines()
            names = []
            while names.count("event: ping") < 3:
                line = next(lines)
                names += [line] if line.startswith("event:") else []
            gate.set()
            rest = [line for line in lines if line.startswith("event:")]
    assert names[0] == "event: message_start"
    assert (names + rest).count("event: message_start") == 1
    assert rest[-1] == "event: message_stop"


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_whole_agent_conversation_reaches_the_template(show):
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "zero"},
                {"type": "tool_result", "content": "early"},
                {"type": "text", "text": "one"},
                {"type": "text", "text": "two"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "xx"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"days": 3}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sunny", "cache_control": {"type": "x"}},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}],
                },
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"},
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ]
    extra = {"metadata": {"user_id": "u"}, "context_management": {"edits": []}, "service_tier": "auto"}
    ask(show, messages=messages, system=system, tools=[WEATHER], **extra)
    tool = json.dumps({"name": "weather", "description": "Tell the weather", "parameters": WEATHER["input_schema"]})
    assert prompt_of(show) == (
        "[system]Be kind.\nBe brief.[user]zero[tool]early[user]one\ntwo"
        '[assistant]ok(thought hm)(call weather {"days": 3})(call weather {});'
        "[tool]sunny[tool]Error: no[tool][user]go on{tool " + tool + "}<|assistant|>"
    )


DOCUMENT = {"type": "document", "title": "T", "context": "C", "citations": {"enabled": True}}
INNER = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (DOCUMENT | {"source": {"type": "text", "media_type": "text/plain", "data": "D"}}, "T\nC\nD"),
        (DOCUMENT | {"source": {"type": "content", "content": INNER}}, "T\nC\none\ntwo"),
        ({"type": "document", "title": None, "source": {"type": "content", "content": "D"}}, "D"),
        ({"type": "search_result", "title": "T", "source": "http://x", "content": INNER}, "T\nhttp://x\none\ntwo"),
        ({"type": "tool_reference", "tool_name": "weather"}, "weather"),
    ],
)
def test_all_that_is_text_in_a_block_is_told(show, block, text):
    ask(show, messages=[{"role": "user", "content": [block]}])
    assert prompt_of(show) == f"[user]{text}<|assistant|>"
    ask(show, messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]}])
    assert prompt_of(show) == f"[tool]{text}<|assistant|>"


def test_blocks_and_messages_that_only_set_something(show):
    """A summary of what came before is text; where another model went on, and settings alone, are nothing to read."""
    summary = [{"type": "compaction", "content": "So far: x.", "encrypted_content": "e"}]
    said = [{"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}, {"type": "text", "text": "ok"}]
    turns = [
        {"role": "assistant", "content": summary},
        {"role": "user", "content": [{"type": "compaction", "content": None}, {"type": "text", "text": "go"}]},
        {"role": "assistant", "content": said},
        {"role": "system", "content": [], "output_config": {"effort": "low"}},
        *HI,
    ]
    ask(show, messages=turns)
    assert prompt_of(show) == "[assistant]So far: x.;[user]\ngo[assistant]ok;[user]hi<|assistant|>"


def test_a_reminder_beside_a_result_begins_no_turn(show):
    result = {"type": "tool_result", "tool_use_id": "t", "content": "sunny"}
    reminder = {"type": "text", "text": "<system-reminder>Be quick.</system-reminder>"}
    ask(show, messages=[*HI, {"role": "user", "content": [result, reminder, {"type": "text", "text": "go on"}]}])
    assert prompt_of(show) == (
        "[user]hi[tool]sunny\n<system-reminder>Be quick.</system-reminder>[user]go on<|assistant|>"
    )


def test_models_in_anthropics_form(server):
    models = server.anthropic().models.list().data
    assert [m.id for m in models] == ["flint-test", "alias/two"]
    assert server.anthropic().models.retrieve("alias/two").max_input_tokens == server.engine.max_model_len
    assert server.http.get("/v1/models").json()["object"] == "list"


def test_system_as_text(show):
    ask(show, system="S")
    assert prompt_of(show) == "[system]S[user]hi<|assistant|>"


def test_a_last_assistant_turn_is_continued(show):
    ask(show, messages=[*HI, {"role": "assistant", "content": "The answer is ("}])
    assert prompt_of(show) == "[user]hi[assistant]The answer is ("


def test_tool_choice(server):
    server.says("x" + call("weather", city="a") + call("weather", city="b"))

    def calls(**choice):
        return sum(b["type"] == "tool_use" for b in ask(server, tools=[WEATHER], tool_choice=choice)["content"])

    assert calls(type="auto") == 2
    assert calls(type="auto", disable_parallel_tool_use=True) == 1
    assert calls(type="none") == 0


def test_server_tools_are_left_out(show):
    ask(show, tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, WEATHER])
    assert prompt_of(show).count("{tool ") == 1
    ask(show, tools=[WEATHER | {"type": "bash_20250124", "name": "bash"}], mcp_servers=[], container=None)
    assert prompt_of(show).count('{tool {"name": "bash"') == 1


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"output_config": {"effort": "high"}}, True),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "none"}}, False),
    ],
)
def test_thinking_switch(show, fields, thinks):
    ask(show, **fields)
    assert prompt_of(show).endswith("<think></think>") is not thinks


def test_count_tokens_is_exact(server):
    body = {"model": "x", "messages": HI, "system": "S", "tools": [WEATHER], "thinking": {"type": "disabled"}}
    counted = server.anthropic().messages.count_tokens(**body)
    ask(server, **body)
    assert counted.input_tokens == len(server.engine.submitted[0].prompt)


def test_anthropic_headers(server):
    with running(api_keys=("k",)) as locked:
        body = {"max_tokens": 5, "messages": HI}
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
        assert locked.post("/v1/messages", body, headers=headers).status_code == 200
        assert locked.anthropic(api_key="k").messages.create(model="x", **body).content[0].type == "text"
        assert locked.anthropic(api_key=None, auth_token="k").messages.create(model="x", **body)
        with pytest.raises(anthropic.AuthenticationError) as refused:
            locked.anthropic(api_key="wrong").messages.create(model="x", **body)
        assert refused.value.body["error"]["type"] == "authentication_error"
