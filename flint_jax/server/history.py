"""What clients send back of a conversation, under the names they know, in the one form that templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flint_jax.server.errors import bad_request
from flint_jax.server.foreign import earlier_arguments, left_out

# Other servers' fields for the thoughts of an assistant's turn: the key of the text in each entry, by its type.
_THOUGHTS = {
    "thinking_blocks": {"thinking": "thinking"},  # LiteLLM
    "reasoning_details": {"reasoning.text": "text", "reasoning.summary": "summary"},  # OpenRouter
}


def read_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message of chat completions, with what would be lost under another name in its usual place.

    A refusal without content becomes the content, and thoughts become ``reasoning_content`` unless there are some under
    the usual names. What cannot be read in a tool's result or in a call's arguments is told in words; see ``foreign``.
    Raises ApiError for ``function_call``, which ``tool_calls`` replaced.
    """
    out = dict(message)
    if out.get("function_call"):
        at = f"{where}.function_call"
        raise bad_request(f"{at} is not supported: use tool_calls", at, "unsupported_parameter")
    if isinstance(out.get("refusal"), str) and not out.get("content"):
        out["content"] = out["refusal"]
    if isinstance(out.get("content"), list):
        out["content"] = [_result_part(p) if out.get("role") == "tool" else _part(p) for p in out["content"]]
    if isinstance(out.get("tool_calls"), list):
        out["tool_calls"] = [_call(c) for c in out["tool_calls"]]
    if not out.get("reasoning") and not out.get("reasoning_content"):
        thoughts = [text for name, keys in _THOUGHTS.items() for text in _texts(out.get(name), keys)]
        if thoughts:
            out["reasoning_content"] = "".join(thoughts)
    return out


def _part(part: Any) -> Any:
    """LangChain's and Vercel's ``reasoning`` part as a ``thinking`` part."""
    if not isinstance(part, Mapping) or part.get("type") != "reasoning":
        return part
    return {"type": "thinking", "thinking": part.get("reasoning", part.get("text"))}


def _result_part(part: Any) -> Any:
    line = left_out(part)
    return part if line is None else {"type": "text", "text": line}


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": earlier_arguments(function.get("arguments"))}}


def _texts(entries: Any, keys: Mapping[str, str]) -> list[str]:
    if not isinstance(entries, list):
        return []
    found = [e.get(keys.get(str(e.get("type")), "")) for e in entries if isinstance(e, Mapping)]
    return [text for text in found if isinstance(text, str)]


def in_call_order(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the results of parallel calls in the order of the calls.

    Clients send results as they come in, with the call's id; templates leave the ids out, so that a model would take
    one result for the other. A run of results whose ids are not those of the calls before it stays as it is.
    """
    out = list(messages)
    for at, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            continue
        place = {str(c.get("id")): n for n, c in enumerate(calls) if isinstance(c, Mapping)}
        end = at + 1
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        ids = [str(m.get("tool_call_id")) for m in messages[at + 1 : end]]
        if len(place) == len(calls) and len(set(ids)) == len(ids) and place.keys() >= set(ids):
            out[at + 1 : end] = sorted(out[at + 1 : end], key=lambda m: place[str(m.get("tool_call_id"))])
    return out


def goes_on(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is an assistant's that says it is to be continued, as Mistral's and DeepSeek's clients
    do (``prefix: true``)."""
    return messages[-1].get("role") == "assistant" and messages[-1].get("prefix") is True
