"""The tools of a request and which of them must be called, from OpenAI's chat form."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flint_jax.server.body import Fields, kind_of
from flint_jax.server.errors import bad_request
from flint_jax.server.forced import AUTO, NAMED, NONE, REQUIRED, ToolChoice


def read_tools(fields: Fields) -> tuple[dict[str, Any], ...]:
    """``tools``, each ``{"type": "function", "function": {"name", "description", "parameters"}}``.

    The prompt shows them as they came, but for nulls and marks for a cache, which say nothing to the model.
    """
    tools = []
    for n, tool in enumerate(fields.array("tools") or []):
        where = f"tools[{n}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        kind = tool.get("type", "function") if isinstance(tool, dict) else kind_of(tool)
        if not isinstance(function, dict) or kind != "function":
            found = "has no function object" if kind == "function" else f"is of type {kind!r:.64}"
            raise bad_request(f'{where} {found}; need {{"type": "function", "function": {{...}}}}', where)
        check_function(function, f"{where}.function")
        tools.append(_told(tool) | {"function": _told(function)})
    return tuple(tools)


def _told(value: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in value.items() if v is not None and k != "cache_control"}


def check_function(function: dict[str, Any], where: str, schema: str = "parameters") -> None:
    """Raise ApiError unless ``function`` has a name, and an object or nothing for its schema."""
    if not isinstance(function.get("name"), str) or not function["name"].strip():
        raise bad_request(f"{where}.name must be a non-empty string", f"{where}.name")
    if not isinstance(function.get(schema), dict | None):
        raise bad_request(f"{where}.{schema} must be an object", f"{where}.{schema}")


def read_choice(fields: Fields, tools: Sequence[dict[str, Any]]) -> ToolChoice:
    """``tool_choice``: "auto", "none", "required", or a function under OpenAI's chat or flat spelling."""
    choice = fields.raw("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(fields, tools, choice.get("allowed_tools", choice))
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise fields.error("tool_choice", 'must be {"type": "function", "function": {"name": ...}}')
        return named_choice(fields, tools, name)
    if choice is not None and choice not in (AUTO, NONE, REQUIRED):
        raise fields.error("tool_choice", 'must be "auto", "none", "required" or a function')
    return plain_choice(fields, tools, choice or AUTO)


def _allowed(fields: Fields, tools: Sequence[dict[str, Any]], given: Any) -> ToolChoice:
    """OpenAI's way to offer all tools in the prompt and let only some be called."""
    entries = given.get("tools") if isinstance(given, dict) else None
    if not isinstance(entries, list) or given.get("mode") not in (AUTO, REQUIRED):
        raise fields.error("tool_choice", 'of type "allowed_tools" needs tools and the mode "auto" or "required"')
    names = []
    for entry in entries:
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        names.append(named_choice(fields, tools, str(name)).name)
    return dataclasses.replace(plain_choice(fields, tools, given["mode"]), allowed=tuple(names))


def named_choice(fields: Fields, tools: Sequence[dict[str, Any]], name: str) -> ToolChoice:
    """A call of this function and no other. Raises ApiError when it is not among the tools."""
    if all(t["function"]["name"] != name for t in tools):
        offered = "which is not among the tools" if tools else "but there are no tools"
        raise fields.error("tool_choice", f"names the function {name!r:.80}, {offered}")
    return ToolChoice(NAMED, name)


def plain_choice(fields: Fields, tools: Sequence[dict[str, Any]], mode: str) -> ToolChoice:
    """AUTO, NONE or REQUIRED; without tools there is nothing to choose. Raises ApiError for a call of no tool."""
    if mode == REQUIRED and not tools:
        raise fields.error("tool_choice", "asks for a call, but there are no tools")
    return ToolChoice(mode if tools else NONE)
