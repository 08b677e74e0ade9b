"""From deltas to the items of a response and to the events that tell them; the same items either way."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from flint_jax.grammar import CallArguments, CallEnd, CallStart, Content, Delta, Reasoning
from flint_jax.server import sse
from flint_jax.server.replies import quoted
from flint_jax.server.responses_input import ToolName
from flint_jax.server.sealing import sealed

_TEXT, _THOUGHT, _SUMMARY = "response.output_text", "response.reasoning_text", "response.reasoning_summary_text"
_ARGUMENTS, _INPUT = "response.function_call_arguments", "response.custom_tool_call_input"


class Items:
    """Builds items one after the other, at most one of them open.

    names: what the client calls each function that the model sees. seal: put thoughts into ``encrypted_content`` too.
    summary: thoughts go out as their own summary, which is what most clients show.
    done: the items that are complete.
    """

    def __init__(self, names: Mapping[str, ToolName], *, seal: bool, summary: bool = False):
        self.done: list[dict[str, Any]] = []
        self._names, self._seal, self._summary = names, seal, summary
        self._number = 0
        self._item: dict[str, Any] | None = None  # the open one
        self._parts: list[str] = []
        self._head = ""  # of a delta's event, up to its number; "" when the item's text goes out as a whole
        self._end: Callable[[str], list[str]] = lambda text: []

    def event(self, kind: str, **fields: Any) -> str:
        """One event with the next number."""
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sse.named_event(value).decode()

    def push(self, delta: Delta) -> list[str]:
        """Events for one delta."""
        match delta:
            case Content(text):
                return [*self._open_text("message"), *self._more(text)]
            case Reasoning(text):
                return [*self._open_text("reasoning"), *self._more(text)]
            case CallStart(_, call_id, name):
                return [*self.close(), *self._open_call(call_id, name)]
            case CallArguments(_, text):
                return self._more(text)
            case CallEnd():
                return self.close()
        return []

    def close(self) -> list[str]:
        """End the open item, if any."""
        if self._item is None:
            return []
        text, self._parts = "".join(self._parts), []
        events = self._end(text)
        item, self._item = self._item, None
        events.append(self.event("response.output_item.done", output_index=len(self.done), item=item))
        self.done.append(item)
        return events

    def _more(self, text: str) -> list[str]:
        self._parts.append(text)
        if not self._head:
            return []
        number = self._number
        self._number += 1
        return [f'{self._head}{number},"delta":{quoted(text)}}}\n\n']

    # -- text and thoughts -------------------------------------------------------------------------------------------

    def _open_text(self, kind: str) -> list[str]:
        if self._item is not None and self._item["type"] == kind:
            return []
        events = self.close()
        field, index, parts = "content", "content_index", "response.content_part"
        if kind == "message":
            item = {"id": _new_id("msg"), "type": kind, "role": "assistant", "status": "in_progress", "content": []}
            name, part, logprobs = _TEXT, {"type": "output_text", "text": "", "annotations": []}, {"logprobs": []}
        else:
            item = {"id": _new_id("rs"), "type": kind, "status": "in_progress", "summary": [], "content": []}
            name, part, logprobs = _THOUGHT, {"type": "reasoning_text", "text": ""}, {}
            if self._summary:
                field, index, parts = "summary", "summary_index", "response.reasoning_summary_part"
                name, part = _SUMMARY, {"type": "summary_text", "text": ""}
        at = {"item_id": item["id"], "output_index": len(self.done), index: 0}

        def end(text: str) -> list[str]:
            whole = part | {"text": text}
            self._item = item | {"status": "completed", field: [whole]}
            if kind == "reasoning" and self._seal:
                self._item["encrypted_content"] = sealed(text)
            return [
                self.event(f"{name}.done", **at, text=text, **logprobs),
                self.event(f"{parts}.done", **at, part=whole),
            ]

        events += self._open(item, end, f"{name}.delta", at | logprobs)
        return [*events, self.event(f"{parts}.added", **at, part=part)]

    # -- calls -------------------------------------------------------------------------------------------------------

    def _open_call(self, call_id: str, shown: str) -> list[str]:
        known = self._names.get(shown) or ToolName(shown)
        space = {"namespace": known.namespace} if known.namespace else {}
        if known.custom:
            item = {"id": _new_id("ctc"), "type": "custom_tool_call", "status": "in_progress"}
            item |= {"call_id": call_id, "name": known.name, **space, "input": ""}
        else:
            item = {"id": _new_id("fc"), "type": "function_call", "status": "in_progress"}
            item |= {"call_id": call_id, "name": known.name, **space, "arguments": ""}
        at = {"item_id": item["id"], "output_index": len(self.done)}

        def end_function(text: str) -> list[str]:
            self._item = item | {"status": "completed", "arguments": text}
            return [self.event(f"{_ARGUMENTS}.done", **at, name=known.name, arguments=text)]

        def end_custom(text: str) -> list[str]:
            given = json.loads(text).get("input", text)
            self._item = item | {"status": "completed", "input": given}
            told = self.event(f"{_INPUT}.delta", **at, delta=given)
            return [told, self.event(f"{_INPUT}.done", **at, input=given)]

        if known.custom:  # its input is inside the arguments, which are JSON until they end
            return self._open(item, end_custom, None, at)
        return self._open(item, end_function, f"{_ARGUMENTS}.delta", at)

    def _open(self, item: dict, end: Callable[[str], list[str]], delta: str | None, at: dict) -> list[str]:
        self._item, self._end = item, end
        value = json.dumps({"type": delta, **at}, separators=(",", ":"))[:-1]
        self._head = f'event: {delta}\ndata: {value},"sequence_number":' if delta else ""
        return [self.event("response.output_item.added", output_index=len(self.done), item=item)]


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
