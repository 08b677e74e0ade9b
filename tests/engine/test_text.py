"""Streamed text equals text decoded at once, for every way of cutting it."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flint_jax.errors import RequestError
from flint_jax.text import Detokenizer, StopStrings
from loaders.tokenizer import Tokenizer

TOK = Tokenizer.from_folder(Path(__file__).parent.parent / "goldens" / "T2")


def stream(ids, **kwargs):
    detokenizer = Detokenizer(TOK, **kwargs)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(st.permutations(range(512)))
@settings(max_examples=20, deadline=None)
def test_every_id_in_sequences_of_40(order):
    for start in range(0, 512, 40):
        ids = order[start : start + 40]
        assert "".join(stream(ids)) == TOK.decode(ids, skip_special_tokens=True)
        assert "".join(stream(ids, skip_special_tokens=False)) == TOK.decode(ids)


@given(st.text(min_size=1))
@settings(deadline=None)
def test_valid_text_never_shows_a_replacement_character(text):
    ids = TOK.encode(text, special=False)
    assert "".join(stream(ids)) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(stream(ids))


def test_an_emoji_appears_with_its_last_byte():
    ids = TOK.encode("\N{PARROT}")
    assert [TOK.token_bytes(i) for i in ids] == [b"\xf0", b"\x9f", b"\xa6", b"\x9c"]
    assert stream(ids) == ["", "", "", "\N{PARROT}", ""]
    assert stream(ids[:3]) == ["", "", "", "\ufffd"]
    assert stream([*ids[:2], *TOK.encode("a")]) == ["", "", "\ufffda", ""]


def test_special_tokens_are_skipped_only_when_asked():
    ids = TOK.encode("a<|user|><think>b")
    assert "".join(stream(ids)) == "a<think>b"
    assert "".join(stream(ids, skip_special_tokens=False)) == "a<|user|><think>b"


def test_a_push_does_not_read_earlier_tokens():
    class Counting:
        special_ids = frozenset()
        calls = 0

        def token_bytes(self, token_id):
            self.calls += 1
            return b"ab"

    tok = Counting()
    detokenizer = Detokenizer(tok)
    for _ in range(1000):
        detokenizer.push(1)
    assert tok.calls == 1000


# -- stop strings ----------------------------------------------------------------------------------------------------


def run(stops, pieces, **kwargs):
    watch, out = StopStrings(stops, **kwargs), []
    for piece in pieces:
        text, hit = watch.push(piece)
        out.append(text)
        assert hit == (watch.matched is not None)
    return [*out, watch.flush()], watch.matched


def test_fox_jumps():
    assert run(["fox jumps"], ["the f", "ox j", "umps over"]) == (["the ", "", "", ""], "fox jumps")


def test_a_tail_that_came_to_nothing_is_released():
    assert run(["fox jumps"], ["the f", "ox j", "ogs"]) == (["the ", "", "fox jogs", ""], None)
    assert run(["fox jumps"], ["the f", "ox j"]) == (["the ", "", "fox j"], None)


def test_only_the_shortest_necessary_tail_is_held():
    assert run(["aab"], ["aaaa"]) == (["aa", "aa"], None)
    assert run(["abab", "bc"], ["xab"]) == (["x", "ab"], None)


def test_text_after_a_hit_is_dropped():
    assert run(["b"], ["abc", "d"]) == (["a", "", ""], "b")


def test_of_stop_strings_that_end_together_the_longest_wins():
    assert run(["b", "ab"], ["xa", "b"]) == (["x", "", ""], "ab")


def test_include_stop_string():
    assert run(["fox"], ["a f", "oxy"], include_stop_str_in_output=True) == (["a ", "fox", ""], "fox")


def test_no_stop_strings_hold_nothing():
    assert run([], ["abc"]) == (["abc", ""], None)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [1]])
def test_empty_stop_strings_are_refused(stops):
    with pytest.raises(RequestError) as error:
        StopStrings(stops)
    assert error.value.param == "stop"


def brute(text, stops):
    """(shown, matched): the stop string that is complete first, of those that end together the longest."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


@given(st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_every_split_gives_the_same(text, stops):
    expected = brute(text, stops)
    for a in range(len(text) + 1):
        for b in range(a, len(text) + 1):
            out, matched = run(stops, [text[:a], text[a:b], text[b:]])
            assert ("".join(out), matched) == expected
    out, matched = run(stops, list(text))
    assert ("".join(out), matched) == expected


@given(st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_nothing_is_held_without_need(text, stops):
    watch, shown = StopStrings(stops), ""
    for n, char in enumerate(text):
        out, hit = watch.push(char)
        shown += out
        if hit:
            return
        tails = [k for s in stops for k in range(1, len(s)) if text[: n + 1].endswith(s[:k])]
        assert len(shown) == n + 1 - max(tails, default=0)
