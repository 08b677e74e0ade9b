"""OpenAI's Responses protocol: items in, items and events out, through the official client and on the wire."""

import json
import re

import openai
import pytest

from tests.server.harness import call, prompt_of, sse_events, tokenizer

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tell the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edit files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SPACE = {"type": "namespace", "name": "mcp__docs", "description": "", "tools": [WEATHER | {"name": "find"}]}
TOOLS = [WEATHER, PATCH, SPACE, {"type": "web_search"}]


def ask(server, **fields):
    response = server.post("/v1/responses", {"model": "x", "input": "hi"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(server, **fields):
    response = server.post("/v1/responses", {"model": "x", "input": "hi", "stream": True} | fields)
    assert response.status_code == 200, response.text
    return sse_events(response.text)


# -- replies -----------------------------------------------------------------------------------------------------------


def test_whole_response_through_the_official_client(server):
    server.says("<think>Hm.</think>Look:" + call("weather", city="Oslo", days="3"))
    server.engine.cached_tokens = 2
    reply = server.client().responses.create(
        model="flint-test", input="hi", tools=TOOLS, instructions="Be kind", metadata={"a": "b"}
    )
    thought, message, use = reply.output
    assert (reply.object, reply.status, reply.model, reply.error) == ("response", "completed", "flint-test", None)
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Hm.", [])
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert reply.output_text == "Look:"
    assert (use.type, use.name, use.arguments) == ("function_call", "weather", '{"city": "Oslo", "days": 3}')
    assert use.call_id.startswith("call_")
    assert use.id != use.call_id
    usage, request = reply.usage, server.engine.submitted[0]
    assert usage.input_tokens == len(request.prompt)
    assert usage.input_tokens_details.cached_tokens == 2
    assert usage.output_tokens == len(request.script.tokens)
    assert usage.output_tokens_details.reasoning_tokens == len(tokenizer().encode("<think>Hm.</think>"))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (reply.instructions, reply.metadata, reply.tool_choice) == ("Be kind", {"a": "b"}, "auto")
    assert [t.type for t in reply.tools] == ["function", "custom", "namespace", "web_search"]


OUTPUTS = [
    "Hello, wörld",
    "",
    "<think>a</think>",
    "<think>a \n b</think>\n\nc",
    call("weather", city='Zürich "北京" 😀\n', days="x"),
    "<think>t</think>one " + call("weather", city="a") + "\n" + call("weather", days="2") + " two",
    "<think>t" + call("weather", city="cut")[:-25],
    call("other", x="1") + "after",
    call("patch", input="*** a\n+b") + call("mcp__docs__find", city="x"),
]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("burst", [1, 1000])
def test_streamed_response_is_the_whole_one(server, output, burst):
    server.says(output, burst=burst)
    whole = ask(server, tools=TOOLS)
    got = events(server, tools=TOOLS)
    assert got[-1]["type"] == "response.completed"

    def without_ids(response):
        items = [{k: v for k, v in i.items() if k not in ("id", "call_id")} for i in response["output"]]
        return {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at")} | {"output": items}

    assert without_ids(got[-1]["response"]) == without_ids(whole)
    with server.client().responses.stream(model="x", input="hi", tools=TOOLS) as stream:
        final = stream.get_final_response()
    calls = [i.arguments for i in final.output if i.type == "function_call"]
    assert calls == [i["arguments"] for i in whole["output"] if i["type"] == "function_call"]
    assert final.output_text == "".join(
        p["text"] for i in whole["output"] if i["type"] == "message" for p in i["content"]
    )


def test_order_of_events(server):
    server.says("<think>ab</think>cd" + call("weather", city="Oslo"))
    got = events(server, tools=[WEATHER])
    assert [e["sequence_number"] for e in got] == list(range(len(got)))
    kinds = [e["type"].removeprefix("response.") for e in got]
    squeezed = [k for n, k in enumerate(kinds) if not (n and kinds[n - 1] == k)]
    assert squeezed == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    joined = {}
    for event in got:
        if event["type"].endswith(".delta"):
            joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
    assert list(joined.values()) == ["ab", "cd", '{"city": "Oslo"}']
    done = [e["item"] for e in got if e["type"] == "response.output_item.done"]
    added = [e["item"] for e in got if e["type"] == "response.output_item.added"]
    assert got[-1]["response"]["output"] == done
    assert [i["id"] for i in added] == [i["id"] for i in done] == list(joined)
    assert [e["output_index"] for e in got if e["type"] == "response.output_item.done"] == [0, 1, 2]
    assert got[0]["response"]["output"] == []
    assert got[0]["response"]["status"] == "in_progress"


def test_a_free_text_tool_gets_its_text(server):
    server.says(call("patch", input='*** "a"\n+b') + call("mcp__docs__find", city="x"))
    patch, find = ask(server, tools=TOOLS)["output"]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", '*** "a"\n+b')
    assert (find["type"], find["namespace"], find["name"]) == ("function_call", "mcp__docs", "find")
    told = [e for e in events(server, tools=TOOLS) if "custom_tool_call_input" in e["type"]]
    assert [e.get("delta", e.get("input")) for e in told] == ['*** "a"\n+b'] * 2


def test_cut_response_is_incomplete(server):
    server.says("abcdefgh")
    reply = ask(server, max_output_tokens=2)
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert events(server, max_output_tokens=2)[-1]["type"] == "response.incomplete"


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_whole_agent_conversation_reaches_the_template(show):
    show.says("<think>thought</think>said" + call("weather", days="3"))
    first = ask(show, tools=[WEATHER], include=["reasoning.encrypted_content"])
    thought, said, use = first["output"]
    del thought["content"]  # what clients do that keep nothing but the sealed form
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]}
    given = [
        {"role": "developer", "content": "D"},
        user,
        {"type": "reasoning", "id": "rs_0", "summary": [], "encrypted_content": "gAAA of another server"},
        thought,
        said,
        use,
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x\ny"},
        {"type": "function_call_output", "call_id": use["call_id"], "output": "sunny"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"type": "message", "role": "assistant", "content": []},
        {"role": "user", "content": "go on"},
    ]
    ask(show, instructions="I", input=given, tools=TOOLS)
    said, _, tools = prompt_of(show).partition("{tool ")
    assert said == (
        "[system]I[system]D[user]one"
        '[assistant]said(thought thought)(call weather {"days": 3})(call patch {"input": "x\\ny"});'
        "[tool]sunny[tool]done[assistant];[user]go on"
    )
    assert re.findall(r'{"name": "(\w+)"', tools) == ["weather", "patch", "mcp__docs__find"]


def test_what_another_server_did_is_told_as_far_as_it_is_text(show):
    """A thought of which only the summary is there, and a call with its result in one item."""
    parts = [{"type": "summary_text", "text": t} for t in ("one", "two")]
    thought = {"type": "reasoning", "id": "r", "summary": parts, "encrypted_content": "gAAA"}
    done = {"type": "mcp_call", "id": "m1", "server_label": "s", "name": "find", "arguments": '{"q": 1}', "output": "F"}
    failed = done | {"id": "m2", "arguments": "", "output": None, "error": "no route"}
    ask(show, input=[thought, done, failed])
    assert prompt_of(show) == (
        '[assistant](thought one\n\ntwo)(call find {"q": 1});[tool]F'
        "[assistant](call find {});[tool]no route<|assistant|>"
    )
    ask(
        show,
        input=[thought | {"content": [{"type": "reasoning_text", "text": "own"}]}, {"role": "user", "content": "x"}],
    )
    assert prompt_of(show) == "[assistant](thought own);[user]x<|assistant|>"


def test_a_thought_after_text_begins_another_turn(show):
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    said = {"role": "assistant", "content": "a"}
    ask(show, input=[thought, said, thought, said])
    assert prompt_of(show) == "[assistant]a(thought t);[assistant]a(thought t);<|assistant|>"


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, True),
        ({"reasoning": {"effort": "none"}}, False),
    ],
)
def test_thinking_switch(show, fields, thinks):
    ask(show, **fields)
    assert prompt_of(show).endswith("<think></think>") is not thinks


def test_tool_choice(server):
    server.says("x" + call("weather", city="a") + call("weather", city="b"))

    def calls(**fields):
        return sum(i["type"] == "function_call" for i in ask(server, tools=[WEATHER], **fields)["output"])

    assert calls(tool_choice="auto") == 2
    assert calls(parallel_tool_calls=False) == 1
    assert calls(tool_choice="none") == 0
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    assert calls(tool_choice=allowed) == 2


def test_tools_may_come_with_the_input(show):
    """Of a search for tools, or added in mid-conversation: left out, the model could not call them."""
    items = [
        {"role": "user", "content": "q"},
        {"type": "additional_tools", "role": "developer", "tools": [WEATHER, WEATHER | {"name": "later"}]},
        {"type": "tool_search_output", "call_id": "s", "tools": [SPACE], "status": "completed"},
        {"type": "tool_search_output", "call_id": "s", "tools": None},
    ]
    show.says(call("mcp__docs__find", city="x"))
    (found,) = ask(show, input=items, tools=[WEATHER])["output"]
    assert (found["namespace"], found["name"]) == ("mcp__docs", "find")
    assert re.findall(r'{tool {"name": "(\w+)"', prompt_of(show)) == ["weather", "later", "mcp__docs__find"]


def test_quiet_fields(server):
    quiet = {"store": True, "service_tier": "auto", "truncation": "auto", "prompt_cache_key": "k", "user": "u"}
    assert ask(server, **quiet, text={"verbosity": "low"}, previous_response_id=None)["store"] is True


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": {}}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "strange"}]}, "input[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}, {"role": "user", "content": "q"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "image"}]}]}, "input[0].summary[0]"),
        ({"tools": [WEATHER, {"type": "local_shell"}]}, "tools[1]"),
        ({"input": [{"type": "additional_tools", "tools": 3}]}, "input[0].tools"),
        ({"input": [{"type": "additional_tools", "tools": [WEATHER, {"type": "function"}]}]}, "input[0].tools[1].name"),
        ({"tools": [SPACE | {"tools": [{"type": "apply_patch"}]}]}, "tools[0].tools[0]"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"instructions": 3}, "instructions"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [SPACE | {"tools": [{"type": "function", "name": 3}]}]}, "tools[0].tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "nope"}, "tools": [WEATHER]}, "tool_choice"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
)
def test_bad_requests(server, fields, param):
    response = server.post("/v1/responses", {"input": "hi"} | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_full_context_is_refused_before_any_event(server):
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().responses.create(model="x", input="\x00" * server.engine.max_model_len, stream=True)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "input"


def test_an_error_after_the_first_event_fails_the_response(server):
    server.says("abcdef", fail_after=3, token_s=0.002)
    got = events(server)
    assert [e["sequence_number"] for e in got] == list(range(len(got)))
    assert got[-1]["type"] == "response.failed"
    assert got[-1]["response"]["status"] == "failed"
    assert got[-1]["response"]["error"]["code"] == "server_error"


def test_kept_responses_are_not_shown(server):
    reply = server.http.get("/v1/responses/resp_1")
    assert reply.status_code == 404
    assert json.loads(reply.text)["error"]["code"] == "unknown_route"
