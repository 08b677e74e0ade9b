"""The data of the example tasks, made here: nothing is downloaded."""

from datasets import Dataset, DatasetDict

_THINGS = (("harbour", "quiet"), ("garden", "green"), ("river", "wide"), ("window", "open"), ("winter", "long"))
_WORDS = ("quiet", "green", "wide", "open")


def questions(**_) -> DatasetDict:
    """Four choices each, of different lengths, behind one context."""
    rows = [
        {
            "question": f"The {thing} is",
            "choices": [*_WORDS[:3], "very " * (i % 3) + word],
            "answer": 3,
        }
        for i, (thing, word) in enumerate(_THINGS)
    ]
    return DatasetDict({"test": Dataset.from_list(rows)})


def texts(**_) -> DatasetDict:
    """Texts for perplexity, the last one longer than a small context."""
    rows = [{"text": f"The {thing} is {word}."} for thing, word in _THINGS]
    rows.append({"text": " ".join(f"The {thing} was {word}, and nobody knew why." for thing, word in _THINGS * 4)})
    return DatasetDict({"test": Dataset.from_list(rows)})


def prompts(**_) -> DatasetDict:
    """Prompts to go on from."""
    rows = [{"prompt": f"The {thing}", "target": word} for thing, word in _THINGS]
    return DatasetDict({"test": Dataset.from_list(rows)})
