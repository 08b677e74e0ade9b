"""Finding a fact again: in a long record before the question, and in what was said some turns ago."""

from __future__ import annotations

import dataclasses
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
    "Give me the {f} of {k}.",
    "What {f} does {k} have?",
    "What is {k}'s {f}?",
    "What is the {f} for {k}?",
    "Which {f} is that of {k}?",
    "Show me the {f} of {k}.",
    "Look up the {f} of {k}.",
    "Can you find the {f} of {k}?",
    "Do you see the {f} of {k}?",
    "What does it say for {k}?",
    "I want to know the {f} of {k}.",
    "Now the {f} of {k}.",
    "{k}: which {f}?",
    "I need the {f} of {k}.",
)
_INTRO = (
    "Here is a record.",
    "Here is a list.",
    "Read this:",
    "This is the record:",
    "Look at this list.",
    "The list:",
    "",
)
_ASK_MANY = (
    "What are the {f}s of {k}?",
    "Tell me the {f}s of {k}.",
    "Find the {f}s of {k}.",
    "The {f}s of {k}?",
    "I need the {f}s of {k}.",
    "Give me the {f}s of {k}.",
    "List the {f}s of {k}.",
)


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
    intro = rng.choice(_INTRO) if split == TRAIN and rng.random() < 0.3 else _INTRO[0]
    prompt = user(f"{intro}\n{text}\n{question}".lstrip())
    return Item("look-up", f"{lines} lines", (prompt,), answer, thought, thinking=thinking)


# Ways to tell a fact of {0} and {1}, what the model notes, ways to ask for it, the answer.
_FACTS = (
    (
        ("My {} is called {}.", "I have a {} called {}.", "I have a {} named {}.", "My {} has the name {}.",
         "Remember that my {} is called {}."),
        "Noted: your {} is called {}.",
        ("What is my {} called?", "What is the name of my {}?", "How is my {} called?", "Tell me the name of my {}.",
         "Do you know what my {} is called?", "Do you know the name of my {}?", "Do you remember the name of my {}?",
         "Can you say what my {} is called?", "Say the name of my {}.", "And what is my {} called?",
         "Do you remember what my {} is called?"),
        "Your {} is called {}.",
    ),
    (
        ("My favourite {} is {}.", "My favourite {}: {}.", "The {} that I like best is {}.",
         "Remember that my favourite {} is {}."),
        "Noted: your favourite {} is {}.",
        ("What is my favourite {}?", "Which {} do I like best?", "Tell me my favourite {}.", "My favourite {}?",
         "Do you know my favourite {}?", "Do you know which {} I like best?", "Can you name my favourite {}?",
         "Do you remember which {} I like best?", "Say my favourite {}.", "And my favourite {}?",
         "Do you remember my favourite {}?"),
        "Your favourite {} is {}.",
    ),
    (
        ("The word for my {} is {}.", "The word of my {} is {}.", "For my {} the word is {}.",
         "Remember: the word for my {} is {}."),
        "Noted: the word for your {} is {}.",
        ("What is the word for my {}?", "Which word is for my {}?", "Tell me the word for my {}.",
         "The word for my {}?", "Do you know the word for my {}?", "Can you say the word for my {}?",
         "Do you remember which word is for my {}?", "Say the word for my {}.", "And the word for my {}?",
         "Do you remember the word for my {}?"),
        "The word for your {} is {}.",
    ),
    (
        ("My {} is {}.", "I tell you that my {} is {}.", "My {} would be {}.", "Remember that my {} is {}."),
        "Noted: your {} is {}.",
        ("What is my {}?", "What was my {}?", "Tell me my {}.", "What did I say is my {}?",
         "Do you know my {}?", "Do you know what my {} is?", "Can you name my {}?", "Do you remember what my {} is?",
         "Say my {}.", "And my {}?",
         "Do you remember my {}?"),
        "Your {} is {}.",
    ),
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


_BEFORE = (
    "Hi, ",
    "Hello, ",
    "Hi! ",
    "Well, ",
    "By the way, ",
    "Note that ",
    "Listen: ",
    "So, ",
    "I want you to know that ",
)


def _told(rng: random.Random, split: str, say: tuple[str, ...], thing: str, word: str) -> str:
    """The user's sentence, in training sometimes after other words."""
    text = choose(rng, split, say).format(thing, word)
    if split == TRAIN and rng.random() < 0.25:
        text = rng.choice(_BEFORE) + (text[0].lower() if text[1] != " " else text[0]) + text[1:]
    return text


def memory(rng: random.Random, split: str) -> Item:
    """One to three facts told by the user, small talk between, one of them asked for."""
    told = []
    for thing in rng.sample(_THINGS, rng.randint(1, 3)):
        word = rng.choice((name, invented))(rng, split)
        told.append((rng.choice(_FACTS), thing, word))
    messages = []
    for (say, note, _, _), thing, word in told:
        messages += [user(_told(rng, split, say, thing, word)), assistant(note.format(thing, word))]
        for _ in range(rng.choice((0, 0, 1, 2))):
            other = rng.choice((talk, arithmetic, lists))(rng, split)
            messages += [*other.messages, assistant(other.content)]
    (_, _, ask, reply), thing, word = rng.choice(told)
    thinking = rng.random() < 0.5
    thought = "The user told me this before." if thinking else ""
    turns = len(messages) // 2
    ended = (*messages, user(wrapped(rng, split, choose(rng, split, ask).format(thing))))
    return Item("memory", f"{turns} turns", ended, reply.format(thing, word), thought, thinking=thinking)


def later(rng: random.Random, split: str, item: Item) -> Item:
    """The same exercise after one to four others, as a chat goes on: what was thought then is gone."""
    before = []
    for _ in range(rng.randint(1, 4)):
        other = rng.choice((talk, arithmetic, arithmetic, lists, telling))(rng, split)
        before += [*other.messages, assistant(other.content)]
    return dataclasses.replace(item, messages=(*before, *item.messages))


def telling(rng: random.Random, split: str) -> Item:
    """The user tells a fact; the reply repeats it."""
    (say, note, _, _), thing = rng.choice(_FACTS), rng.choice(_THINGS)
    word = rng.choice((name, invented))(rng, split)
    thinking = rng.random() < 0.5
    thought = "The user tells me something to remember." if thinking else ""
    return Item(
        "memory",
        "telling",
        (user(_told(rng, split, say, thing, word)),),
        note.format(thing, word),
        thought,
        thinking=thinking,
    )
