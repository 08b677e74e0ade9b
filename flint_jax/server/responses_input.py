"""From the request of OpenAI's Responses protocol to a conversation in the chat form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flint_jax.server.body import Fields, kind_of, log_once
from flint_jax.server.chat_prompt import Conversation
from flint_jax.server.errors import bad_request
from flint_jax.server.foreign import earlier_arguments, left_out
from flint_jax.server.memory import Item, ItemMemory
from flint_jax.server.sealing import unsealed
from flint_jax.server.thinking import layered, reasoning_kwargs
from flint_jax.server.tools import check_function, read_choice

# What other servers did on their own account; nothing of it is for the model to read.
_SKIPPED = frozenset(
    {
        "additional_tools",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
# Holds a whole conversation, encrypted by the server that made it: left out, the model would answer without it.
_UNREADABLE = frozenset({"compaction", "compaction_summary", "context_compaction"})
# Tools that the client runs and whose form only OpenAI's own models know.
_UNTOLD = frozenset({"apply_patch", "computer", "computer_use_preview", "local_shell", "shell"})
_GONE = (
    "which this server does not keep (any more): it keeps the latest ones in memory, and none of requests that say "
    '"store": false; send the whole conversation as input (in the AI SDK: providerOptions.openai.store = false)'
)


@dataclasses.dataclass(frozen=True)
class ToolName:
    """How the client knows a function: its name, its namespace if it has one, and whether it takes free text."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclasses.dataclass(frozen=True)
class Input:
    """The input of a request. Each item comes with its place in the request, for errors.

    before: the items of the conversation that ``previous`` (a response's id) ends. given: those of this request.
    """

    previous: str | None
    before: list[Item]
    given: list[tuple[Item, str]]

    @property
    def items(self) -> list[tuple[Item, str]]:
        """All of them in order."""
        return [*((item, "previous_response_id") for item in self.before), *self.given]


def read_input(fields: Fields, memory: ItemMemory) -> Input:
    """The input with references replaced by the items that they name. Raises ApiError.

    An empty array is a user who says nothing: Codex begins with one.
    """
    previous, before = fields.string("previous_response_id"), []
    if previous is not None:
        found = memory.conversation(previous)
        if found is None:
            raise fields.error("previous_response_id", f"is {previous!r:.80}, {_GONE}")
        before = found
    given = fields.raw("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise fields.error("input", "must be a string or an array of items")
    out: list[tuple[Item, str]] = []
    for n, item in enumerate(given or [{"role": "user", "content": ""}]):
        where = f"input[{n}]"
        if not isinstance(item, dict):
            raise bad_request(f"{where} is {kind_of(item)}; need an object", where, "invalid_type")
        if item.get("type") == "item_reference" or (item.keys() == {"id"}):  # a reference need not say its type
            name = item.get("id")
            found = memory.item(name) if isinstance(name, str) else None
            if found is None:
                raise bad_request(f"{where} refers to the item {name!r:.80}, {_GONE}", where)
            item = found
        out.append((item, where))
    return Input(previous, before, out)


def read_conversation(fields: Fields, given: Input) -> tuple[Conversation, dict[str, ToolName]]:
    """The conversation, and for each function that the model sees what the client calls it. Raises ApiError."""
    tools, names = _tools(fields, given)
    kwargs = layered(reasoning_kwargs(fields), fields.object("chat_template_kwargs") or {})
    conversation = Conversation(
        messages=_messages(fields, given),
        tools=tuple(tools),
        choice=read_choice(fields, tools),
        parallel=fields.boolean("parallel_tool_calls", True),
        kwargs=kwargs,
        param="input",
    )
    return conversation, names


def read_format(fields: Fields) -> dict[str, Any] | None:
    """``text.format`` as a ``response_format``; None for plain text."""
    options = Fields(fields.object("text") or {}, prefix="text.")
    given = options.object("format")
    kind = given.get("type") if given else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind, "param": "text.format"}
    if kind != "json_schema" or not isinstance(given.get("schema"), dict):
        raise options.error("format", 'must be of type text, json_object, or json_schema with a "schema"')
    return {
        "type": kind,
        "param": "text.format",
        "json_schema": {k: given[k] for k in ("name", "schema", "strict") if k in given},
    }


# -- tools -----------------------------------------------------------------------------------------------------------


def _tools(fields: Fields, given: Input) -> tuple[list[dict[str, Any]], dict[str, ToolName]]:
    tools: list[dict[str, Any]] = []
    names: dict[str, ToolName] = {}

    def add(tool: Any, where: str, namespace: str | None) -> None:
        if not isinstance(tool, dict):
            raise bad_request(f"{where} is {kind_of(tool)}; need an object", where, "invalid_type")
        kind = tool.get("type")
        if kind == "namespace" and namespace is None and isinstance(tool.get("tools"), list):
            for n, inner in enumerate(tool["tools"]):
                add(inner, f"{where}.tools[{n}]", str(tool.get("name") or ""))
            return
        if isinstance(kind, str) and kind in _UNTOLD:
            raise bad_request(
                f"{where} is of the type {kind!r}, whose form only OpenAI's models know; need a function", where
            )
        if kind not in ("function", "custom"):
            log_once(f"leaving out tools of the type {kind!r:.64}: OpenAI's servers run them, this one cannot")
            return
        function = tool.get("function", tool)  # the chat form, which some clients send here too
        function = function if isinstance(function, dict) else tool
        check_function(function, where)
        known = ToolName(function["name"], namespace, kind == "custom")
        shown = _shown(known)
        if shown in names and where != "tools" and not where.startswith("tools["):  # the same again
            return
        names[shown] = known
        tools.append({"type": "function", "function": _function(function, shown, known.custom)})

    for where, offered in (("tools", fields.array("tools") or []), *_later_tools(given)):
        for n, tool in enumerate(offered):
            add(tool, f"{where}[{n}]", None)
    return tools, names


def _later_tools(given: Input) -> list[tuple[str, list[Any]]]:
    """Tools that the input brings along: the model sees all of them from the beginning."""
    found = []
    for item, where in given.items:
        if item.get("type") in ("additional_tools", "tool_search_output"):
            offered = item.get("tools")
            if not isinstance(offered, list | None):
                raise bad_request(f"{where}.tools is {kind_of(offered)}; need an array", f"{where}.tools")
            found.append((f"{where}.tools", offered or []))
    return found


def _shown(known: ToolName) -> str:
    """The name under which the model sees it; two namespaces may have functions of one name."""
    if not known.namespace:
        return known.name
    return known.namespace.rstrip("_") + "__" + known.name


def _function(tool: Mapping[str, Any], name: str, custom: bool) -> dict[str, Any]:
    description = tool.get("description")
    function = {"name": name, "description": description if isinstance(description, str) else ""}
    if not custom:
        function["parameters"] = tool.get("parameters") or {"type": "object", "properties": {}}
        return function | ({"strict": True} if tool.get("strict") else {})
    rules = tool.get("format")
    if isinstance(rules, dict) and rules.get("definition"):
        function["description"] += f"\n\nThe input follows this {rules.get('syntax')} grammar:\n{rules['definition']}"
    text = {"type": "string", "description": "the whole input, as it is"}
    return function | {"parameters": {"type": "object", "properties": {"input": text}, "required": ["input"]}}


# -- input -----------------------------------------------------------------------------------------------------------


def _messages(fields: Fields, given: Input) -> list[dict[str, Any]]:
    turns = _Turns()
    instructions = fields.string("instructions")
    if instructions:
        turns.messages.append({"role": "system", "content": instructions})
    for item, where in given.items:
        turns.add(item, where)
    turns.close()
    return turns.messages


class _Turns:
    """Puts the items of one assistant turn, its thought, text and calls, back together into one message."""

    def __init__(self):
        self.messages: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or "message"
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._thought(item, where)
            case "function_call" | "custom_tool_call":
                self._call(item, where, kind == "custom_tool_call")
            case "mcp_call":  # another server's, but all of it is text
                self._call(item | {"call_id": item.get("id")}, where, False)
                self._output(item.get("id"), item.get("output") or item.get("error"), f"{where}.output")
            case "function_call_output" | "custom_tool_call_output":
                self._output(item.get("call_id"), item.get("output"), f"{where}.output")
            case str() if kind in _UNREADABLE:
                raise bad_request(
                    f"{where} is a {kind}, the earlier conversation in a form that only the server that made it can "
                    "read; go on there, or begin a new conversation here",
                    where,
                )
            case str() if kind in _SKIPPED:
                log_once(f"skipping input items of the type {kind}")
            case _:
                raise bad_request(f"{where}.type is {kind!r:.64}, which this server does not know", f"{where}.type")

    def close(self) -> None:
        """End the assistant's turn."""
        if self._open is not None:
            self.messages.append(self._open)
            self._open = None

    def _turn(self) -> dict[str, Any]:
        if self._open is None:
            self._open = {"role": "assistant", "content": ""}
        return self._open

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role, content = item.get("role"), _text(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._turn()["content"] += content
            return
        if role not in ("user", "system", "developer"):
            raise bad_request(
                f"{where}.role is {role!r:.40}; need user, assistant, system or developer", f"{where}.role"
            )
        self.close()
        self.messages.append({"role": role, "content": content})

    def _thought(self, item: Mapping[str, Any], where: str) -> None:
        if self._open is not None and (self._open["content"] or "tool_calls" in self._open):
            self.close()
        thought = _text(item.get("content"), f"{where}.content") or unsealed(item.get("encrypted_content"))
        thought = thought or _text(item.get("summary"), f"{where}.summary", "\n\n")  # all there is of others' thoughts
        if thought:
            turn = self._turn()
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought

    def _call(self, item: Mapping[str, Any], where: str, custom: bool) -> None:
        name = item.get("name")
        if not isinstance(name, str):
            raise bad_request(f"{where}.name is {kind_of(name)}; need a string", f"{where}.name", "invalid_type")
        arguments = {"input": str(item.get("input") or "")} if custom else earlier_arguments(item.get("arguments"))
        space = item.get("namespace")
        name = _shown(ToolName(name, space if isinstance(space, str) else None))
        function = {"name": name, "arguments": arguments}
        call = {"id": str(item.get("call_id")), "type": "function", "function": function}
        self._turn().setdefault("tool_calls", []).append(call)

    def _output(self, call_id: Any, output: Any, where: str) -> None:
        self.close()
        self.messages.append(
            {"role": "tool", "tool_call_id": str(call_id), "content": _text(output, where, result=True)}
        )


def _text(content: Any, where: str, between: str = "", *, result: bool = False) -> str:
    """The text of a string, of an array of text parts, or of nothing.

    result: it is a tool's, where a line stands for what cannot be read.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{where} is {kind_of(content)}; need a string or an array of parts", where, "invalid_type")
    texts = []
    for n, part in enumerate(content):
        line = left_out(part) if result else None
        if line is not None:
            texts.append(line)
            continue
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"):
            raise bad_request(f"{where}[{n}] is of type {kind!r:.64}; this model takes text only", f"{where}[{n}]")
        if not isinstance(text, str):
            raise bad_request(f"{where}[{n}].text must be a string", f"{where}[{n}].text", "invalid_type")
        texts.append(text)
    return between.join(texts)
