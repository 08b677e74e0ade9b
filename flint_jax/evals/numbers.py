"""Arithmetic with the columns written out, and small tasks on lists.

Range: sums and differences of numbers up to 999, products of a number up to 99 and a digit, with thinking; sums and
differences up to 99 without. Results are never negative.
"""

from __future__ import annotations

import random

from flint_jax.evals.item import TRAIN, Item, choose, draw, user
from flint_jax.evals.words import COMMON, around, wrapped

_ASK = (
    "What is {}?",
    "Compute {}.",
    "{} = ?",
    "How much is {}?",
    "Please calculate {}.",
    "I need the result of {}.",
    "What does {} make?",
    "What do I get for {}?",
    "Give me {}.",
    "Give me the result of {}, please.",
    "Tell me {}.",
    "Tell me what {} makes.",
    "Can you compute {}?",
    "Could you work out {}?",
    "Can you do {} for me?",
    "Please work out {}.",
    "Solve {}.",
    "Calculate {}, please.",
    "What's {}?",
    "How much do I get with {}?",
    "Do you know what {} is?",
    "And {}?",
    "Work out {}, please.",
    "Can you tell me what {} is?",
)


def _asked(rng: random.Random, split: str) -> str:
    """One of the questions; in training also any words with the sum among them."""
    if split == TRAIN and rng.random() < 0.3:
        end = rng.choice(("", f" {around(rng, rng.randint(1, 2))}"))
        text = f"{around(rng, rng.randint(0, 5))} {{}}{end}{rng.choice('.?')}".strip()
        return text[0].upper() + text[1:]
    return choose(rng, split, _ASK, 2)


_SAID = {"+": "plus", "-": "minus", "*": "times"}


def _spelled(rng: random.Random, split: str, a: int, sign: str, b: int) -> str:
    kind = rng.random() if split == TRAIN else 1.0
    return f"{a}{sign}{b}" if kind < 0.15 else f"{a} {_SAID[sign]} {b}" if kind < 0.3 else f"{a} {sign} {b}"


def arithmetic(rng: random.Random, split: str) -> Item:
    """One sum, difference or product."""
    thinking = rng.random() < (0.65 if split == TRAIN else 0.75)  # without a thought it takes more practice
    kinds = ("add", "subtract", "multiply") if thinking else ("add", "subtract")
    kind = rng.choice(kinds)

    def make(rng):
        top = 10 ** rng.choice((1, 2, 3) if thinking and kind != "multiply" else (1, 2)) - 1
        a, b = rng.randint(0, top), rng.randint(0, 9 if kind == "multiply" else top)
        if kind == "subtract" and b > a:
            a, b = b, a
        return (a, b), f"{kind} {a} {b}"

    a, b = draw(rng, split, make)
    sign, result, columns = {
        "add": ("+", a + b, _add),
        "subtract": ("-", a - b, _subtract),
        "multiply": ("*", a * b, _multiply),
    }[kind]
    question = wrapped(rng, split, _asked(rng, split).format(_spelled(rng, split, a, sign, b)))
    thought = columns(a, b) if thinking else ""
    return Item("arithmetic", kind, (user(question),), str(result), thought, thinking=thinking)


def _digits(n: int, width: int) -> list[int]:
    return [n // 10**i % 10 for i in range(width)]


def _add(a: int, b: int) -> str:
    width, carry, steps = len(str(max(a, b))), 0, []
    for x, y in zip(_digits(a, width), _digits(b, width), strict=True):
        total = x + y + carry
        steps.append(f"{x} + {y} + {carry} = {total}")
        carry = total // 10
    return ", ".join(steps) + f". So {a + b}."


def _subtract(a: int, b: int) -> str:
    width, borrow, steps = len(str(a)), 0, []
    for x, y in zip(_digits(a, width), _digits(b, width), strict=True):
        less = x - y - borrow < 0
        steps.append(f"{x + 10 * less} - {y} - {borrow} = {x - y - borrow + 10 * less}")
        borrow = int(less)
    return ", ".join(steps) + f". So {a - b}."


def _multiply(a: int, b: int) -> str:
    carry, steps = 0, []
    for x in _digits(a, len(str(a))):
        total = x * b + carry
        steps.append(f"{x} * {b} + {carry} = {total}")
        carry = total // 10
    return ", ".join(steps) + f". So {a * b}."


_PLACES = ("first", "second", "third", "fourth", "fifth", "sixth")
_LIST_ASK = {
    "reverse": (
        "Reverse this list: {}.",
        "Write this list backwards: {}.",
        "Reverse the order of {}.",
        "Reverse these: {}.",
        "Now in reverse: {}.",
        "I want the reverse of {}.",
        "Turn this list around: {}.",
        "Turn these around: {}.",
        "Show me these backwards: {}.",
        "What is this list in reverse: {}?",
        "Please reverse {}.",
        "From last to first, please: {}.",
        "Give me this list from last to first: {}.",
        "Say these in reverse: {}.",
        "Can you reverse this list: {}?",
        "Give me the reverse order of {}.",
        "Give me these in reverse order: {}.",
    ),
    "sort": (
        "Sort these numbers: {}.",
        "Put these numbers in order: {}.",
        "Order these: {}.",
        "Sort {}.",
        "Write these from small to large: {}.",
        "Sort these from small to large: {}.",
        "What is the order of these numbers: {}?",
        "Sort this list: {}.",
        "Sort this list of numbers: {}.",
        "Please sort {}.",
        "Can you sort these numbers: {}?",
        "Put these in order: {}.",
        "Put {} in order.",
        "Order this list from small to large: {}.",
        "Order these numbers, please: {}.",
        "From small to large, please: {}.",
        "Give me these numbers in order: {}.",
        "The smallest first: {}.",
        "Order these from small to large: {}.",
    ),
    "count": (
        "How many words are in this list: {}?",
        "Count these words: {}.",
        "How long is this list: {}?",
        "The length of this list, please: {}.",
        "What is the number of words in this list: {}?",
        "How many words do you see: {}?",
        "Tell me the length of {}.",
        "How many words are there: {}?",
        "How many words are these: {}?",
        "How many are these: {}?",
        "How many entries does this list have: {}?",
        "Please count these words: {}.",
        "Can you count the words of this list: {}?",
        "Count {}.",
        "I want the number of words in this list: {}.",
        "What is the length of {}?",
        "How long is the list {}?",
        "What is the length of this list: {}?",
    ),
    "pick": (
        "What is the {place} word of this list: {}?",
        "Name the {place} word: {}.",
        "What is the {place} word: {}?",
        "I want the {place} word of {}.",
        "Tell me the {place} word of this list: {}.",
        "Which word is the {place} one: {}?",
        "Which is the {place} word: {}?",
        "Which word comes {place}: {}?",
        "Which word is {place} here: {}?",
        "What comes {place}: {}?",
        "Give me the {place} word: {}.",
        "Give me the {place} of {}.",
        "The {place} word, please: {}.",
        "Pick the {place} word: {}.",
        "Find the {place} word in this list: {}.",
        "What is {place} in this list: {}?",
        "Can you name the {place} word of {}?",
        "Which word is {place} in: {}?",
    ),
    "largest": (
        "What is the largest of {}?",
        "Which number is the largest: {}?",
        "What is the largest number: {}?",
        "I want the largest of {}.",
        "Give me the largest: {}.",
        "Which is the largest of {}?",
        "Which one is largest: {}?",
        "Find the largest of {}.",
        "The largest number, please: {}.",
        "Tell me the largest number of {}.",
        "Tell me which is the largest: {}.",
        "Name the largest number: {}.",
        "Pick the largest: {}.",
        "Can you find the largest of these numbers: {}?",
        "Find the largest number: {}.",
    ),
}


def lists(rng: random.Random, split: str) -> Item:
    """Reverse, sort, count, pick, largest: 2 to 6 entries."""
    kind = rng.choice(tuple(_LIST_ASK))
    numeric = kind in ("sort", "largest")

    def make(rng):
        count = rng.randint(2, 6)
        entries = rng.sample(range(100), count) if numeric else rng.sample(COMMON, count)
        return entries, kind + str(entries)

    entries = draw(rng, split, make)
    place = rng.randrange(len(entries))
    shown = ", ".join(map(str, entries))
    question = choose(rng, split, _LIST_ASK[kind]).format(shown, place=_PLACES[place])
    question = wrapped(rng, split, question, closing=False)  # behind a list it would be one more entry
    numbered = ", ".join(f"{i} {e}" for i, e in enumerate(entries, 1))
    answer, thought = {
        "reverse": (", ".join(map(str, entries[::-1])), f"In order: {numbered}. From {len(entries)} to 1."),
        "sort": (", ".join(map(str, sorted(entries))), f"{len(entries)} numbers, the smallest is {min(entries)}."),
        "count": (str(len(entries)), f"{numbered}."),
        "pick": (str(entries[place]), f"{numbered}. Number {place + 1}."),
        "largest": (str(max(entries)), _champion(entries) if numeric else ""),
    }[kind]
    thinking = rng.random() < (0.7 if split == TRAIN else 0.8)
    return Item("lists", kind, (user(question),), answer, thought if thinking else "", thinking=thinking)


def _champion(entries: list[int]) -> str:
    best, steps = entries[0], [str(entries[0])]
    for n in entries[1:]:
        best = max(best, n)
        steps.append(f"{n} so {best}")
    return ", ".join(steps) + "."
