"""From tokens to text on the wire: stop strings, partial characters, the same text streamed and whole."""

import json
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flint_jax.engine import Event
from flint_jax.grammar import Calls, Lexer, State, Tags, collect
from flint_jax.server.choices import Choice, TextOptions
from tests.server.fake_engine import Script
from tests.server.harness import sse_data, tokenizer, wait_until


def both_modes(server, **fields):
    """(text, finish_reason, stop_reason) of a completion, checked to be the same streamed and whole."""
    body = {"prompt": "p", "max_tokens": 100} | fields
    choice = server.post("/v1/completions", body).json()["choices"][0]
    whole = choice["text"], choice["finish_reason"], choice.get("stop_reason")
    text, reason, stop = "", None, None
    for data in sse_data(server.post("/v1/completions", body | {"stream": True}).text):
        if data != "[DONE]":
            choice = json.loads(data)["choices"][0]
            text += choice["text"]
            reason, stop = choice["finish_reason"], choice.get("stop_reason")
    assert (text, reason, stop) == whole
    return whole


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        ("fox jumps", "the ", "fox jumps"),
        (["cat", "over"], "the fox jumps ", "over"),
        ("the", "", "the"),
        ("overt", "the fox jumps over", None),
        (["jumps", "fox jumps over"], "the fox ", "jumps"),
    ],
)
@pytest.mark.parametrize("burst", [1, 4, 99])
def test_stop_strings_never_show(server, stop, text, matched, burst):
    server.says("the fox jumps over", burst=burst)
    assert both_modes(server, stop=stop) == (text, "stop", matched)


def test_a_stop_string_frees_the_slot_at_once_though_another_choice_goes_on(server):
    gate = threading.Event()
    two = tokenizer().encode("one two " * 20)
    server.engine.script = lambda prompt, params: Script(two, token_s=0.002, gate=gate if params.seed else None)
    done = []
    body = {"prompt": "p", "stop": "two", "n": 2, "seed": 0}
    thread = threading.Thread(target=lambda: done.append(server.post("/v1/completions", body).json()))
    thread.start()
    wait_until(lambda: server.engine.aborted == 1, 1)
    assert not done
    gate.set()
    thread.join()
    assert [c["text"] for c in done[0]["choices"]] == ["one ", "one "]
    wait_until(lambda: server.engine.aborted == 2)


def test_stop_string_can_be_kept(server):
    server.says("the fox jumps")
    assert both_modes(server, stop="fox", include_stop_str_in_output=True) == ("the fox", "stop", "fox")


def test_stop_strings_wait_for_min_tokens(server):
    server.says([*tokenizer().encode("a"), *tokenizer().encode("a"), *tokenizer().encode("b")])
    assert both_modes(server, stop="a", min_tokens=1) == ("a", "stop", "a")
    assert both_modes(server, stop="a", min_tokens=2) == ("aab", "stop", None)


def test_stop_token_ids_are_told_and_end_tokens_are_not(server):
    server.says([65, 66, 67])
    text = tokenizer().decode([65])
    assert both_modes(server, stop_token_ids=[66]) == (text, "stop", 66)
    assert both_modes(server)[1:] == ("stop", None)


def test_stop_string_inside_a_thought(server):
    server.says("<think>a b c</think>d")
    """Stop strings belong to the answer."""
    choice = server.chat(stop=" b").json()["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("a b c", "d")
    server.says("<think>maybe 9?</think>It is 9, no 8.")
    choice = server.chat(stop="9").json()["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("maybe 9?", "It is ")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "9")


def test_a_stop_string_does_not_reach_across_a_tag(server):
    server.says("<think>ab</think>cd")
    message = server.chat(stop="bc").json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("ab", "cd")


def test_characters_split_over_tokens_come_whole(server):
    text = "🦜 Příliš žluťoučký 東京"
    server.says([i for c in text for i in tokenizer().encode(c)], token_s=0.001)
    assert len(tokenizer().encode("🦜")) == 4
    pieces = []
    for data in sse_data(server.chat(stream=True).text):
        if data != "[DONE]":
            pieces.append(json.loads(data)["choices"][0]["delta"].get("content", ""))
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)


def test_an_unfinished_character_at_the_end_is_one_replacement(server):
    server.says(tokenizer().encode("a🦜")[:-1])
    assert both_modes(server)[0] == "a�"


def test_random_tokens_read_as_the_tokenizer_decodes_them(server):
    import random

    dice = random.Random(0)
    for _ in range(20):
        tokens = [dice.randrange(483) for _ in range(40)]
        server.says(tokens, burst=dice.randrange(1, 5))
        assert both_modes(server, ignore_eos=True, max_tokens=40)[0] == tokenizer().decode(
            tokens, skip_special_tokens=True
        )


def new_choice(options, thoughts, vocabulary=None):
    """A choice of a plain completion (thoughts None), or of a chat whose prompt opens a thought or not."""
    vocabulary = vocabulary or tokenizer()
    if thoughts is None:
        return Choice(0, vocabulary, options)
    tags = Tags.of(vocabulary.added_tokens)
    lexer = Lexer(State.REASONING if thoughts else State.CONTENT, tags, [], calls=Calls.NONE)
    return Choice(0, vocabulary, options, lexer=lexer, tags={**tags.block, **tags.argument})


def said(pieces):
    """(reasoning, content) of pieces."""
    message = collect(d for p in pieces for d in p.deltas)
    return message.reasoning or "", message.content or "".join(p.content for p in pieces)


def run_choice(tokens, sizes, options, thoughts):
    """(reasoning, content, finish) of one choice whose tokens arrive in groups."""
    choice = new_choice(options, thoughts)
    pieces, at = [], 0
    for size in sizes:
        if choice.done or at >= len(tokens):
            break
        pieces.append(choice.push(Event("r", tuple(tokens[at : at + size]))))
        at += size
    if not choice.done:
        pieces.append(choice.push(Event("r", tuple(tokens[at:]), finish_reason="length")))
    return (*said(pieces), pieces[-1].finish_reason, pieces[-1].stop_reason)


# Words that make tags, stop strings and broken characters likely.
_WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", " ", "\n", "ab", "a", "b", "🦜", "<th", "é"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    words=st.lists(st.sampled_from(_WORDS), max_size=12),
    cut=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 7), min_size=40, max_size=40),
    stop=st.lists(st.sampled_from(["ab", "ba", "b\n", "🦜a", "<th"]), max_size=2),
    thoughts=st.sampled_from([None, False, True]),
)
def test_any_output_cut_anywhere_gives_the_same_text(words, cut, sizes, stop, thoughts):
    tokens = [i for w in words for i in tokenizer().encode(w)][: cut or None]
    options = TextOptions(stop=tuple(stop))
    whole = run_choice(tokens, [1000], options, thoughts)
    assert run_choice(tokens, sizes, options, thoughts) == whole
    assert run_choice(tokens, [1] * 200, options, thoughts) == whole
    for shown in whole[:2]:
        assert not any(s in shown for s in stop)


def test_tags_that_are_no_tokens_act_by_their_characters():
    class NoTags:
        added_tokens = {}  # noqa: RUF012
        special_ids = frozenset()
        token_bytes = staticmethod(tokenizer().token_bytes)

    tokens = tokenizer().encode("<th<think>a</thi </think>b<tool_call><think></tool_call>c<", special=False)
    expected = ("a</thi", "<thb<tool_call><think></tool_call>c<", "length", None)
    for size in (1, 2, 5, 1000):
        choice = new_choice(TextOptions(), False, NoTags())
        pieces = [choice.push(Event("r", tuple(tokens[i : i + size]))) for i in range(0, len(tokens), size)]
        pieces.append(choice.push(Event("r", finish_reason="length")))
        assert (*said(pieces), pieces[-1].finish_reason, pieces[-1].stop_reason) == expected
