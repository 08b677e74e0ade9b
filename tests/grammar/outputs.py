"""Model outputs for tests: written with their tags, cut into tokens in every way, read and checked."""

import itertools
import json
import random
import re

from flint_jax.grammar import (
    CallArguments,
    CallEnd,
    CallStart,
    Lexer,
    Message,
    State,
    Tags,
    Tool,
    collect,
)

BLOCK = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ARGUMENT = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
TOKENS = Tags.of({tag: 900 + n for n, tag in enumerate(BLOCK + ARGUMENT)})  # every tag is one token
TEXT = Tags()  # the vocabulary has none of them
IDS = {tag: token_id for token_id, tag in {**TOKENS.block, **TOKENS.argument}.items()}
WORD = 7  # id of all ordinary tokens

WEATHER = Tool(
    "get_weather",
    {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "ok": {"type": "boolean"}}},
)
TOOLS = (WEATHER, Tool("noargs", {"type": "object", "properties": {}}))


def call(name, **arguments):
    """A well-formed call in the grammar; values as the model writes them."""
    pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{pairs}</tool_call>"


def tokens(output, cut, *, block_tags=True, argument_tags=True):
    """(id, text) pairs. Tags are tokens of their own, or are cut like other text; ``cut`` makes pieces of text."""
    known = (BLOCK if block_tags else ()) + (ARGUMENT if argument_tags else ())
    stretches = re.split(f"({'|'.join(known)})", output) if known else [output]
    for stretch in stretches:
        if stretch in known:
            yield IDS[stretch], stretch
        else:
            yield from ((WORD, piece) for piece in cut(stretch))


def in_ones(text):
    return list(text)


def whole(text):
    return [text]


def cut_at(*places):
    return lambda text: [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def in_pieces(seed):
    """Random lengths 0 to 6."""
    rng = random.Random(seed)

    def cut(text):
        at, pieces = 0, []
        while at < len(text):
            n = rng.randrange(7)
            pieces.append(text[at : at + n])
            at += n
        return pieces

    return cut


def run(pairs, tags=TOKENS, *, start=State.REASONING, tools=TOOLS, reason="stop", **options):
    """All deltas, in order, checked against what a client may rely on."""
    numbers = itertools.count()
    lexer = Lexer(start, tags, tools, new_id=lambda: f"id-{next(numbers)}", **options)
    deltas = [d for token_id, text in pairs for d in lexer.push(token_id, text)]
    deltas += lexer.finish(reason)
    check_order(deltas)
    return deltas


def check_order(deltas):
    """Calls one after the other, each with its name first and valid JSON in all; no empty text."""
    open_call, ended, arguments = None, 0, ""
    for delta in deltas:
        match delta:
            case CallStart(index, _, name):
                assert (open_call, index) == (None, ended)
                assert name == name.strip() != ""
                open_call, arguments = index, ""
            case CallArguments(index, text):
                assert index == open_call
                assert text
                arguments += text
            case CallEnd(index):
                assert index == open_call
                assert isinstance(json.loads(arguments, object_pairs_hook=no_repeats), dict)
                assert arguments.encode()
                assert "\\ud" in arguments or json.dumps(json.loads(arguments), ensure_ascii=False) == arguments
                open_call, ended = None, ended + 1
            case _ if hasattr(delta, "text"):
                assert delta.text
                assert open_call is None
    assert open_call is None


def no_repeats(pairs):
    assert len(dict(pairs)) == len(pairs), "a key is there twice"
    return dict(pairs)


def read(output, **options) -> Message:
    """The message, checked to be the same with tags as tokens and as text, whole, in ones, cut once, cut at random."""
    message = collect(run(tokens(output, whole), **options))
    ways = [(TOKENS, {"argument_tags": a}) for a in (True, False)]
    ways += [(TEXT, {"block_tags": False, "argument_tags": False})]
    cuts = [whole, in_ones, in_pieces(1), in_pieces(2), in_pieces(3)]
    for (tags, how), cut in itertools.product(ways, cuts):
        assert collect(run(tokens(output, cut, **how), tags, **options)) == message
    for at in range(1, len(output)):
        pairs = tokens(output, cut_at(at), block_tags=False, argument_tags=False)
        assert collect(run(pairs, TEXT, **options)) == message
    return message


def parts(output, **options):
    """(reasoning, content, [(name, arguments text), ...]) of ``read``."""
    message = read(output, **options)
    return message.reasoning, message.content, [(c.name, c.arguments) for c in message.calls]


def kinds(output, **options):
    return [p.kind for p in read(output, **options).problems]
