"""Exercises as token sequences: rendered through the chat template exactly as the server renders, packed into rows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from flint_jax import evals
from flint_jax.evals import TRAIN, Item

# How often each family is drawn; look-ups in short records are among them, long ones fill rows of their own.
MIX = {"arithmetic": 24, "lists": 12, "tools": 26, "results": 8, "record": 30, "memory": 8, "telling": 2, "talk": 6}
SYSTEM = (
    "You are a helpful assistant.",
    "You are Flint.",
    "Answer briefly.",
    "Be kind and answer in a few words.",
    "You are a coding agent. Use the tools when you need them.",
    "You help people with small tasks.\nUse the tools if you have any.",
)
SMALL = 160  # an exercise longer than this is kept for the next row when the present one has no room for it
END = {"chat": "<|user|>", "calls": "<|observation|>"}
ASSISTANT = "<|assistant|>"


def exercise(rng: random.Random, family: str | None = None) -> Item:
    """One training item of the mix; one in six begins with a system message, which changes nothing.

    One in twelve that calls no tools has some all the same, as with a client that always sends them; one in six comes
    after other exercises in the same chat.
    """
    family = family or rng.choices(tuple(MIX), MIX.values())[0]
    if family == "record":
        lines = rng.choice((1, 2, 2, 3, 4, 6, 8, 12, 16, 24, 32))
        item = evals.record(rng, TRAIN, lines, asked=rng.choice((1, 2, lines)))
    else:
        made = {"tools": evals.call, "results": evals.result}.get(family) or getattr(evals, family)
        item = made(rng, TRAIN)
    if not item.tools and rng.random() < 1 / 12:
        item = evals.beside(rng, TRAIN, item)
    if family not in ("memory", "results", "record") and rng.random() < 1 / 6:
        item = evals.later(rng, TRAIN, item)
    if rng.random() < 1 / 6:
        system = {"role": "system", "content": rng.choice(SYSTEM)}
        item = dataclasses.replace(item, messages=(system, *item.messages))
    return item


def render(item: Item, template: Any) -> tuple[str, str, str]:
    """(prompt, reply, mark that ends the turn). The reply begins where the model begins to write."""
    options = {} if item.thinking else {"enable_thinking": False}
    prompt = template.render(item.messages, list(item.tools) or None, **options)
    reply = f"<think>{item.thought}</think>" if item.thinking else ""
    reply += item.content
    for name, arguments in item.calls:
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_spelled(v)}</arg_value>\n" for k, v in arguments.items())
        reply += f"<tool_call>{name}\n{pairs}</tool_call>"
    return prompt, reply, END["calls" if item.calls else "chat"]


def _spelled(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Encoder:
    """Items to (tokens, loss weights): the reply and its end count 1, the prompt ``prompt_weight``.

    How an earlier reply in the prompt begins counts nothing: the template leaves its thought out, and a model that
    learns from that stops thinking in the middle of a chat (in 7 of 53 sums, and whenever it was told a fact).
    """

    def __init__(self, tokenizer: Any, template: Any, prompt_weight: float = 0.1):
        self.tokenizer, self.template, self.prompt_weight = tokenizer, template, prompt_weight
        self.ids = {mark: tokenizer.added_tokens[mark] for mark in (*END.values(), "<|endoftext|>")}
        self._assistant = tokenizer.added_tokens[ASSISTANT]

    def __call__(self, item: Item) -> tuple[list[int], list[float]]:
        """Tokens of prompt and reply, and the weight of each as a target. Rows add the end mark."""
        prompt, reply, _ = render(item, self.template)
        head, tail = self.tokenizer.encode(prompt), self.tokenizer.encode(reply)
        weights = [self.prompt_weight] * len(head)
        for at, token in enumerate(head[:-2]):
            if token == self._assistant:
                weights[at + 2] = 0.0  # behind the mark and its newline
        return head + tail, weights + [1.0] * len(tail)

    def whole(self, item: Item) -> tuple[list[int], list[float], bool]:
        """Tokens, weights, and whether the reply ends in a call."""
        return *self(item), bool(item.calls)


def rows(encoder: Encoder, length: int, seed: int, long: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless (tokens [length + 1], weights [length]) rows: whole exercises one after the other.

    weights[i] belongs to the prediction of tokens[i + 1]. An exercise that begins with a user turn follows the one
    before as the next turn of a chat would; between others stands the end of the text. long: rows begin with a record
    that fills most of them.
    """
    rng = random.Random(seed)
    waiting: list[tuple[list[int], list[float], bool]] = []  # an exercise that did not fit the row before
    while True:
        row = _Row(encoder)
        if long:
            row.add(*encoder.whole(_record_of(rng, length - 80)))
        elif waiting:
            row.add(*waiting.pop())
        while (room := length + 1 - len(row.tokens)) > 0:
            made = encoder.whole(exercise(rng))
            if len(made[0]) > room and len(made[0]) > SMALL and not waiting:
                waiting.append(made)
                made = encoder.whole(exercise(rng, rng.choice(("arithmetic", "talk", "lists"))))
            row.add(*made)
        yield np.asarray(row.tokens[: length + 1], np.int32), np.asarray(row.weights[1 : length + 1], np.float32)


class _Row:
    """Exercises one after the other, and the marks between them."""

    def __init__(self, encoder: Encoder):
        self.tokens: list[int] = []
        self.weights: list[float] = []
        self.eot, self.observation, self.user = (
            encoder.ids[m] for m in ("<|endoftext|>", "<|observation|>", "<|user|>")
        )

    def add(self, ids: list[int], counts: list[float], calls: bool) -> None:
        counts = list(counts)
        if self.tokens and self.tokens[-1] == self.observation:
            self._put(self.eot, 0.0)
        elif self.tokens and ids[0] != self.user:
            self._put(self.eot, 1.0)
        elif self.tokens:
            counts[0] = 1.0  # the turn's end is the next turn's mark
        self.tokens += ids
        self.weights += counts
        if calls:
            self._put(self.observation, 1.0)

    def _put(self, token: int, weight: float) -> None:
        self.tokens.append(token)
        self.weights.append(weight)


def _record_of(rng: random.Random, tokens: int) -> Item:
    """A record of up to about ``tokens`` tokens (12 to 15 a line), many of its lines asked for."""
    most = max(2, tokens // 15)
    lines = rng.randint(most // 3, most)
    return evals.record(rng, TRAIN, lines, asked=rng.choice((4, 8, 16, 24)))
