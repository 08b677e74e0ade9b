"""Random outputs of a grammar: at every step any token that the mask allows, as from a model that knows nothing."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np

from flint_jax.grammar import Lexer, Message, State, Tags, Tool, collect
from flint_jax.guided import Compiler, Vocabulary
from flint_jax.server.forced import Forced, Structured, ToolChoice
from flint_jax.text import Detokenizer
from loaders import load_tokenizer

GOLDEN = Path(__file__).parents[1] / "goldens" / "T2"
ROWS = 512  # of the model's head; the tokenizer has 500 tokens


@functools.cache
def tokenizer():
    """512 byte-level tokens, among them all eight tags."""
    return load_tokenizer(GOLDEN)


@functools.cache
def compiler(rows: int = ROWS) -> Compiler:
    """Grammars over that vocabulary."""
    return Compiler(Vocabulary(tokenizer(), rows, tokenizer().eog_ids))


def tool(name: str, parameters=None, **more) -> dict:
    """A tool in the form of OpenAI's chat completions."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def wish(*tools, choice="auto", name=None, thinking=False, **fields) -> Forced:
    """What a request asks for."""
    mode = ToolChoice(choice if tools else "none", name)
    return Forced(tools=tuple(tools), choice=mode, thinking=thinking, **fields)


def structured(kind: str, value, **fields) -> Forced:
    """vLLM's structured_outputs."""
    return Forced(structured=Structured(kind, value, f"guided_{kind}"), thinking=False, **fields)


def allowed(tracker, rows: int = ROWS) -> list[int]:
    """Tokens that may come next."""
    mask = np.zeros(-(-rows // 32), np.int32)
    tracker.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def after(forced: Forced, *parts: str, made: Compiler | None = None):
    """The state after text, in the longest tokens that may come, and tags, as tokens."""
    tracker = (made or compiler())(forced).begin()
    for part in parts:
        left = part.encode()
        if part in tokenizer().added_tokens:
            assert tokenizer().added_tokens[part] in allowed(tracker), part
            tracker.push(tokenizer().added_tokens[part])
            continue
        while left:
            spelled = {tokenizer().token_bytes(i): i for i in allowed(tracker)}
            token = max((b for b in spelled if b and left.startswith(b)), key=len, default=None)
            assert token, f"{left!r} may not come"
            tracker.push(spelled[token])
            left = left.removeprefix(token)
    return tracker


def roll(forced: Forced, seed: int, limit: int = 1500) -> tuple[list[int], bool]:
    """(tokens, whether the output ended by itself). Tags and ends come more often than by chance, so that it ends."""
    draw, tracker, out = random.Random(seed), compiler()(forced).begin(), []
    added, ends = set(tokenizer().added_tokens.values()), set(tokenizer().eog_ids)
    while len(out) < limit:
        ids = allowed(tracker)
        assert ids, "nothing may come, not even the end"
        marks = [i for i in ids if i in added or tokenizer().token_bytes(i)[-1:] in b'"}]']
        token = draw.choice(marks if marks and draw.random() < 0.4 else ids)
        if token in ends:
            return out, True
        out.append(token)
        tracker.push(token)
    return out, False


def read(tokens, tools=(), *, start=State.CONTENT, thinking=False, ended=True) -> Message:
    """What the server makes of an output."""
    detokenizer = Detokenizer(tokenizer())
    tags = Tags.of(tokenizer().added_tokens)
    lexer = Lexer(start, tags, [Tool.of(t) for t in tools], thinking=thinking)
    deltas = [d for t in tokens for d in lexer.push(t, detokenizer.push(t))]
    deltas += lexer.push(None, detokenizer.flush())
    return collect(deltas + lexer.finish("stop" if ended else "length"))
