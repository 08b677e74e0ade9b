"""A small vocabulary of our own, for checkpoints with random weights: byte-level BPE with Flint's marks.

Trained on ``embedded/corpus.txt`` with a fixed order of choices, so it is the same everywhere. A bigger vocabulary is
filled with invented words that no text is ever split into, but that show when a random model samples them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, pre_tokenizers

from loaders.tokenizer import PRE_TOKENIZERS, byte_alphabet

EMBEDDED = Path(__file__).parent / "embedded"
PRE = "flint"
EOS = "<|endoftext|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
TAGS = tuple(
    f"<{slash}{tag}>" for tag in ("think", "tool_call", "tool_response", "arg_key", "arg_value") for slash in ("", "/")
)
MARKS = (EOS, *ROLES, *TAGS)
TRAINED = 448  # the corpus supports 461 merges of pairs that occur twice or more
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """tokens: spelling of each id, the marks after the words and ``[PADn]`` last. merges: pairs in order of rank."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    chat_template: str

    def id(self, token: str) -> int:
        """Id of a token by its spelling."""
        return self.tokens.index(token)

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end a turn: the end of the text, and the marks of those who speak next."""
        return [self.id(t) for t in (EOS, "<|user|>", "<|observation|>")]

    def gguf_metadata(self) -> dict[str, Any]:
        """The ``tokenizer.*`` keys of a GGUF file."""
        eos, eot, eom = self.eos_ids
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": PRE,
            "tokenizer.ggml.tokens": list(self.tokens),
            "tokenizer.ggml.token_type": np.asarray(self.types, np.int32),
            "tokenizer.ggml.merges": [f"{a} {b}" for a, b in self.merges],
            "tokenizer.ggml.eos_token_id": eos,
            "tokenizer.ggml.eot_token_id": eot,
            "tokenizer.ggml.eom_token_id": eom,
            "tokenizer.ggml.padding_token_id": eos,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": self.chat_template,
        }

    def write_folder(self, folder: Path, context: int) -> None:
        """tokenizer.json, tokenizer_config.json, chat_template.jinja. context: the model's longest input in tokens."""
        marks = [
            {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": k == _CONTROL}
            for i, (t, k) in enumerate(zip(self.tokens, self.types, strict=True))
            if k in (_CONTROL, _USER_DEFINED)
        ]  # fmt: skip
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        splits = [
            {"type": "Split", "pattern": {"Regex": s}, "behavior": "Isolated", "invert": False}
            for s in PRE_TOKENIZERS[PRE][0]
        ]
        model = {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": PRE_TOKENIZERS[PRE][1],
            "vocab": {t: i for i, (t, k) in enumerate(zip(self.tokens, self.types, strict=True)) if k == _NORMAL},
            "merges": [list(m) for m in self.merges],
        }  # fmt: skip
        _write_json(
            folder / "tokenizer.json",
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": marks,
                "normalizer": None,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
                "post_processor": None,
                "decoder": byte_level,
                "model": model,
            },
        )
        _write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": context,
                "clean_up_tokenization_spaces": False,
                "add_bos_token": False,
                "eos_token": EOS,
                "pad_token": EOS,
                "added_tokens_decoder": {str(m["id"]): {k: v for k, v in m.items() if k != "id"} for m in marks},
            },
        )
        (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


def build(rows: int) -> Vocabulary:
    """A vocabulary for a model with ``rows`` embedding rows. Raises ValueError below 256 bytes plus the marks."""
    least = 256 + len(MARKS)
    if rows < least:
        raise ValueError(f"a vocabulary of {rows} rows cannot hold 256 bytes and {len(MARKS)} marks; need {least}")
    return of_merges(_train(min(TRAINED, rows - least)), rows)


def of_merges(merges: tuple[tuple[str, str], ...], rows: int) -> Vocabulary:
    """256 bytes, the given merges, invented words up to ``rows``, Flint's marks."""
    least = 256 + len(MARKS)
    words = [*sorted(byte_alphabet()), *(a + b for a, b in merges)]
    pads = min(16, max(rows - least - len(merges), 0))
    words += _invented(rows - len(words) - len(MARKS) - pads, taken=set(words))
    tokens = [*words, *MARKS]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), rows)]
    types = [_NORMAL] * len(words) + [_CONTROL] * (1 + len(ROLES)) + [_USER_DEFINED] * len(TAGS) + [_UNUSED] * pads
    template = (EMBEDDED / "chat_template.jinja").read_text(encoding="utf-8")
    return Vocabulary(tuple(tokens), tuple(types), merges, template)


def _invented(count: int, taken: set[str]) -> list[str]:
    """``count`` words of three or four syllables with the byte alphabet's mark for a leading space."""
    syllables = [c + v for c in "bdfghjklmnprstvwz" for v in "aeiou"]
    base, out, n = len(syllables), [], 0
    while len(out) < count:
        word, rest = "", n * 7919 % base**4  # a step without common factor: no repeats, and neighbours look different
        for _ in range(3 if n % 2 else 4):
            word += syllables[rest % base]
            rest //= base
        word = "\u0120" + word
        if word not in taken:
            taken.add(word)
            out.append(word)
        n += 1
    return out


@functools.cache
def _train(count: int) -> tuple[tuple[str, str], ...]:
    """``count`` merges: always the most frequent pair, of equals the first in the order of the alphabet."""
    spelled = {b: c for c, b in byte_alphabet().items()}
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(s), behavior="isolated") for s in PRE_TOKENIZERS[PRE][0]]
    )
    text = (EMBEDDED / "corpus.txt").read_text(encoding="utf-8")
    counts = Counter(piece for piece, _ in splitter.pre_tokenize_str(text))
    words = [([spelled[b] for b in piece.encode()], n) for piece, n in sorted(counts.items())]
    pairs: Counter[tuple[str, str]] = Counter()
    where: dict[tuple[str, str], set[int]] = {}

    def note(w: int, sign: int) -> None:
        symbols, n = words[w]
        for pair in itertools.pairwise(symbols):
            pairs[pair] += sign * n
            where.setdefault(pair, set()).add(w)

    for w in range(len(words)):
        note(w, +1)
    merges = []
    while len(merges) < count:
        best = min(pairs, key=lambda p: (-pairs[p], p))
        if pairs[best] < 2:
            raise ValueError(f"the corpus supports only {len(merges)} merges of {count}")
        merges.append(best)
        for w in sorted(where[best]):
            note(w, -1)
            words[w] = (_merged(words[w][0], best), words[w][1])
            note(w, +1)
        del pairs[best]
    return tuple(merges)


def _merged(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    out, i = [], 0
    while i < len(symbols):
        if tuple(symbols[i : i + 2]) == pair:
            out.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
