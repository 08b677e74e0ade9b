"""A conversation in the one form that all protocols are brought to, and the prompt that it becomes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from flint_jax import chat
from flint_jax.errors import RequestError
from flint_jax.grammar import State, start_state, thinking_enabled
from flint_jax.server.body import Fields, kind_of
from flint_jax.server.errors import bad_request
from flint_jax.server.forced import NONE, ToolChoice
from flint_jax.server.history import goes_on, in_call_order, read_message
from flint_jax.server.lengths import check_text
from flint_jax.server.running import look, off_loop
from flint_jax.server.settings import ServerSettings
from flint_jax.server.state import ServedModel
from flint_jax.server.thinking import chat_kwargs, close_thought, layered
from flint_jax.server.tools import read_choice, read_tools

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What the model is to answer.

    messages, tools: in the form of OpenAI's chat completions. choice, parallel: which calls may come.
    kwargs: the template's arguments. defaults: those of the protocol for a request that says nothing, where the
    template has a switch for thinking; the server's own (--default-chat-template-kwargs) go before them.
    param: the request's field that the messages came from, for errors.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()
    choice: ToolChoice = dataclasses.field(default_factory=ToolChoice)
    parallel: bool = True
    documents: Sequence[Mapping[str, Any]] | None = None
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    param: str = "messages"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids, where in the grammar the output begins, and whether the model may think."""

    ids: Sequence[int]
    start: State
    thinking: bool


def read_conversation(fields: Fields) -> Conversation:
    """The conversation of a chat completion. Raises ApiError."""
    tools = read_tools(fields)
    fields.unsupported("chat_template", hint="give --chat-template when you start the server")
    messages = _messages(fields)
    prefix = goes_on(messages)
    return Conversation(
        messages=messages,
        tools=tools,
        choice=read_choice(fields, tools),
        parallel=fields.boolean("parallel_tool_calls", True),
        documents=fields.array("documents"),
        kwargs=chat_kwargs(fields),
        add_generation_prompt=fields.boolean("add_generation_prompt", not prefix),
        continue_final_message=fields.boolean("continue_final_message", prefix),
    )


async def render(
    conversation: Conversation, served: ServedModel, settings: ServerSettings, *, wanted: int | None = None
) -> Prompt:
    """The prompt. wanted: tokens of the context that must be left for the answer; None takes a prompt of any length,
    to be counted. Raises ApiError or RequestError; a template's refusal is quoted."""
    if served.template is None:
        raise bad_request(
            "this checkpoint has no chat template; start the server with --chat-template FILE, or use /v1/completions",
            conversation.param,
            "no_chat_template",
        )
    defaults = conversation.defaults if served.template.has_thinking_switch else {}
    kwargs = layered(defaults, settings.template_kwargs, conversation.kwargs)
    thinking = thinking_enabled(kwargs)
    fits = functools.partial(check_text, served, wanted=wanted or 0, param=conversation.param, look=look)
    hidden = settings.exclude_tools_when_none and conversation.choice.mode == NONE

    def work() -> Prompt:
        prompt = chat.prepare_chat(
            served.tokenizer,
            served.template,
            in_call_order(conversation.messages),
            tools=None if hidden else conversation.tools,
            documents=conversation.documents,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            chat_template_kwargs=kwargs,
            accept=None if wanted is None else fits,
        )
        if not thinking:
            begins = conversation.add_generation_prompt
            prompt = close_thought(served.tokenizer, served.template, prompt, begins_turn=begins)
        return Prompt(prompt.ids, start_state(prompt.text), thinking)

    try:
        prompt = await off_loop(_size(conversation.messages) + _size(conversation.tools), work)
    except RequestError as e:
        if (e.param or "").startswith("messages") and conversation.param != "messages":
            raise bad_request(str(e), conversation.param, e.code) from None  # the client sent no messages
        raise
    if not prompt.ids:
        raise bad_request(f"{conversation.param} gives an empty prompt", conversation.param)
    return prompt


def _messages(fields: Fields) -> list[dict[str, Any]]:
    if not fields.has("messages"):
        raise bad_request("messages is missing", "messages", "missing_required_parameter")
    messages = fields.array("messages")
    if not messages:
        raise fields.error("messages", "is empty; need at least one message")
    out = []
    for n, message in enumerate(messages):
        where = f"messages[{n}]"
        if not isinstance(message, dict):
            raise bad_request(f"{where} is {kind_of(message)}; need an object", where, "invalid_type")
        role = message.get("role")
        if role not in ROLES:
            raise bad_request(f"{where}.role is {role!r:.40}; need one of {', '.join(ROLES)}", f"{where}.role")
        out.append(read_message(message, where))
    return out


def _size(value: Any) -> int:
    """Characters in all strings of a JSON value, roughly what encoding it costs."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return 0
