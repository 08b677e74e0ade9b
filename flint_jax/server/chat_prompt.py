"""From the messages, tools and template arguments of a chat request to a prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flint_jax.chat import prepare_chat
from flint_jax.server.body import Fields, kind_of
from flint_jax.server.errors import bad_request
from flint_jax.server.running import off_loop
from flint_jax.server.state import ServedModel
from flint_jax.server.thinking import prompt_opens_thought

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """Token ids, and whether they end inside an open thought."""

    ids: list[int]
    opens_thought: bool


async def read_prompt(fields: Fields, served: ServedModel, default_kwargs: Mapping[str, Any]) -> ChatPrompt:
    """Check, render and encode. Raises ApiError or RequestError; a template's refusal is quoted."""
    messages = _messages(fields)
    tools = read_tools(fields)
    documents = fields.array("documents")
    # the more particular wins: server's default, effort, the template's own arguments
    kwargs = {**default_kwargs, **_effort(fields), **(fields.object("chat_template_kwargs") or {})}
    generation_prompt = fields.boolean("add_generation_prompt", True)
    fields.unsupported("continue_final_message")
    fields.unsupported("chat_template", hint="give --chat-template when you start the server")
    if served.template is None:
        raise bad_request(
            "this checkpoint has no chat template; start the server with --chat-template FILE, or use /v1/completions",
            "messages",
            "no_chat_template",
        )

    def work() -> ChatPrompt:
        prompt = prepare_chat(
            served.tokenizer,
            served.template,
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=generation_prompt,
            chat_template_kwargs=kwargs,
        )
        return ChatPrompt(prompt.ids, prompt_opens_thought(served.tokenizer, prompt.ids))

    prompt = await off_loop(_size(messages) + _size(tools), work)
    if not prompt.ids:
        raise fields.error("messages", "give an empty prompt")
    return prompt


def _effort(fields: Fields) -> dict[str, Any]:
    """Template arguments for ``reasoning_effort``; "none" switches thinking off."""
    effort = fields.string("reasoning_effort")
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise fields.error("reasoning_effort", f"is {effort!r:.40}; need one of {', '.join(EFFORTS)}")
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def _messages(fields: Fields) -> list[dict[str, Any]]:
    if not fields.has("messages"):
        raise bad_request("messages is missing", "messages", "missing_required_parameter")
    messages = fields.array("messages")
    if not messages:
        raise fields.error("messages", "is empty; need at least one message")
    for n, message in enumerate(messages):
        where = f"messages[{n}]"
        if not isinstance(message, dict):
            raise bad_request(f"{where} is {kind_of(message)}; need an object", where, "invalid_type")
        role = message.get("role")
        if role not in ROLES:
            raise bad_request(f"{where}.role is {role!r:.40}; need one of {', '.join(ROLES)}", f"{where}.role")
    return messages


def read_tools(fields: Fields) -> list[dict[str, Any]] | None:
    """The tools to show to the model: none for ``tool_choice: none``, so that it does not call what may not be called.

    Forcing a call is refused: without a grammar the model could answer with text all the same.
    """
    tools = fields.array("tools") or []
    names = []
    for n, tool in enumerate(tools):
        where = f"tools[{n}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise bad_request(f'{where} must be {{"type": "function", "function": {{...}}}}', where)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise bad_request(f"{where}.function.name must be a non-empty string", f"{where}.function.name")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise bad_request(f"{where}.function.parameters must be an object", f"{where}.function.parameters")
        names.append(function["name"])
    choice = fields.raw("tool_choice")
    if choice in (None, "auto"):
        return tools or None
    if choice == "none":
        return None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise fields.error("tool_choice", 'must be {"type": "function", "function": {"name": ...}}')
        if name not in names:
            raise fields.error("tool_choice", f"names the function {name!r:.80}, which is not among the tools")
    elif choice != "required":
        raise fields.error("tool_choice", 'must be "auto", "none", "required" or a function')
    if not tools:
        raise fields.error("tool_choice", "asks for a call, but there are no tools")
    raise fields.error("tool_choice", 'can only be "auto" or "none" on this server', "unsupported_parameter")


def _size(value: Any) -> int:
    """Characters in all strings of a JSON value, roughly what encoding it costs."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list):
        return sum(map(_size, value))
    return 0
