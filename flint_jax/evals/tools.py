"""Tool use: pick the function whose description fits, fill typed arguments, turn its result into an answer."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

from flint_jax.evals.item import TRAIN, Item, choose, user
from flint_jax.evals.talk import talk
from flint_jax.evals.words import COMMON, THINGS, invented, listed, name, several, wrapped

_VERBS = (
    "open", "fetch", "check", "start", "update", "send", "measure", "book", "print", "count", "get", "find", "show",
    "create", "delete", "list", "read", "write", "set", "search", "play", "plan",
)  # fmt: skip
_ASKING = ("get", "check", "find", "show", "fetch", "read")  # verbs of a tool that a question may be about
_KEYS = ("city", "days", "level", "name", "size", "mode", "limit", "colour", "note", "unit", "owner", "speed",
         "place", "title", "text", "path", "query", "date")  # fmt: skip
_ARRAYS = ("tags", "items", "parts", "labels", "names", "numbers")
_FLAGS = ("urgent", "quiet", "dry_run", "public", "force", "all")
_REQUESTS = (
    "{do}{args}.",
    "Please {do}{args}.",
    "Can you {do}{args}?",
    "I want you to {do}{args}.",
    "Now {do}{args}.",
    "{do}{args}, please.",
    "{do}{args} for me.",
    "{do}{args} now!",
    "Would you {do}{args}?",
    "Will you {do}{args}?",
    "Can you please {do}{args}?",
    "You can {do}{args}.",
    "I need you to {do}{args}.",
    "I want to {do}{args}.",
    "Let us {do}{args}.",
    "Go on and {do}{args}.",
    "Use a tool to {do}{args}.",
    "Your task is to {do}{args}.",
    "Next, {do}{args}.",
    "Help me to {do}{args}.",
    "I would like you to {do}{args}.",
    "Could you {do}{args}, please?",
)
_QUESTIONS = (
    "What is the {noun} in {value}?",
    "What is the {noun} of {value}?",
    "Tell me the {noun} for {value}.",
    "How is the {noun} in {value}?",
    "{Noun} in {value}?",
    "I need the {noun} of {value}.",
    "Find the {noun} in {value}.",
    "Get me the {noun} of {value}, please.",
    "Check the {noun} for {value}.",
    "Read me the {noun} in {value}.",
    "Look up the {noun} for {value}.",
    "Do you know the {noun} in {value}?",
    "What's the {noun} in {value}?",
    "What is the {noun} like in {value}?",
    "What about the {noun} in {value}?",
    "Can you tell me the {noun} of {value}?",
    "Can you check the {noun} in {value}?",
    "Please find the {noun} for {value}.",
    "The {noun} of {value}, please.",
    "Which {noun} does {value} have?",
    "Give me the {noun} for {value}.",
    "I want to know the {noun} in {value}.",
    "Look up the {noun} of {value}.",
    "Is there a {noun} for {value}?",
    "Let me see the {noun} in {value}.",
    "Fetch me the {noun} of {value}.",
    "Find me the {noun} in {value}.",
    "List the {noun} of {value}.",
    "Print me the {noun} for {value}.",
    "Do you have the {noun} for {value}?",
    "Could you find the {noun} for {value}?",
    "How is the {noun} for {value}?",
    "{Verb} the {noun} {value}.",
    "{Verb} {noun} {value}.",
    "Please {verb} the {noun} {value}.",
    "Can you {verb} the {noun} {value}?",
    "What is the {noun} for {value}?",
    "Show me the {noun} in {value}.",
)
_PLAIN_QUESTIONS = ("What is the {noun}?", "Tell me the {noun}.", "I need the {noun}.", "Get me the {noun}.",
                    "Find the {noun}.", "Check the {noun}.", "Read me the {noun}.", "What about the {noun}?",
                    "Give me the {noun}.", "The {noun}, please.", "Look up the {noun}.",
                    "Let me see the {noun}.", "Fetch me the {noun}.", "Find me the {noun}.", "List the {noun}.",
                    "How is the {noun}?", "Print me the {noun}.", "Do you have the {noun}?",
                    "Show me the {noun}.")  # fmt: skip
_WHEN = (" today", " now", " tomorrow", " tonight", " right now", " please", " this week")


@dataclasses.dataclass(frozen=True)
class _Tool:
    verb: str
    noun: str
    parameters: dict[str, dict[str, Any]]
    optional: tuple[str, ...] = ()
    about: str = ""
    strict: bool = False

    @property
    def name(self) -> str:
        return f"{self.verb}_{self.noun}".replace(" ", "_")

    @property
    def definition(self) -> dict[str, Any]:
        required = [key for key in self.parameters if key not in self.optional]
        schema: dict[str, Any] = {"type": "object", "properties": self.parameters, "required": required}
        if self.strict:
            schema["additionalProperties"] = False
        function = {"name": self.name, "description": self.about, "parameters": schema}
        return {"type": "function", "function": function}


def _tool(rng: random.Random, split: str, noun: str) -> _Tool:
    parameters: dict[str, dict[str, Any]] = {}
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
        kind = rng.choice(("string", "string", "string", "integer", "integer", "number", "boolean", "array"))
        if kind == "array":
            inner = rng.choice(("string", "integer"))
            parameters[rng.choice(_ARRAYS)] = {"type": "array", "items": {"type": inner}}
        elif kind == "boolean":
            parameters[rng.choice(_FLAGS)] = {"type": "boolean"}
        else:
            key = invented(rng, split) if rng.random() < 0.4 else rng.choice(_KEYS)
            parameters[key] = {"type": kind}
            if kind == "string" and rng.random() < 0.15:
                parameters[key]["enum"] = rng.sample(COMMON, rng.randint(2, 3))
    return _described(rng, rng.choice(_VERBS), noun, parameters)


def _described(rng: random.Random, verb: str, noun: str, parameters: dict[str, dict[str, Any]]) -> _Tool:
    """With descriptions and optional parameters as different people write them."""
    if rng.random() < 0.3:
        for key, schema in parameters.items():
            schema["description"] = rng.choice(("The {}", "The {} to use", "{} of the {n}")).format(key, n=noun)
    about = rng.choice(("{V} the {n}", "{V} the {n}", "{V} the {n}.", "{V} a {n}", "Use this to {v} the {n}."))
    optional = tuple(key for key in parameters if rng.random() < 0.3) if rng.random() < 0.3 else ()
    text = about.format(V=verb.capitalize(), v=verb, n=noun)
    return _Tool(verb, noun, parameters, optional, text, rng.random() < 0.15)


def _value(rng: random.Random, split: str, schema: dict[str, Any]) -> Any:
    kind = schema["type"]
    if kind == "array":
        return [_value(rng, split, schema["items"]) for _ in range(rng.randint(1, 4))]
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "integer":
        return rng.choice((rng.randint(0, 9), rng.randint(10, 99), rng.randint(100, 999), rng.randint(1000, 9999)))
    if kind == "number":
        return float(f"{rng.randint(0, 99)}.{rng.randint(1, 9)}")
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if rng.random() < 0.2:  # a number that the schema wants as a string
        return str(rng.randint(0, 999))
    word = invented(rng, split)
    return rng.choice((
        word,
        name(rng, split),
        name(rng, split),
        rng.choice(COMMON),
        f"{rng.choice(COMMON)} {word}",
        f"{word} {name(rng, split)}",
        f"{rng.choice(COMMON)} {word} {rng.choice(COMMON)}",
        f"{word}.{rng.choice(('txt', 'py', 'json'))}",
        f"20{rng.randint(10, 39)}-{rng.randint(10, 12)}-{rng.randint(10, 28)}",
    ))  # fmt: skip


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return listed([str(v) for v in value]) if isinstance(value, list) else str(value)


def _asked(rng: random.Random, tool: _Tool, arguments: dict[str, Any]) -> tuple[str, str]:
    form = rng.choice(("{} {}", "{} {}", "{}: {}", "{} = {}"))
    said = [form.format(key, _said(value)) for key, value in arguments.items()]
    return f"{tool.verb} the {tool.noun}", " with " + "; ".join(said) if said else ""


def _filled(rng: random.Random, split: str, tool: _Tool) -> dict[str, Any]:
    kept = {k: s for k, s in tool.parameters.items() if k not in tool.optional or rng.random() < 0.5}
    return {k: _value(rng, split, s) for k, s in kept.items()}


def _nouns(rng: random.Random, split: str, count: int) -> list[str]:
    words = several(rng, split, count)
    if split == TRAIN:
        words = [thing if rng.random() < 0.4 else w for w, thing in zip(words, rng.sample(THINGS, count), strict=True)]
        words = [f"{rng.choice(COMMON)} {w}" if rng.random() < 0.1 else w for w in words]
    return words


def _question(rng: random.Random, split: str, tools: list[_Tool]) -> Item:
    """A question whose only value belongs to the only parameter that must be given."""
    at, verb = rng.randrange(len(tools)), rng.choice(_ASKING)
    noun, key = tools[at].noun, rng.choice(("city", "place", "name", "title", "query", "user", invented(rng, split)))
    plain = rng.random() < 0.15
    tool = tools[at] = _described(rng, verb, noun, {} if plain else {key: {"type": "string"}})
    text = choose(rng, split, _PLAIN_QUESTIONS if plain else _QUESTIONS, 1 if plain else 2)
    value = rng.choice((name(rng, split), name(rng, split), invented(rng, split)))
    if split == TRAIN and rng.random() < 0.2:
        value = rng.choice(
            (f"{value}.{rng.choice(('txt', 'py', 'md'))}", f"{value}/{name(rng, split)}", str(rng.randint(0, 999)))
        )
    if split == TRAIN and rng.random() < 0.2:
        text = text[:-1] + rng.choice(_WHEN) + text[-1]
    text = text.format(noun=noun, Noun=noun.capitalize(), value=value, verb=verb, Verb=verb.capitalize())
    return _item(rng, split, tools, text, [(tool, {} if plain else {key: value})], "a question")


def _item(rng, split, tools, text, filled, detail) -> Item:
    text = wrapped(rng, split, text)
    thinking = rng.random() < 0.6
    thought = f"I call {listed([t.name for t, _ in filled])}." if thinking else ""
    calls = tuple((t.name, a) for t, a in filled)
    definitions = tuple(t.definition for t in tools)
    return Item("tools", detail, (user(text),), "", thought, calls, definitions, thinking)


def call(rng: random.Random, split: str) -> Item:
    """One or two calls among one to four functions, or a question that needs none."""
    tools = [_tool(rng, split, noun) for noun in _nouns(rng, split, rng.randint(1, 4))]
    kind = rng.random()
    if kind < 0.1:
        thinking = rng.random() < 0.6
        thought = "No tool is needed." if thinking else ""
        shown = tuple(t.definition for t in tools)
        return dataclasses.replace(
            talk(rng, split), family="tools", detail="none needed", tools=shown, thinking=thinking, thought=thought
        )
    if kind < 0.3:
        return _question(rng, split, tools)
    count = 2 if len(tools) > 1 and rng.random() < 0.25 else 1
    chosen = rng.sample(tools, count)
    filled = [(t, _filled(rng, split, t)) for t in chosen]
    if count == 1:
        do, args = _asked(rng, *filled[0])
        text = choose(rng, split, _REQUESTS, 2).format(do=do, args=args)
    else:
        parts = ["".join(_asked(rng, t, a)) for t, a in filled]
        text = choose(rng, split, _REQUESTS, 2).format(do=" and then ".join(parts), args="")
    detail = "two calls" if count == 2 else "one call" if filled[0][1] else "no arguments"
    return _item(rng, split, tools, text[0].upper() + text[1:], filled, detail)


def beside(rng: random.Random, split: str, item: Item) -> Item:
    """The same exercise with functions that it has no use for."""
    tools = tuple(_tool(rng, split, noun).definition for noun in _nouns(rng, split, rng.randint(1, 4)))
    return dataclasses.replace(item, tools=tools)


def result(rng: random.Random, split: str) -> Item:
    """A call was made and answered; tell the user what came back."""
    asked = call(rng, split)
    while not asked.calls:
        asked = call(rng, split)
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": called, "arguments": json.dumps(arguments)}}
        for i, (called, arguments) in enumerate(asked.calls)
    ]
    replies, sentences = [], []
    for one, (called, _) in zip(calls, asked.calls, strict=True):
        noun = called.split("_", 1)[1].replace("_", " ")
        text, said = _came_back(rng, split)
        replies.append({"role": "tool", "tool_call_id": one["id"], "content": text})
        sentences.append(f"For {noun}: {said}.")
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    if asked.thinking and rng.random() < 0.5:  # as a client sends it back that keeps what it got
        turn["reasoning_content"] = asked.thought
    messages = (*asked.messages, turn, *replies)
    thought = "The result is there." if asked.thinking else ""
    return Item("tool results", "one" if len(calls) == 1 else "two", messages, " ".join(sentences), thought,
                tools=asked.tools, thinking=asked.thinking)  # fmt: skip


def _came_back(rng: random.Random, split: str) -> tuple[str, str]:
    """A tool's result and how it is told: JSON fields one by one, other text as it is."""
    if rng.random() < 0.2:
        word = rng.choice((invented(rng, split), rng.choice(COMMON), "done", "not found"))
        text = rng.choice((word, f"{rng.randint(0, 999)} {word}"))
        return text, text
    others = ("temperature", "sky", "status", "total", "wind", "error", invented(rng, split), invented(rng, split))
    keys = rng.sample(_KEYS + others, rng.randint(1, 3))
    values = {
        k: rng.choice((
            rng.randint(0, 999),
            float(f"{rng.randint(0, 99)}.{rng.randint(1, 9)}"),
            rng.choice(COMMON),
            invented(rng, split),
            name(rng, split),
            f"{rng.choice(COMMON)} {invented(rng, split)}",
        ))
        for k in keys
    }  # fmt: skip
    return json.dumps(values), ", ".join(f"{k} is {v}" for k, v in values.items())
