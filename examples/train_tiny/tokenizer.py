"""The vocabulary of the small model: byte-level BPE over the exercises, digits left single, Flint's marks behind."""

from __future__ import annotations

import random
import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.train_tiny.data import exercise, render
from loaders import vocabulary
from loaders.tokenizer import PRE_TOKENIZERS, byte_alphabet
from loaders.vocabulary import MARKS, PRE, Vocabulary

ROWS = 1024


def train(template, rows: int = ROWS, items: int = 6000, seed: int = 0) -> Vocabulary:
    """Train on ``items`` rendered exercises. Numbers are taken out first, so that every digit stays a token."""
    rng = random.Random(seed)
    marks = re.compile("|".join(map(re.escape, MARKS)) + r"|\d+")
    texts = []
    for _ in range(items):
        prompt, reply, _ = render(exercise(rng), template)
        texts += marks.split(prompt + reply)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(s), behavior="isolated") for s in PRE_TOKENIZERS[PRE][0]]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    size = rows - len(MARKS)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(byte_alphabet()), show_progress=False, min_frequency=2
    )
    bpe.train_from_iterator(texts, trainer)
    merges = tuple(tuple(pair) for pair in _merges(bpe))
    return vocabulary.of_merges(merges, rows)


def _merges(bpe: Tokenizer) -> list[list[str]]:
    import json

    pairs = json.loads(bpe.to_str())["model"]["merges"]
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in pairs]
