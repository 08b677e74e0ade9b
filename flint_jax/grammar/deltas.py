"""What the lexer says as the output comes in, the whole message that these deltas add up to, and how it ended."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the thought."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its name is whole and never sent again. index: 0, 1, ... in order of the calls."""

    index: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments. All of a call joined are one JSON object."""

    index: int
    json: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of this call are complete."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Output that does not follow the grammar; what became of it is in the message.

    kind: ``unknown_tool``, ``cut_name`` and ``open_call`` (the block stays as content), ``repeated_key``,
        ``stray_text``, ``missing_value``.
    index: the call it concerns, None when there is none.
    """

    kind: str
    message: str
    index: int | None = None


Delta = Reasoning | Content | CallStart | CallArguments | CallEnd | Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A whole tool call. arguments: text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A whole reply; reasoning and content are None when there is none."""

    reasoning: str | None
    content: str | None
    calls: tuple[Call, ...]
    problems: tuple[Problem, ...]


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """The same deltas with neighbours of one kind as one; costs the length of their text, however many they are."""
    out: list[Delta] = []
    for (kind, index), group in itertools.groupby(deltas, lambda d: (type(d), getattr(d, "index", None))):
        items = list(group)
        if len(items) == 1:
            out += items
        elif kind in (Content, Reasoning):
            out.append(kind("".join(d.text for d in items)))
        elif kind is CallArguments:
            out.append(CallArguments(index, "".join(d.json for d in items)))
        else:
            out += items
    return out


def collect(deltas: Iterable[Delta]) -> Message:
    """The message that the deltas of one output add up to."""
    reasoning: list[str] = []
    content: list[str] = []
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    problems: list[Problem] = []
    for delta in deltas:
        match delta:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallStart():
                starts.append(delta)
                arguments.append([])
            case CallArguments(index, json):
                arguments[index].append(json)
            case Problem():
                problems.append(delta)
    calls = tuple(Call(s.id, s.name, "".join(a)) for s, a in zip(starts, arguments, strict=True))
    return Message("".join(reasoning) or None, "".join(content) or None, calls, tuple(problems))


def finish_reason(engine_reason: str, *, calls: bool, named: bool = False) -> str:
    """The reason to tell the client.

    engine_reason: ``stop``, ``length``, ``abort`` ...; only ``stop`` can become ``tool_calls``, so that a reply that
    was cut says so even when it has calls. calls: whether the message has any. named: the request named the function
    to call; the caller knows about the call then, and is told ``stop``.
    """
    return "tool_calls" if engine_reason == "stop" and calls and not named else engine_reason
