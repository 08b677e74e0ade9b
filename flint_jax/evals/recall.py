"""Finding a fact again: in a long record before the question, and in what was said some turns ago."""

from __future__ import annotations

import random

from flint_jax.evals.item import TRAIN, Item, assistant, choose, user
from flint_jax.evals.numbers import arithmetic, lists
from flint_jax.evals.talk import talk
from flint_jax.evals.words import COMMON, NAMES, invented, listed, name, several, wrapped

_FIELDS = ("code", "number", "locker", "room", "badge")
_LINES = ("The {f} of {k} is {v}.", "{k} has {f} {v}.", "{f} of {k}: {v}.", "For {k} the {f} is {v}.")
_ASK = (
    "What is the {f} of {k}?",
    "The {f} of {k}?",
    "And the {f} of {k}?",
    "{k}?",
    "Find the {f} of {k}.",
    "Tell me the {f} of {k}.",
    "Which {f} does {k} have?",
    "I need the {f} of {k}.",
)
_ASK_MANY = ("What are the {f}s of {k}?", "Give me the {f}s of {k}.", "List the {f}s of {k}.")


def record(rng: random.Random, split: str, lines: int, *, asked: int = 1, line: int | None = None) -> Item:
    """``lines`` facts about invented names, then a question about ``asked`` of them (about line ``line`` if given)."""
    field, form = rng.choice(_FIELDS), rng.choice(_LINES)
    keys, values = several(rng, split, lines), [str(rng.randint(1000, 9999)) for _ in range(lines)]
    if split == TRAIN and rng.random() < 0.3:  # known words, too: a name of one token is found more easily
        keys = rng.sample(NAMES + COMMON, lines) if lines <= 60 else keys
        values = [rng.choice(COMMON) if rng.random() < 0.3 else v for v in values]
    text = "\n".join(form.format(f=field, k=k, v=v) for k, v in zip(keys, values, strict=True))
    wanted = [line] if line is not None else rng.sample(range(lines), min(asked, lines))
    names = [keys[i] for i in wanted]
    if len(wanted) == 1:
        question = wrapped(rng, split, choose(rng, split, _ASK).format(f=field, k=names[0]))
        answer = f"The {field} of {names[0]} is {values[wanted[0]]}."
    else:
        question = choose(rng, split, _ASK_MANY).format(f=field, k=listed(names))
        answer = ", ".join(f"{keys[i]}: {values[i]}" for i in wanted) + "."
    thinking = rng.random() < 0.5
    thought = f"I look for {listed(names)} in the record." if thinking else ""
    prompt = user(f"Here is a record.\n{text}\n{question}")
    return Item("look-up", f"{lines} lines", (prompt,), answer, thought, thinking=thinking)


_FACTS = (
    ("My {} is called {}.", "Noted: your {} is called {}.", "What is my {} called?", "Your {} is called {}."),
    ("My favourite {} is {}.", "Noted: your favourite {} is {}.", "What is my favourite {}?",
     "Your favourite {} is {}."),
    ("The word for my {} is {}.", "Noted: the word for your {} is {}.", "What is the word for my {}?",
     "The word for your {} is {}."),
    ("My {} is {}.", "Noted: your {} is {}.", "What is my {}?", "Your {} is {}."),
)  # fmt: skip
_THINGS = (
    "dog",
    "cat",
    "boat",
    "colour",
    "town",
    "street",
    "teacher",
    "horse",
    "garden",
    "song",
    "bakery",
    "team",
    "name",
    "city",
    "friend",
    "sister",
    "brother",
    "school",
)


def memory(rng: random.Random, split: str) -> Item:
    """One to three facts told by the user, small talk between, one of them asked for."""
    told = []
    for thing in rng.sample(_THINGS, rng.randint(1, 3)):
        word = rng.choice((name, invented))(rng, split)
        told.append((rng.choice(_FACTS), thing, word))
    messages = []
    for (say, note, _, _), thing, word in told:
        messages += [user(say.format(thing, word)), assistant(note.format(thing, word))]
        for _ in range(rng.choice((0, 0, 1, 2))):
            other = rng.choice((talk, arithmetic, lists))(rng, split)
            messages += [*other.messages, assistant(other.content)]
    (_, _, ask, reply), thing, word = rng.choice(told)
    thinking = rng.random() < 0.5
    thought = "The user told me this before." if thinking else ""
    turns = len(messages) // 2
    ended = (*messages, user(ask.format(thing)))
    return Item("memory", f"{turns} turns", ended, reply.format(thing, word), thought, thinking=thinking)


def telling(rng: random.Random, split: str) -> Item:
    """The user tells a fact; the reply repeats it."""
    (say, note, _, _), thing = rng.choice(_FACTS), rng.choice(_THINGS)
    word = rng.choice((name, invented))(rng, split)
    thinking = rng.random() < 0.5
    thought = "The user tells me something to remember." if thinking else ""
    return Item(
        "memory", "telling", (user(say.format(thing, word)),), note.format(thing, word), thought, thinking=thinking
    )
