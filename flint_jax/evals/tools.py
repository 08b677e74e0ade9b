"""Tool use: pick the function whose description fits, fill typed arguments, turn its result into an answer."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

from flint_jax.evals.item import Item, choose, user
from flint_jax.evals.talk import talk
from flint_jax.evals.words import COMMON, invented, listed, several

_VERBS = ("open", "fetch", "check", "start", "update", "send", "measure", "book", "print", "count")
_KEYS = ("city", "days", "level", "name", "size", "mode", "limit", "colour", "note", "unit", "owner", "speed")
_ARRAYS = ("tags", "items", "parts", "labels")
_FLAGS = ("urgent", "quiet", "dry_run", "public")
_REQUESTS = (
    "{do}{args}.",
    "Please {do}{args}.",
    "Can you {do}{args}?",
    "I want you to {do}{args}.",
    "I would like you to {do}{args}.",
    "Could you {do}{args}, please?",
)


@dataclasses.dataclass(frozen=True)
class _Tool:
    verb: str
    noun: str
    parameters: dict[str, dict[str, Any]]

    @property
    def name(self) -> str:
        return f"{self.verb}_{self.noun}"

    @property
    def definition(self) -> dict[str, Any]:
        schema = {"type": "object", "properties": self.parameters, "required": list(self.parameters)}
        about = f"{self.verb.capitalize()} the {self.noun}"
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": schema}}


def _tool(rng: random.Random, split: str, noun: str) -> _Tool:
    parameters: dict[str, dict[str, Any]] = {}
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
        kind = rng.choice(("string", "string", "integer", "integer", "boolean", "array"))
        if kind == "array":
            inner = rng.choice(("string", "integer"))
            parameters[rng.choice(_ARRAYS)] = {"type": "array", "items": {"type": inner}}
        elif kind == "boolean":
            parameters[rng.choice(_FLAGS)] = {"type": "boolean"}
        else:
            key = invented(rng, split) if rng.random() < 0.4 else rng.choice(_KEYS)
            parameters[key] = {"type": kind}
    return _Tool(rng.choice(_VERBS), noun, parameters)


def _value(rng: random.Random, split: str, schema: dict[str, Any]) -> Any:
    kind = schema["type"]
    if kind == "array":
        return [_value(rng, split, schema["items"]) for _ in range(rng.randint(1, 4))]
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "integer":
        return rng.choice((rng.randint(0, 9), rng.randint(10, 99), rng.randint(100, 999)))
    if rng.random() < 0.25:  # a number that the schema wants as a string
        return str(rng.randint(0, 999))
    return rng.choice((invented(rng, split), rng.choice(COMMON), f"{rng.choice(COMMON)} {invented(rng, split)}"))


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return listed([str(v) for v in value]) if isinstance(value, list) else str(value)


def _asked(tool: _Tool, arguments: dict[str, Any]) -> tuple[str, str]:
    said = [f"{key} {_said(value)}" for key, value in arguments.items()]
    return f"{tool.verb} the {tool.noun}", " with " + "; ".join(said) if said else ""


def call(rng: random.Random, split: str) -> Item:
    """One or two calls among one to four functions, or a question that needs none."""
    tools = [_tool(rng, split, noun) for noun in several(rng, split, rng.randint(1, 4))]
    definitions = tuple(t.definition for t in tools)
    thinking = rng.random() < 0.6
    if rng.random() < 0.1:
        plain = talk(rng, split)
        thought = "No tool is needed." if thinking else ""
        return dataclasses.replace(
            plain, family="tools", detail="none needed", tools=definitions, thinking=thinking, thought=thought
        )
    count = 2 if len(tools) > 1 and rng.random() < 0.25 else 1
    chosen = rng.sample(tools, count)
    filled = [(t, {k: _value(rng, split, s) for k, s in t.parameters.items()}) for t in chosen]
    parts = ["".join(_asked(t, a)) for t, a in filled]
    if count == 1:
        do, args = _asked(*filled[0])
        text = choose(rng, split, _REQUESTS).format(do=do, args=args)
    else:
        text = choose(rng, split, _REQUESTS).format(do=" and then ".join(parts), args="")
    text = text[0].upper() + text[1:]
    thought = f"I call {listed([t.name for t in chosen])}." if thinking else ""
    calls = tuple((t.name, a) for t, a in filled)
    detail = "two calls" if count == 2 else "one call" if calls[0][1] else "no arguments"
    return Item("tools", detail, (user(text),), "", thought, calls, definitions, thinking)


def result(rng: random.Random, split: str) -> Item:
    """A call was made and answered; tell the user what came back."""
    asked = call(rng, split)
    while not asked.calls:
        asked = call(rng, split)
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(asked.calls)
    ]
    replies, sentences = [], []
    for one, (name, _) in zip(calls, asked.calls, strict=True):
        noun = name.split("_", 1)[1]
        keys = rng.sample(_KEYS, rng.randint(1, 3))
        values = {k: rng.choice((rng.randint(0, 999), rng.choice(COMMON), invented(rng, split))) for k in keys}
        replies.append({"role": "tool", "tool_call_id": one["id"], "content": json.dumps(values)})
        sentences.append(f"For {noun}: " + ", ".join(f"{k} is {v}" for k, v in values.items()) + ".")
    messages = (*asked.messages, {"role": "assistant", "content": "", "tool_calls": calls}, *replies)
    thought = "The result is there." if asked.thinking else ""
    return Item("tool results", "one" if len(calls) == 1 else "two", messages, " ".join(sentences), thought,
                tools=asked.tools, thinking=asked.thinking)  # fmt: skip
