"""A few sentences as tokens, right-padded: what the research examples look at."""

from pathlib import Path

import numpy as np

import loaders

CORPUS = Path(loaders.__file__).parent / "embedded" / "corpus.txt"


def rows(tokenizer, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32 [count, length], lengths int32 [count]): different stretches of the embedded corpus."""
    ids = tokenizer.encode(CORPUS.read_text(encoding="utf-8"))
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return np.stack([ids[s : s + length] for s in starts]).astype(np.int32), np.full(count, length, np.int32)
