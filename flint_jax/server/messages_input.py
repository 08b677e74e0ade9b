"""From the request of Anthropic's protocol to a conversation in OpenAI's chat form."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from flint_jax.server.body import Fields, kind_of, log_once
from flint_jax.server.chat_prompt import Conversation
from flint_jax.server.errors import ApiError, bad_request
from flint_jax.server.forced import AUTO, NONE, REQUIRED, ToolChoice
from flint_jax.server.foreign import earlier_arguments, left_out
from flint_jax.server.old_thoughts import keep_last, kept_turns
from flint_jax.server.sealing import unsealed
from flint_jax.server.thinking import effort_kwargs, layered, switch, type_kwargs
from flint_jax.server.tools import check_function, named_choice, plain_choice

# Claude Code's first system block: it changes with every request, and with it all that follows would be another prefix.
_BILLING = "x-anthropic-billing-header:"
_REMINDER = "<system-reminder>"
# Tools that the client runs and whose form only Anthropic's own models know.
_UNTOLD = re.compile(r"(bash|text_editor|memory|computer|computer_toolset|browser_toolset)_\d+")
_SAYS_ERROR = re.compile(r"\W*(tool_use_)?error", re.IGNORECASE)


def read_conversation(fields: Fields) -> Conversation:
    """The conversation of a Messages request. A last assistant turn of text is one to go on with.

    Raises ApiError that names the block.
    """
    fields.unsupported("mcp_servers", hint="this server calls no others; connect them to the client")
    fields.unsupported("container", hint="this server runs no code and has no skills")
    tools, left_out = _tools(fields)
    choice, parallel = _choice(fields, tools, left_out)
    system = _system(fields.raw("system"))
    messages = _messages(fields)
    old_thoughts = keep_last(messages, kept_turns(fields))
    last = messages[-1]
    goes_on = last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")
    return Conversation(
        messages=[*([{"role": "system", "content": system}] if system else []), *messages],
        tools=tools,
        choice=choice,
        parallel=parallel,
        kwargs=layered(
            old_thoughts,
            type_kwargs(fields),
            effort_kwargs(output_config(fields), "effort"),
            fields.object("chat_template_kwargs") or {},
        ),
        # Anthropic's default: who does not ask for thoughts, a title's 12 tokens for instance, wants none
        defaults={} if fields.has("thinking") or fields.has("thinking_token_budget") else switch(False),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )


def refuse_thread(fields: Fields) -> None:
    """Raise ApiError for a conversation of which another server is to hold the beginning.

    Anthropic's SDK (its tool runner) and Claude Code know this code: they send all of it again and leave threads alone.
    Ignored, the next request would bring its new messages only, and the model would have lost everything before them.
    """
    if fields.has("thread"):
        error = bad_request(
            "thread is not supported: this server keeps nothing between requests; send the whole conversation",
            "thread",
            "unsupported_parameter",
        )
        error.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise error


def omits_thoughts(fields: Fields) -> bool:
    """Whether ``thinking.display`` asks for thoughts without their text. Raises ApiError for another word."""
    given = fields.raw("thinking")
    if not isinstance(given, dict):
        return False
    options = Fields(given, prefix="thinking.")
    display = options.string("display", "summarized")
    if display not in ("summarized", "omitted"):
        raise options.error("display", f"is {display!r:.40}; need summarized or omitted")
    return display == "omitted"


def output_config(fields: Fields) -> Fields:
    """``output_config``: effort and format."""
    return Fields(fields.object("output_config") or {}, prefix="output_config.")


def read_format(fields: Fields) -> dict[str, Any] | None:
    """The format of ``output_config`` or of the older ``output_format``, as a ``response_format``."""
    options = output_config(fields)
    given = options.object("format")
    source, name = (options, "format") if given else (fields, "output_format")
    given = given or fields.object(name)
    if not given:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise source.error(name, 'must be {"type": "json_schema", "schema": {...}}')
    inner = {"name": "output", "schema": given["schema"], "strict": True}
    return {"type": "json_schema", "param": f"{source.prefix}{name}", "json_schema": inner}


# -- tools -----------------------------------------------------------------------------------------------------------


def _tools(fields: Fields) -> tuple[tuple[dict[str, Any], ...], frozenset[str]]:
    """(tools, names of those that are left out)."""
    tools, left_out = [], set()
    for n, tool in enumerate(fields.array("tools") or []):
        where = f"tools[{n}]"
        if not isinstance(tool, dict):
            raise bad_request(f"{where} is {kind_of(tool)}; need an object", where, "invalid_type")
        kind = tool.get("type")
        if kind not in (None, "custom") and "input_schema" not in tool:
            if isinstance(kind, str) and _UNTOLD.fullmatch(kind):
                raise bad_request(
                    f"{where} is of the type {kind!r}, whose form only Anthropic's models know; need its input_schema",
                    where,
                )
            log_once(f"leaving out tools of the type {kind!r:.64}: Anthropic's servers run them, this one cannot")
            left_out.add(str(tool.get("name")))
            continue
        check_function(tool, where, "input_schema")
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        function["parameters"] = tool.get("input_schema") or {"type": "object", "properties": {}}
        if tool.get("strict"):
            function["strict"] = True
        tools.append({"type": "function", "function": function})
    return tuple(tools), frozenset(left_out)


def _choice(fields: Fields, tools: Sequence[dict[str, Any]], left_out: Collection[str]) -> tuple[ToolChoice, bool]:
    """(choice, whether calls may be parallel)."""
    given = fields.object("tool_choice")
    if given is None:
        return plain_choice(fields, tools, AUTO), True
    options = Fields(given, prefix="tool_choice.")
    kind, parallel = options.string("type"), not options.boolean("disable_parallel_tool_use")
    if kind == "tool":
        name = options.string("name", "")
        if name in left_out:
            raise options.error("name", f"is {name!r:.80}, a tool that Anthropic's servers run and this one cannot")
        return named_choice(fields, tools, name), parallel
    modes = {"auto": AUTO, "any": REQUIRED, "none": NONE}
    if kind not in modes:
        raise options.error("type", f"is {kind!r:.40}; need auto, any, tool or none")
    return plain_choice(fields, tools, modes[kind]), parallel


# -- messages --------------------------------------------------------------------------------------------------------


def _system(given: Any) -> str:
    texts = [given] if isinstance(given, str) else [_text(b, w) for b, w in _blocks(given or [], "system")]
    return "\n".join(t for t in texts if not t.startswith(_BILLING))


def _messages(fields: Fields) -> list[dict[str, Any]]:
    given = fields.array("messages")
    if not given:
        raise bad_request("messages: at least one message is required", "messages", "missing_required_parameter")
    names: dict[str, str] = {}  # of the calls so far, by id
    out: list[dict[str, Any]] = []
    for n, message in enumerate(given):
        where = f"messages.{n}"
        if not isinstance(message, dict):
            raise bad_request(f"{where} is {kind_of(message)}; need an object", where, "invalid_type")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"{where}.role is {role!r:.40}; need user or assistant", f"{where}.role")
        if content is None or isinstance(content, str):
            out.append({"role": role, "content": content or ""})
        elif role == "assistant":
            out.append(_assistant(_blocks(content, f"{where}.content"), names))
        elif content or role == "user":  # a system message may be there for its settings alone
            out += _user(role, _blocks(content, f"{where}.content"), names)
    if not out:
        raise bad_request("messages: none of them says anything", "messages")
    return out


def _blocks(content: Any, where: str) -> list[tuple[dict[str, Any], str]]:
    """(block, where it is) for each."""
    if not isinstance(content, list):
        raise bad_request(f"{where} is {kind_of(content)}; need a string or an array of blocks", where, "invalid_type")
    for n, block in enumerate(content):
        if not isinstance(block, dict):
            raise bad_request(f"{where}.{n} is {kind_of(block)}; need an object", f"{where}.{n}", "invalid_type")
    return [(block, f"{where}.{n}") for n, block in enumerate(content)]


def _assistant(blocks: Sequence[tuple[dict[str, Any], str]], names: dict[str, str]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block, where in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(_string(block, "thinking", where) or unsealed(block.get("signature")))
            case "redacted_thinking":
                pass  # another server's; nobody here can read it
            case "tool_use":
                name = _string(block, "name", where)
                call_id = str(block.get("id") or "")
                names[call_id] = name
                function = {"name": name, "arguments": earlier_arguments(block.get("input"))}
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                texts.append(_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: Sequence[tuple[dict[str, Any], str]], names: dict[str, str]) -> list[dict[str, Any]]:
    """Tool results become messages of their own; text on either side of them keeps its place.

    But a reminder that an agent puts beside a result is no new turn of the user's, after which a template would leave
    out the thoughts so far: it joins the result.
    """
    out: list[dict[str, Any]] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            out.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for block, where in blocks:
        if block.get("type") == "tool_result":
            flush()
            out.append(_result(block, where, names))
            continue
        text = _text(block, where)
        if text.startswith(_REMINDER) and not texts and out:
            out[-1]["content"] += f"\n{text}"
        else:
            texts.append(text)
    flush()
    return out or [{"role": role, "content": ""}]


def _result(block: dict[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    content = _joined(block.get("content"), f"{where}.content", result=True)
    failed = block.get("is_error") is True
    if failed and not _SAYS_ERROR.match(content):
        content = f"Error: {content}"
    call_id = str(block.get("tool_use_id") or "")
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    return message | ({"name": names[call_id]} if call_id in names else {})


def _text(block: dict[str, Any], where: str, *, result: bool = False) -> str:
    """The text of a block: of a text, a document that is text, a search result, a summary, or the name of a tool.

    result: the block is part of a tool's result, where a line stands for what cannot be read.
    """
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return _string(block, "text", where)
    if kind == "compaction":  # a summary of what came before; null where it failed
        return "" if block.get("content") is None else _string(block, "content", where)
    if kind == "fallback":  # marks where another model went on
        return ""
    if kind == "tool_reference":  # all tools are in the prompt already, those that it loads, too
        return _string(block, "tool_name", where)
    if kind == "search_result":
        return _titled(block, ("title", "source"), _joined(block.get("content"), f"{where}.content", result=result))
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return _titled(block, ("title", "context"), _string(source, "data", f"{where}.source"))
    if kind == "document" and isinstance(source, dict) and source.get("type") == "content":
        return _titled(
            block, ("title", "context"), _joined(source.get("content"), f"{where}.source.content", result=result)
        )
    line = left_out(block) if result else None
    if line is not None:
        return line
    raise _unreadable(kind, where)


def _titled(block: dict[str, Any], keys: Sequence[str], text: str) -> str:
    """What a block says of itself, line by line, before its text."""
    return "\n".join([*(block[key] for key in keys if isinstance(block.get(key), str)), text])


def _joined(content: Any, where: str, *, result: bool = False) -> str:
    """The text of a string, of blocks, or of nothing."""
    if isinstance(content, str):
        return content
    return "\n".join(_text(b, w, result=result) for b, w in _blocks(content or [], where))


def _unreadable(kind: Any, where: str) -> ApiError:
    return bad_request(f"{where}: a block of the type {kind!r:.64} cannot be read; this model takes text only", where)


def _string(block: dict[str, Any], key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{key} is {kind_of(value)}; need a string", f"{where}.{key}", "invalid_type")
    return value
