"""Tools, thoughts and forced output in chat completions: what goes to the model, what comes back, in both modes."""

import dataclasses
import json
import logging

import openai
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flint_jax.engine import Event
from flint_jax.grammar import Calls, Lexer, State, Tags, Tool, collect
from flint_jax.server.choices import Choice, TextOptions
from flint_jax.server.forced import NAMED, NONE, REQUIRED
from tests.server.fake_engine import FakeEngine
from tests.server.harness import call, running, sse_data, tokenizer

HELLO = [{"role": "user", "content": "hi"}]


def tool(name, **properties):
    parameters = {"type": "object", "properties": {k: {"type": v} for k, v in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


WEATHER = tool("weather", city="string", days="integer")
TOOLS = [WEATHER, tool("list_branches"), tool("write_file", path="string", text="string")]
LOOK = "<think>Hm.</think>Look:" + call("weather", city="Oslo", days="3")


def choice_of(server, **fields):
    response = server.chat(**({"tools": TOOLS} | fields))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def deltas(server, **fields):
    """(deltas, finish_reason) of a stream, every chunk checked for what strict clients refuse."""
    *data, done = sse_data(server.chat(stream=True, **({"tools": TOOLS} | fields)).text)
    assert done == "[DONE]"
    choices = [json.loads(d)["choices"][0] for d in data]
    begun = set()
    for choice in choices:
        assert None not in choice["delta"].values()
        for part in choice["delta"].get("tool_calls", []):
            first = part["index"] not in begun
            begun.add(part["index"])
            assert set(part) == ({"index", "id", "type", "function"} if first else {"index", "function"})
            assert set(part["function"]) == ({"name", "arguments"} if first else {"arguments"})
    return [c["delta"] for c in choices], choices[-1]["finish_reason"]


def joined(parts):
    """The message that a client puts together from deltas, in the form of a whole one."""
    message = {"role": parts[0]["role"], "content": "".join(p.get("content", "") for p in parts)}
    thought = "".join(p.get("reasoning", "") for p in parts)
    assert thought == "".join(p.get("reasoning_content", "") for p in parts)
    if thought:
        message |= {"reasoning": thought, "reasoning_content": thought}
    calls = {}
    for part in (c for p in parts for c in p.get("tool_calls", [])):
        known = calls.setdefault(part["index"], {"type": "function", "function": {"arguments": ""}})
        known["function"]["name"] = part["function"].get("name", known["function"].get("name"))
        known["function"]["arguments"] += part["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def same(whole):
    """A whole message as ``joined`` would give it."""
    message = whole | {"content": whole["content"] or ""}
    if "tool_calls" in whole:
        message["tool_calls"] = [{k: v for k, v in c.items() if k != "id"} for c in whole["tool_calls"]]
    return message


OUTPUTS = {
    "text": ("plain", None, "plain", [], "stop"),
    "thought and call": (LOOK, "Hm.", "Look:", [("weather", {"city": "Oslo", "days": 3})], "tool_calls"),
    "no arguments": (call("list_branches"), None, None, [("list_branches", {})], "tool_calls"),
    "call ends the thought": (
        "<think>Need it." + call("weather", city="a.py"),
        "Need it.",
        None,
        [("weather", {"city": "a.py"})],
        "tool_calls",
    ),
    "three calls of one tool": (
        "\n".join(call("weather", city=c) for c in ("Oslo", "Quito", "Hanoi")),
        None,
        None,
        [("weather", {"city": c}) for c in ("Oslo", "Quito", "Hanoi")],
        "tool_calls",
    ),
    "characters": (
        call("weather", city='Zürich 北京 😀 "q" \\ \n'),
        None,
        None,
        [("weather", {"city": 'Zürich 北京 😀 "q" \\ \n'})],
        "tool_calls",
    ),
    "text after a call": (
        "a " + call("weather", city="b") + " c",
        None,
        "a  c",
        [("weather", {"city": "b"})],
        "tool_calls",
    ),
    "unknown tool": (call("nope", x="1") + "!", None, call("nope", x="1") + "!", [], "stop"),
    "cut": (call("weather", city="Par")[:-24], None, call("weather", city="Par")[:-24], [], "stop"),
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_message_in_both_modes(server, name, burst):
    output, reasoning, content, calls, reason = OUTPUTS[name]
    server.says(output, burst=burst)
    choice = choice_of(server)
    message = choice["message"]
    assert message["content"] == content
    assert message.get("reasoning") == message.get("reasoning_content") == reasoning
    assert [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])
    ] == calls
    assert ("tool_calls" in message) is bool(calls)
    assert choice["finish_reason"] == reason
    assert len({c["id"] for c in message.get("tool_calls", [])}) == len(calls)
    parts, streamed_reason = deltas(server)
    assert parts[0] == {"role": "assistant", "content": ""}
    assert joined(parts) == same(message)
    assert streamed_reason == reason


def test_arguments_go_out_unescaped(server):
    server.says(call("weather", city="Zürich 😀"))
    assert "Zürich 😀" in server.chat(tools=TOOLS).text
    assert "\\u" not in server.chat(tools=TOOLS, stream=True).text


def test_a_reply_cut_by_length_says_so(server):
    server.says(call("weather", city="a" * 99))
    choice = choice_of(server, max_tokens=20)
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]  # what was cut is no call
    assert choice["message"]["content"].startswith("<tool_call>weather<arg_key>city</arg_key><arg_value>a")


def test_parallel_calls_can_be_refused(server):
    server.says(call("weather", city="a") + call("weather", city="b"))
    assert len(choice_of(server)["message"]["tool_calls"]) == 2
    (only,) = choice_of(server, parallel_tool_calls=False)["message"]["tool_calls"]
    assert json.loads(only["function"]["arguments"]) == {"city": "a"}


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_no_calls_where_none_may_come(server, fields):
    server.says("a" + call("weather", city="b"))
    choice = choice_of(server, **fields)
    assert choice["message"] == {"role": "assistant", "content": "a" + call("weather", city="b")}
    assert choice["finish_reason"] == "stop"


def test_only_allowed_tools_are_called(server):
    server.says(call("weather", city="b"))
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "list_branches"}}]}
    message = choice_of(server, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})["message"]
    assert "tool_calls" not in message


def test_a_call_of_an_unknown_tool_is_logged(server, caplog):
    server.says(call("nope"))
    with caplog.at_level(logging.WARNING, "flint_jax.server"):
        choice_of(server)
    assert "unknown_tool" in caplog.text
    assert "'nope'" in caplog.text


def test_tools_stay_in_the_prompt_unless_excluded():
    template = "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}<|user|>{{ messages[0].content }}<|assistant|>"
    system = tokenizer().added_tokens["<|system|>"]
    for exclude in (False, True):
        engine = FakeEngine(max_model_len=4096)
        with running(template=template, engine=engine, exclude_tools_when_none=exclude) as server:
            for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}, {"tool_choice": "none"}):
                assert server.chat(tools=TOOLS, **choice).is_success
            assert [system in r.prompt for r in server.engine.submitted] == [True, True, True, not exclude]


# -- official client ---------------------------------------------------------------------------------------------------


def test_stream_helper_puts_calls_together(server):
    server.says(LOOK + call("list_branches"))
    with server.client().chat.completions.stream(model="x", messages=HELLO, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("weather", {"city": "Oslo", "days": 3}),
        ("list_branches", {}),
    ]
    assert message.content == "Look:"


class _Answer(pydantic.BaseModel):
    city: str
    days: int


def constrained(server, seen):
    """Let ``server`` hold output to rules: here they are only written down, the script obeys them anyway."""

    def constrain(forced):
        seen.append(forced)
        return ("rules", forced) if forced.must else None

    server.state.served = dataclasses.replace(server.state.served, constrain=constrain)


def test_typed_parsing_and_forced_calls():
    seen = []
    with running() as server:
        constrained(server, seen)
        client = server.client()
        server.says('<think>x</think>{"city": "Oslo", "days": 3}')
        parsed = client.chat.completions.parse(model="x", messages=HELLO, response_format=_Answer)
        assert parsed.choices[0].message.parsed == _Answer(city="Oslo", days=3)
        assert seen[-1].format["json_schema"]["schema"]["properties"]["days"]["type"] == "integer"
        assert server.engine.submitted[-1].constraint == ("rules", seen[-1])
        answer = client.responses.parse(model="x", input="hi", text_format=_Answer)
        assert answer.output_parsed == _Answer(city="Oslo", days=3)
        assert seen[-1].format["json_schema"]["schema"]["properties"]["days"]["type"] == "integer"
        message = server.anthropic().messages.parse(
            model="x", max_tokens=50, messages=HELLO, output_format=_Answer, thinking={"type": "adaptive"}
        )
        assert message.parsed_output == _Answer(city="Oslo", days=3)

        server.says(call("weather", city="Oslo"))
        typed = openai.pydantic_function_tool(_Answer, name="weather")
        with pytest.raises(pydantic.ValidationError):  # the script leaves a required argument out
            client.chat.completions.parse(model="x", messages=HELLO, tools=[typed], tool_choice="required")
        assert (seen[-1].choice.mode, seen[-1].tools[0]["function"]["strict"]) == (REQUIRED, True)

        forced = choice_of(server, tool_choice="required")
        assert (forced["message"]["content"], forced["finish_reason"]) == ("", "tool_calls")
        named = {"type": "function", "function": {"name": "weather"}}
        forced = choice_of(server, tool_choice=named, parallel_tool_calls=False)
        assert (forced["message"]["content"], forced["finish_reason"]) == ("", "stop")
        assert (seen[-1].choice.mode, len(seen[-1].tools), seen[-1].parallel) == (NAMED, 1, False)

        choice_of(server, tool_choice="none")
        assert (seen[-1].choice.mode, seen[-1].tools) == (NONE, ())
        assert server.engine.submitted[-1].constraint is None
        server.chat(chat_template_kwargs={"enable_thinking": True}, guided_regex="a+")
        assert (seen[-1].structured.kind, seen[-1].structured.value) == ("regex", "a+")
        assert (seen[-1].start, seen[-1].thinking) == (State.REASONING, True)
        server.chat(reasoning_effort="none")
        assert (seen[-1].start, seen[-1].thinking) == (State.CONTENT, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "tools": TOOLS}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["b"]}, "guided_choice"),
    ],
)
def test_what_cannot_be_held_is_refused(server, fields, param):
    response = server.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_schema", "name": "x", "schema": {}}])
def test_responses_are_told_their_own_name_of_the_format(server, form):
    response = server.post("/v1/responses", {"model": "x", "input": "hi", "text": {"format": form}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "text.format"
    assert "response_format" not in response.text


@pytest.mark.parametrize("fields", ["output_config.format", "output_format"])
def test_messages_are_told_their_own_name_of_the_format(server, fields):
    outer, _, inner = fields.partition(".")
    form = {"type": "json_schema", "schema": {"type": "object"}}
    ask = {"model": "x", "max_tokens": 5, "messages": HELLO, outer: {inner: form} if inner else form}
    response = server.post("/v1/messages", ask)
    assert response.status_code == 400
    assert fields in response.text
    assert "response_format" not in response.text


# -- thinking ----------------------------------------------------------------------------------------------------------

ASK = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>{{ '\n' }}"
TEMPLATES = {  # name -> (template, end of a prompt that does not think)
    "opens": (ASK + "<think>", "<|assistant|>\n<think></think>"),
    "opens a line": (ASK + "<think>{{ '\n' }}", "<|assistant|>\n<think>\n</think>"),
    "ignores": (ASK, "<|assistant|>\n<think></think>"),
    "heeds": (ASK + "{% if not enable_thinking %}<think></think>.{% endif %}", "<|assistant|>\n<think></think>."),
    "says": ("{% if thinking %}<|system|>think{% endif %}" + ASK, "<|user|>hi<|assistant|>\n"),
}
OFF = [
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}},
    {"enable_thinking": False},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_thinking_can_be_switched_off_with_every_template(name):
    template, end = TEMPLATES[name]
    with running(template=template) as server:
        for off in OFF:
            assert server.chat(**off).is_success
            prompt = server.engine.submitted[-1].prompt
            assert tokenizer().decode(prompt).endswith(end), off
            assert list(prompt) == tokenizer().encode(tokenizer().decode(prompt))
        assert server.chat(reasoning_effort="low").is_success
        assert "</think>" not in tokenizer().decode(server.engine.submitted[-1].prompt)


def test_tags_are_text_when_thinking_is_off(server):
    server.says("a<think>b</think>c")
    message = server.chat(reasoning_effort="none").json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "a<think>b</think>c"}


def test_a_request_overrides_the_servers_switch():
    with running(template=TEMPLATES["opens"][0], template_kwargs={"enable_thinking": False}) as server:
        server.chat()
        server.chat(chat_template_kwargs={"thinking": True})
        ends = [tokenizer().decode(r.prompt).endswith("</think>") for r in server.engine.submitted]
        assert ends == [True, False]


def test_log_probabilities_of_a_hidden_thought_are_hidden(server):
    server.says("<think>abc</think>de")
    shown = server.chat(logprobs=True, include_reasoning=False).json()["choices"][0]["logprobs"]["content"]
    assert "".join(t["token"] for t in shown) == "de"
    streamed = server.chat(logprobs=True, include_reasoning=False, stream=True).text
    assert '"token":"a"' not in streamed
    assert len(server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]) > len(shown)


# -- the prompt --------------------------------------------------------------------------------------------------------


def test_the_final_message_can_be_continued(server):
    messages = [*HELLO, {"role": "assistant", "content": "The answer is "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert server.chat(messages=messages, **options).is_success
    assert tokenizer().decode(server.engine.submitted[0].prompt).endswith("<|assistant|>\nThe answer is ")
    for bad in (
        {"continue_final_message": True},
        options | {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}]},
    ):
        response = server.chat(**({"messages": messages} | bad))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")


def test_a_history_of_calls_and_results_renders(server):
    history = [
        {"role": "developer", "content": "D"},
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "r",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"days": 3}'}},
                {"type": "function", "function": {"name": "weather", "arguments": {"days": 4}}},
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "a",
            "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
        },
        {"role": "tool", "content": "z"},
        {"role": "system", "content": "S"},
        *HELLO,
    ]
    assert server.chat(messages=history, tools=TOOLS).is_success
    prompt = tokenizer().decode(server.engine.submitted[0].prompt)
    assert prompt == (
        "<|system|>\nD<|user|>\nhi<|assistant|>\n<|observation|>\nxy<|observation|>\nz<|system|>\nS<|user|>\nhi<|assistant|>\n"
    )


# -- any output, any split ---------------------------------------------------------------------------------------------

_WORDS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(
        "weather",
        "list_branches",
        "city",
        "days",
        "3",
        " ",
        "\n",
        "ab",
        "🦜",
        "<th",
        "<arg",
        '"',
        call("weather", city="x"),
    ),
]


def new_choice(calls=Calls.ALL, start=State.CONTENT, stop=()):
    tags = Tags.of(tokenizer().added_tokens)
    lexer = Lexer(start, tags, [Tool.of(t) for t in TOOLS], calls=calls, new_id=lambda: "id")
    return Choice(0, tokenizer(), TextOptions(stop=stop), lexer=lexer, tags={**tags.block, **tags.argument})


def test_a_stop_string_in_a_call_leaves_no_call():
    output = call("weather", city="/srv/a/b")
    choice = new_choice(stop=("/a",))
    pieces = [choice.push(Event("r", (token,))) for token in tokenizer().encode("<think>/a</think>" + output)]
    message = collect(d for p in pieces for d in p.deltas)
    assert (message.reasoning, message.calls) == ("/a", ())
    assert message.content == "<tool_call>weather<arg_key>city</arg_key><arg_value>/srv"
    assert (choice.finish_reason, choice.calls) == ("stop", 0)


def test_one_call_ends_the_output_where_no_parallel_calls_may_come(server):
    server.says(call("weather", city="a") * 50, burst=1)
    fields = {"parallel_tool_calls": False, "max_tokens": 60}
    choice = choice_of(server, **fields)
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    parts, reason = deltas(server, **fields)
    assert (joined(parts), reason) == (same(choice["message"]), "tool_calls")


def test_half_a_character_stays_on_its_side_of_a_tag():
    half = tokenizer().encode("🦜")[:2]
    tokens = [*tokenizer().encode("<think>a"), *half, *tokenizer().encode("</think>b"), *half]
    message, _, _ = said(tokens, [1] * 40, Calls.ALL, State.CONTENT, ())
    assert (message.reasoning, message.content) == ("a\ufffd", "b\ufffd")


def said(tokens, sizes, calls, start, stop):
    """The message that one choice gives when its tokens arrive in groups."""
    choice = new_choice(calls, start, stop)
    deltas, at = [], 0
    for size in sizes:
        if choice.done or at >= len(tokens):
            break
        deltas += choice.push(Event("r", tuple(tokens[at : at + size]))).deltas
        at += size
    if not choice.done:
        deltas += choice.push(Event("r", tuple(tokens[at:]), finish_reason="stop")).deltas
    return collect(deltas), choice.finish_reason, choice.reasoning_tokens


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    words=st.lists(st.sampled_from(_WORDS), max_size=16),
    cut=st.integers(0, 60),
    sizes=st.lists(st.integers(1, 7), min_size=80, max_size=80),
    calls=st.sampled_from(list(Calls)),
    start=st.sampled_from([State.REASONING, State.CONTENT]),
    stop=st.lists(st.sampled_from(["ab", "b\n", "🦜a", "<th"]), max_size=2),
)
def test_any_output_in_any_pieces_gives_the_same_message(words, cut, sizes, calls, start, stop):
    tokens = [i for w in words for i in tokenizer().encode(w)][: cut or None]
    options = calls, start, tuple(stop)
    whole = said(tokens, [1000], *options)
    assert said(tokens, sizes, *options) == whole
    assert said(tokens, [1] * 200, *options) == whole
    for each in whole[0].calls:
        assert isinstance(json.loads(each.arguments), dict)
