"""Sessions go on: nothing that is once in a history makes every later turn fail, in any protocol."""

import json
from pathlib import Path

import anthropic
import openai
import pytest

from flint_jax import chat
from flint_jax.server.foreign import earlier_arguments
from flint_jax.server.memory import ItemMemory
from loaders import load_tokenizer
from tests.server.harness import call, prompt_of, running, sse_events

EMBEDDED = Path(__file__).parents[2] / "loaders" / "embedded" / "flint-tiny"
HI = {"role": "user", "content": "hi"}
PIXEL = "iVBORw0KGgo="
IMAGE = "[image left out: this model reads text only]"
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
FUNCTION = {"type": "function", "name": "look", "parameters": TOOL["input_schema"], "strict": False}
# thinking can be switched, and old thoughts are dropped unless the request says otherwise
SWITCH = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content and clear_thinking is defined and not clear_thinking %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}{% endfor %}{% if not enable_thinking | default(true) %}<think></think>{% endif %}"
)


def items(server, **fields):
    reply = server.post("/v1/responses", {"model": "x", "input": "hi"} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


# -- C1: pictures in a tool's result -----------------------------------------------------------------------------------

ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PIXEL}}


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_in_a_result_of_messages(show, stream):
    turns = [
        HI,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {"at": "x.png"}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}, ANTHROPIC_IMAGE]}
            ],
        },
    ]
    create = show.anthropic().messages.create
    reply = create(model="x", max_tokens=9, messages=turns, tools=[TOOL], stream=stream)
    assert not stream or list(reply)
    assert f"[tool]x\n{IMAGE}" in prompt_of(show)
    turns[-1]["content"][0]["content"] = [PDF]
    create(model="x", max_tokens=9, messages=turns, tools=[TOOL])
    assert "[tool][document left out: this model reads text only]" in prompt_of(show)


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_in_a_result_of_responses(show, stream):
    given = [
        HI,
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}],
        },
    ]
    reply = show.client().responses.create(model="x", input=given, stream=stream)
    assert not stream or list(reply)
    assert f"[tool]{IMAGE}" in prompt_of(show)


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_in_a_result_of_chat(show, stream):
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    function = {"name": "look", "arguments": "{}"}
    turns = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen: "}, picture]},
    ]
    reply = show.client().chat.completions.create(model="x", messages=turns, stream=stream)
    assert not stream or list(reply)
    assert f"[tool]seen: {IMAGE}" in prompt_of(show)


def test_a_users_own_image_is_refused(show):
    chat_image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(openai.BadRequestError):
        show.client().chat.completions.create(model="x", messages=[{"role": "user", "content": [chat_image]}])
    with pytest.raises(anthropic.BadRequestError):
        show.anthropic().messages.create(
            model="x", max_tokens=9, messages=[{"role": "user", "content": [ANTHROPIC_IMAGE]}]
        )
    image = {"type": "input_image", "image_url": "x", "detail": "auto"}
    with pytest.raises(openai.BadRequestError):
        show.client().responses.create(model="x", input=[{"role": "user", "content": [image]}])


# -- C2: arguments of earlier calls ------------------------------------------------------------------------------------

ARGUMENTS = [
    ('{"at": "/sr', {"arguments": '{"at": "/sr'}),
    ("null", {}),
    ("", {}),
    (None, {}),
    ("  ", {}),
    ("[1]", {"arguments": [1]}),
    ("3", {"arguments": 3}),
    ('"x"', {"arguments": "x"}),
    ("[" * 100_000, {"arguments": "[" * 100_000}),
    ('{"at": "x"}', {"at": "x"}),
]


@pytest.mark.parametrize(("given", "told"), ARGUMENTS)
def test_earlier_arguments(given, told):
    assert earlier_arguments(given) == told


@pytest.mark.parametrize(("given", "told"), [(g, t) for g, t in ARGUMENTS if len(g or "") < 99])
def test_earlier_arguments_in_every_protocol(show, given, told):
    words = f"(call look {json.dumps(told)})"
    function = {"name": "look", "arguments": given}
    calls = [{"id": "c", "type": "function", "function": function}]
    turns = [HI, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "c", "content": "r"}]
    assert show.chat(messages=turns).status_code == 200
    assert words in prompt_of(show)
    items(show, input=[HI, {"type": "function_call", "call_id": "c", "name": "look", "arguments": given}])
    assert words in prompt_of(show)
    use = {"type": "tool_use", "id": "c", "name": "look", "input": given}
    reply = show.post("/v1/messages", {"max_tokens": 9, "messages": [HI, {"role": "assistant", "content": [use]}, HI]})
    assert reply.status_code == 200, reply.text
    assert words in prompt_of(show)


# -- C3: items by reference --------------------------------------------------------------------------------------------


def test_a_tool_loop_by_reference(show):
    show.says("<think>hm</think>" + call("look", at="x"))
    first = show.client().responses.create(model="x", input="hi", tools=[FUNCTION])
    thought, called = first.output
    references = [{"type": "item_reference", "id": i.id} for i in (thought, called)]
    output = {"type": "function_call_output", "call_id": called.call_id, "output": "seen"}
    show.says("done")
    second = show.client().responses.create(model="x", input=[HI, *references, output], tools=[FUNCTION])
    by_reference = prompt_of(show)
    assert '[assistant](thought hm)(call look {"at": "x"});[tool]seen' in by_reference
    third = show.client().responses.create(
        model="x", previous_response_id=first.id, input=[output], tools=[FUNCTION], stream=True
    )
    end = list(third)[-1].response
    assert prompt_of(show) == by_reference
    assert end.previous_response_id == first.id
    items(show, input=[HI], previous_response_id=end.id)
    assert prompt_of(show).startswith(by_reference.partition("{tool")[0])
    assert prompt_of(show).endswith("[assistant]done;[user]hi<|assistant|>")
    assert second.store is True


def test_what_was_streamed_is_kept_too(show):
    show.says("one")
    got = sse_events(show.post("/v1/responses", {"input": "hi", "stream": True}).text)
    item = got[-1]["response"]["output"][0]["id"]
    items(show, input=[HI, {"id": item}, HI])  # a reference need not say that it is one
    assert prompt_of(show) == "[user]hi[assistant]one;[user]hi<|assistant|>"


def test_nothing_is_kept_with_store_false(show):
    reply = items(show, store=False)
    assert reply["store"] is False
    assert show.state.memory.item(reply["output"][0]["id"]) is None
    for fields in (
        {"input": [{"type": "item_reference", "id": reply["output"][0]["id"]}]},
        {"input": "hi", "previous_response_id": reply["id"]},
    ):
        refused = show.post("/v1/responses", fields)
        assert refused.status_code == 400
        assert "send the whole conversation as input" in refused.json()["error"]["message"]


def test_the_memory_is_bounded():
    memory, text = ItemMemory(limit=10_000), "x" * 1000
    for n in range(100):
        before = f"r{n - 1}" if n else None
        memory.keep(f"r{n}", before, [{"content": text}], [{"id": f"i{n}", "content": text}])
        assert memory.size <= 10_000
        assert memory.item(f"i{n}") is not None
    assert memory.item("i0") is memory.conversation("r0") is memory.conversation("r99") is None
    memory.keep("a", None, [], [{"id": "ia"}])
    for n in range(20):
        memory.keep(f"s{n}", None, [{"content": text}], [{"id": f"j{n}"}])
        assert memory.item("ia") == {"id": "ia"}  # what is used stays
    assert memory.conversation("a") == [{"id": "ia"}]
    size = memory.size
    memory.keep("big", None, [{"content": "x" * 20_000}], [{"id": "ib"}])
    assert (memory.item("ib"), memory.size) == (None, size)


# -- C4: no retries where they are pointless ---------------------------------------------------------------------------


def test_clients_are_told_not_to_try_again():
    with running(api_keys=("k",)) as server:
        for path in ("/v1/messages", "/v1/chat/completions", "/v1/responses"):
            assert server.post(path, {}).headers["x-should-retry"] == "false"
            reply = server.post(path, {}, headers={"x-api-key": "k"})
            assert (reply.status_code, reply.headers["x-should-retry"]) == (400, "false")
        with pytest.raises(anthropic.AuthenticationError):
            server.anthropic(max_retries=5).messages.create(model="x", max_tokens=9, messages=[HI])


def test_a_full_queue_and_a_loading_model_may_be_tried_again():
    with running(loaded=False) as server:
        reply = server.chat()
        assert reply.status_code == 503
        assert "x-should-retry" not in reply.headers


# -- C5: thoughts of earlier turns -------------------------------------------------------------------------------------


def turns(*thoughts):
    for n, thought in enumerate(thoughts):
        yield {"role": "user", "content": f"q{n}"}
        block = {"type": "thinking", "thinking": thought, "signature": "s"}
        yield {"role": "assistant", "content": [block, {"type": "text", "text": f"a{n}"}]}
    yield HI


@pytest.mark.parametrize(
    ("edits", "shown"),
    [
        ([], ""),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], "ABC"),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}], "BC"),
        ([{"type": "clear_thinking_20251015"}], "C"),  # Anthropic's default is the last one
        ([{"type": "clear_tool_uses_20250919"}], ""),
    ],
)
def test_context_management(edits, shown):
    with running(template=SWITCH) as server:
        body = {"max_tokens": 9, "messages": [*turns("A", "B", "C")], "context_management": {"edits": edits}}
        for path in ("/v1/messages?beta=true", "/v1/messages/count_tokens"):
            sent = body if "count" not in path else {k: v for k, v in body.items() if k != "max_tokens"}
            assert server.post(path, sent | {"thinking": {"type": "adaptive"}}).status_code == 200
        assert "".join(t for t in "ABC" if f"({t})" in prompt_of(server)) == shown


def test_context_management_that_is_malformed(show):
    for edits in ([3], [{"type": "clear_thinking_20251015", "keep": "some"}]):
        reply = show.post("/v1/messages", {"max_tokens": 9, "messages": [HI], "context_management": {"edits": edits}})
        assert reply.status_code == 400
        assert "context_management.edits[0]" in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_omitted_thoughts_come_back_all_the_same(show, stream):
    show.says("<think>hm</think>yes")
    thinking = {"type": "adaptive", "display": "omitted"}
    ask = {"model": "x", "max_tokens": 20, "messages": [HI], "thinking": thinking}
    if stream:
        with show.anthropic().messages.stream(**ask) as got:
            assert not [e for e in got if e.type == "content_block_delta" and e.delta.type == "thinking_delta"]
            message = got.get_final_message()
    else:
        message = show.anthropic().messages.create(**ask)
    thought, text = message.content
    assert (thought.thinking, text.text) == ("", "yes")
    blocks = [b.model_dump(exclude_none=True) for b in message.content]
    ask["messages"] = [HI, {"role": "assistant", "content": blocks}, HI]
    show.anthropic().messages.create(**ask)
    assert "[assistant]yes(thought hm);" in prompt_of(show)


def test_a_kept_thought_keeps_the_prefix():
    """With the embedded model's own template: the next prompt begins with the last one and all that was said."""
    folder = EMBEDDED
    tokenizer = load_tokenizer(folder)
    template = chat.ChatTemplate.from_tokenizer(tokenizer)
    said = "<think>A greeting.</think>Hello!"
    answer = {"role": "assistant", "content": "Hello!", "reasoning_content": "A greeting."}
    first = chat.prepare_chat(tokenizer, template, [HI]).ids
    whole = first + tokenizer.encode(said)
    for kwargs, kept in (({"clear_thinking": False}, True), ({}, False)):
        then = chat.prepare_chat(tokenizer, template, [HI, answer, HI], chat_template_kwargs=kwargs).ids
        assert (then[: len(whole)] == whole) is kept


# -- C6: summaries -----------------------------------------------------------------------------------------------------


def test_the_thought_as_its_summary(show):
    show.says("<think>hm hm</think>yes")
    reasoning = {"effort": "high", "summary": "auto"}
    whole = show.client().responses.create(model="x", input="hi", reasoning=reasoning)
    thought = whole.output[0]
    assert [(p.type, p.text) for p in thought.summary] == [("summary_text", "hm hm")]
    got = list(show.client().responses.create(model="x", input="hi", reasoning=reasoning, stream=True))
    kinds = [e.type.removeprefix("response.reasoning_summary_") for e in got if "reasoning_summary" in e.type]
    assert kinds[0] == "part.added"
    assert kinds[-2:] == ["text.done", "part.done"]
    deltas = [e for e in got if e.type == "response.reasoning_summary_text.delta"]
    assert "".join(e.delta for e in deltas) == "hm hm"
    assert {e.summary_index for e in deltas} == {0}
    assert got[-1].response.output[0].summary == thought.summary
    assert not [e for e in got if e.type.startswith("response.reasoning_text")]
    items(show, input=[HI, *(i.model_dump(exclude_none=True) for i in whole.output), HI], reasoning=reasoning)
    assert "(thought hm hm);" in prompt_of(show)


@pytest.mark.parametrize("reasoning", [{}, {"summary": None}, {"summary": "none"}])
def test_no_summary_unless_asked_for(server, reasoning):
    server.says("<think>hm</think>yes")
    thought = items(server, reasoning=reasoning)["output"][0]
    assert (thought["summary"], thought["content"][0]["text"]) == ([], "hm")


def test_an_unknown_kind_of_summary(server):
    reply = server.post("/v1/responses", {"input": "hi", "reasoning": {"summary": "long"}})
    assert reply.json()["error"]["param"] == "reasoning.summary"


# -- C7: messages think when asked to ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "settings", "thinks"),
    [
        ({}, {}, False),
        ({"thinking": {"type": "adaptive"}}, {}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {}, True),
        ({"thinking": {"type": "disabled"}}, {}, False),
        ({"output_config": {"effort": "high"}}, {}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {}, True),
        ({}, {"enable_thinking": True}, True),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": False}, False),
    ],
)
def test_messages_think_when_asked_to(fields, settings, thinks):
    with running(template=SWITCH, template_kwargs=settings) as server:
        reply = server.post("/v1/messages", {"max_tokens": 12, "messages": [HI]} | fields)
        assert reply.status_code == 200, reply.text
        assert prompt_of(server).endswith("<think></think>") is not thinks
        assert server.chat().status_code == 200  # the other protocols think unless told not to
        assert prompt_of(server).endswith("<think></think>") is (settings.get("enable_thinking") is False)


# -- C8, C9: probes ----------------------------------------------------------------------------------------------------


def test_codex_finds_its_catalogue_and_may_say_nothing(show):
    assert show.http.get("/v1/models?client_version=1.0.0").json()["models"] == []
    assert show.client().models.list().data[0].id == "flint-test"
    assert items(show, input=[], instructions="Be brief.")["status"] == "completed"
    assert prompt_of(show) == "[system]Be brief.[user]<|assistant|>"


@pytest.mark.parametrize("open_metrics", [False, True])
def test_what_needs_no_key(open_metrics):
    with running(api_keys=("k",), open_metrics=open_metrics) as server:
        found = {p: server.http.get(p).status_code for p in ("/health", "/ping", "/metrics", "/v1/models")}
    assert found == {"/health": 200, "/ping": 200, "/metrics": 200 if open_metrics else 401, "/v1/models": 401}
