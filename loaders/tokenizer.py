"""Tokenizer: byte-level BPE from a Hugging Face folder or from GGUF metadata alone, over the ``tokenizers`` library.

Two encoders are kept. The full one maps the spelling of a control token (``<|user|>``) to its id; the plain one has no
added tokens, so the same characters become ordinary text. That is how message text cannot forge a turn.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from flint_jax.errors import TokenizerError

# -- pre-tokenizers that a GGUF may name -----------------------------------------------------------------------------

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_FLINT_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "|".join(
        (
            rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?",
            rf"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?",
            r" ?[\p{P}\p{S}]+[\r\n]*",
            _SPACES,
        )
    ),
)
_GLM4_SPLITS = ("|".join((_CONTRACTION, rf"{_LEAD}\p{{L}}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", _SPACES)),)

# name in tokenizer.ggml.pre -> (splits applied one after the other, whether a word that is one token skips merging)
PRE_TOKENIZERS: dict[str, tuple[tuple[str, ...], bool]] = {
    "flint": (_FLINT_SPLITS, False),
    "glm4": (_GLM4_SPLITS, True),
}

# Spellings that end a turn in any vocabulary, whatever the metadata says: the names that llama.cpp knows.
END_OF_TURN_NAMES = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<turn|>",
        "<end_of_utterance>",
        "</s>",
        "<eos>",
        "[EOS]",
        "[EOT]",
        "<EOT>",
        "_<EOT>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet: printable Latin-1 is itself, the 68 others are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_LONG = 4096  # characters; encoding fewer takes under 3 ms


def _encoding(encoder: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """The encoding of ``text``. Of a long one as a batch of one: unlike ``encode`` that lets other threads run, which
    else stand still for all of it, 1.5 s for a prompt of a million characters.
    """
    if len(text) <= _LONG:
        return encoder.encode(text, add_special_tokens=False)
    return encoder.encode_batch([text], add_special_tokens=False)[0]


class Tokenizer:
    """Text to token ids and back. Thread-safe; build it with ``from_folder`` or ``from_gguf``.

    Attributes:
        vocab_size: number of known tokens. The model may have more rows; an id beyond decodes to nothing.
        added_tokens: spelling -> id of every token that is matched in text as a whole.
        unused_ids: ids below vocab_size that stand for nothing.
        special_ids: the added tokens that ``skip_special_tokens`` drops (``<think>`` and the like are not among them).
        eog_ids: ids that end generation, the EOS token first.
        add_bos: whether ``add_special_tokens=True`` puts something in front of the text.
        chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        full: tokenizers.Tokenizer,
        plain: tokenizers.Tokenizer,
        *,
        strings: Sequence[str],
        added_tokens: Mapping[str, int],
        special_ids: Iterable[int],
        unused_ids: Iterable[int] = (),
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        eog_ids: Iterable[int] = (),
        add_bos: bool = False,
        add_eos: bool = False,
        chat_template: str | None = None,
    ):
        self._full, self._plain = full, plain
        self._strings = list(strings)
        self.added_tokens = dict(added_tokens)
        self.special_ids = frozenset(special_ids)
        self._added_ids = frozenset(self.added_tokens.values())
        self._unused = self.unused_ids = frozenset(unused_ids)
        self._bytes: dict[int, bytes] = {}
        self.bos_token, self.eos_token, self.pad_token = bos_token, eos_token, pad_token
        self.eog_ids = tuple(dict.fromkeys(int(i) for i in eog_ids))
        self.chat_template = chat_template
        self._prefix, self._suffix = self._frame(add_bos, add_eos)
        self.add_bos = bool(self._prefix)

    # -- text to ids and back ------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of known tokens."""
        return len(self._strings)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """What ``add_special_tokens`` puts behind a text."""
        return self._suffix

    def encode(self, text: str, *, special: bool = True, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``.

        special: match added tokens (``<|user|>``, ``<think>``) in the text. False encodes those characters as ordinary
        text. add_special_tokens: put the start and end tokens around it that the tokenizer's files ask for.
        Lone surrogates, which UTF-8 cannot carry, become U+FFFD.
        """
        ids = self._raw_encode(self._full if special else self._plain, text)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def pieces(self, text: str) -> list[int | str]:
        """The text cut at its added tokens: their ids, and the strings between them as they are."""
        text = _without_lone_surrogates(text)
        encoding = _encoding(self._full, text)
        out, at = [], 0
        for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if i in self._added_ids:
                out += [text[at:start], i] if start > at else [i]
                at = end
        return [*out, text[at:]] if at < len(text) else out

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        skip = self.special_ids if skip_special_tokens else ()
        return b"".join(self.token_bytes(i) for i in ids if i not in skip).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes that the token stands for; empty for unused ids and ids beyond the vocabulary."""
        token_id = int(token_id)
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary spells it (byte-level alphabet); ``[PADn]`` for an id beyond the vocabulary."""
        token_id = int(token_id)
        return self._strings[token_id] if 0 <= token_id < len(self._strings) else f"[PAD{token_id}]"

    def token_id(self, string: str) -> int | None:
        """Id of a token by its vocabulary spelling, or None."""
        return self.added_tokens.get(string, self._full.token_to_id(string))

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._unused or not 0 <= token_id < len(self._strings):
            return b""
        string = self._strings[token_id]
        if token_id not in self._added_ids:
            alphabet = byte_alphabet()
            try:
                return bytes([alphabet[c] for c in string])
            except KeyError:
                pass  # not spelled in the byte alphabet: the string is meant as it is
        return string.encode("utf-8")

    @staticmethod
    def _raw_encode(encoder: tokenizers.Tokenizer, text: str) -> list[int]:
        return _encoding(encoder, _without_lone_surrogates(text)).ids

    def _frame(self, add_bos: bool, add_eos: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids that ``add_special_tokens`` puts around a text: the post-processor's, else BOS and EOS if asked for."""
        body = self._full.encode("a", add_special_tokens=False).ids
        framed = self._full.encode("a", add_special_tokens=True).ids
        at = next((i for i in range(len(framed) - len(body) + 1) if framed[i : i + len(body)] == body), 0)
        prefix, suffix = framed[:at], framed[at + len(body) :]
        bos, eos = self._id_or_none(self.bos_token), self._id_or_none(self.eos_token)
        if add_bos and not prefix and bos is not None:
            prefix = [bos]
        if add_eos and not suffix and eos is not None:
            suffix = [eos]
        return tuple(prefix), tuple(suffix)

    def _id_or_none(self, token: str | None) -> int | None:
        return None if token is None else self.token_id(token)

    def state(self) -> dict[str, Any]:
        """What tokenizer.json would hold: the tokenizers library's own description."""
        return json.loads(self._full.to_str())

    # -- from files ----------------------------------------------------------------------------------------------

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From ``tokenizer.json`` and, where present, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Stop ids also come from ``generation_config.json`` and ``config.json``. Raises TokenizerError.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        state = _read_json(path, required=True)
        config = _read_json(folder / "tokenizer_config.json")
        _demand_byte_level(state, path)
        state = state | {"truncation": None, "padding": None}
        plain_state = _without_added_tokens(state)
        full, plain = _from_state(state, path), _from_state(plain_state, path)

        vocab = full.get_vocab(with_added_tokens=True)
        strings = [""] * (max(vocab.values(), default=-1) + 1)
        known = [False] * len(strings)
        for string, i in vocab.items():
            strings[i], known[i] = string, True
        added = {t.content: i for i, t in full.get_added_tokens_decoder().items()}
        special = [i for i, t in full.get_added_tokens_decoder().items() if t.special]
        tokens = {k: _token_text(config.get(f"{k}_token")) for k in ("bos", "eos", "pad")}

        eog = [added.get(tokens["eos"], vocab.get(tokens["eos"]))]
        for name in ("generation_config.json", "config.json"):
            ids = _read_json(folder / name).get("eos_token_id")
            eog += ids if isinstance(ids, list) else [ids]
        eog += [i for string, i in added.items() if string in END_OF_TURN_NAMES]
        return cls(
            full,
            plain,
            strings=strings,
            added_tokens=added,
            special_ids=special,
            unused_ids=[i for i, k in enumerate(known) if not k],
            bos_token=tokens["bos"],
            eos_token=tokens["eos"],
            pad_token=tokens["pad"],
            eog_ids=[i for i in eog if i is not None],
            add_bos=bool(config.get("add_bos_token")),
            add_eos=bool(config.get("add_eos_token")),
            chat_template=_folder_template(folder, config),
        )

    @classmethod
    def of_bytes(cls) -> Tokenizer:
        """One token a byte, and a template that writes "role: content" lines. Nothing a model was trained on."""
        strings = [char for char, _ in sorted(byte_alphabet().items(), key=lambda item: item[1])]
        full, plain = _build(strings, [_NORMAL] * 256, [], {}, set(), (), False)
        return cls(full, plain, strings=strings, added_tokens={}, special_ids=(), chat_template=_BYTES_TEMPLATE)

    @classmethod
    def from_gguf(cls, meta: Mapping[str, Any]) -> Tokenizer:
        """From GGUF metadata (``tokenizer.*`` keys; arrays as lists or numpy). Raises TokenizerError."""

        def get(key, default=None):
            return meta.get(f"tokenizer.ggml.{key}", default)

        model, pre = get("model"), get("pre")
        if model != "gpt2":
            raise TokenizerError(
                f"tokenizer.ggml.model is {model!r}; need 'gpt2' (byte-level BPE). Give a folder with tokenizer.json."
            )
        if pre not in PRE_TOKENIZERS:
            raise TokenizerError(
                f"tokenizer.ggml.pre is {pre!r}, a splitting rule we do not know; a guess would split text wrongly. "
                f"Known: {', '.join(sorted(PRE_TOKENIZERS))}. Give a folder with tokenizer.json."
            )
        strings = _as_list(get("tokens"))
        if not strings:
            raise TokenizerError("tokenizer.ggml.tokens is missing or empty. Give a folder with tokenizer.json.")
        kinds = _as_list(get("token_type")) or [_NORMAL] * len(strings)
        if len(kinds) != len(strings):
            raise TokenizerError(f"tokenizer.ggml: {len(strings)} tokens but {len(kinds)} token types; need as many.")
        # llama.cpp cuts at the first space after the first character, so that a piece may begin with one
        merges = [(m[: m.index(" ", 1)], m[m.index(" ", 1) + 1 :]) for m in _checked_merges(_as_list(get("merges")))]

        def named(key):
            i = get(f"{key}_token_id")
            if i is None:
                return None
            if not 0 <= int(i) < len(strings):
                raise TokenizerError(f"tokenizer.ggml.{key}_token_id = {i} is outside the {len(strings)} tokens.")
            return int(i)

        added = {strings[i]: i for i in reversed(range(len(strings))) if strings[i] and kinds[i] in _MATCHED}
        special = [i for i in added.values() if kinds[i] != _USER_DEFINED]
        full, plain = _build(strings, kinds, merges, added, set(special), *PRE_TOKENIZERS[pre])
        eog = [named("eos"), named("eot"), named("eom"), *_as_list(get("eog_token_ids"))]
        eog += [i for i, s in enumerate(strings) if s in END_OF_TURN_NAMES]
        bos, eos, pad = ((None if (i := named(k)) is None else strings[i]) for k in ("bos", "eos", "padding"))
        return cls(
            full,
            plain,
            strings=strings,
            added_tokens=added,
            special_ids=special,
            unused_ids=[i for i, k in enumerate(kinds) if k == _UNUSED],
            bos_token=bos,
            eos_token=eos,
            pad_token=pad,
            eog_ids=[i for i in eog if i is not None],
            add_bos=bool(get("add_bos_token", False)),
            add_eos=bool(get("add_eos_token", False)),
            chat_template=meta.get("tokenizer.chat_template"),
        )


def _without_lone_surrogates(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


_MATCHED = (_UNKNOWN, _CONTROL, _USER_DEFINED)


# -- GGUF ------------------------------------------------------------------------------------------------------------


def _as_list(value) -> list:
    if value is None:
        return []
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _checked_merges(merges: list) -> list[str]:
    for n, m in enumerate(merges):
        if not isinstance(m, str) or " " not in m[1:]:
            raise TokenizerError(f"tokenizer.ggml.merges[{n}] is {m!r}; need two pieces with a space between.")
    return merges


def _build(strings, kinds, merges, added, special, splits, ignore_merges):
    """The full and the plain encoder. Ids that plain text must not reach get a vocabulary name no text can spell."""
    built = {a + b for a, b in merges} | {piece for merge in merges for piece in merge}
    full_vocab: dict[str, int] = {}
    plain_vocab: dict[str, int] = {}
    for i, (string, kind) in enumerate(zip(strings, kinds, strict=True)):
        hidden = f"\0{i}"  # U+0000 is not in the byte alphabet
        is_added = added.get(string) == i
        free = kind in (_NORMAL, _BYTE) or string in built
        full_vocab.setdefault(string, i) if free or is_added else full_vocab.setdefault(hidden, i)
        plain_vocab.setdefault(string, i) if free else plain_vocab.setdefault(hidden, i)
    missing = [b for c, b in byte_alphabet().items() if c not in plain_vocab]
    if missing:
        raise TokenizerError(
            f"tokenizer.ggml.tokens lacks {len(missing)} of the 256 byte tokens (first: 0x{missing[0]:02X}), so some "
            "text could not be encoded. Give a folder with tokenizer.json."
        )
    split = [pre_tokenizers.Split(Regex(s), behavior="isolated") for s in splits]
    out = []
    for vocab in (full_vocab, plain_vocab):
        try:
            bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
        except Exception as e:  # the library raises bare Exception
            raise TokenizerError(f"tokenizer.ggml: the merges do not fit the tokens: {e}") from e
        tok = tokenizers.Tokenizer(bpe)
        tok.pre_tokenizer = pre_tokenizers.Sequence(
            [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tok.decoder = decoders.ByteLevel()
        out.append(tok)
    order = sorted(added, key=added.__getitem__)
    out[0].add_tokens([AddedToken(s, special=added[s] in special, normalized=False) for s in order])
    return out


# -- folders ---------------------------------------------------------------------------------------------------------


def _read_json(path: Path, *, required: bool = False) -> dict:
    if not path.is_file():
        if required:
            raise TokenizerError(f"{path} not found; need it to turn text into tokens. Give a folder that has it.")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as e:
        raise TokenizerError(f"{path} cannot be read as JSON: {e}. Incomplete download?") from e
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a JSON {type(value).__name__}; need an object.")
    return value


def _demand_byte_level(state: dict, path: Path) -> None:
    kind = (state.get("model") or {}).get("type")
    parts = [state.get("pre_tokenizer") or {}, state.get("decoder") or {}]
    parts += [p for whole in parts for p in whole.get("pretokenizers") or whole.get("decoders") or ()]
    if kind != "BPE" or not any(p.get("type") == "ByteLevel" for p in parts):
        raise TokenizerError(f"{path}: model type is {kind!r}; need a byte-level BPE (model BPE with ByteLevel parts).")


def _without_added_tokens(state: dict) -> dict:
    """The same tokenizer with nothing matched as a whole, and those spellings out of reach of the BPE too."""
    model = dict(state["model"])
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges") or ()]
    built = {a + b for a, b in merges} | {piece for merge in merges for piece in merge}
    added = {t["content"] for t in state.get("added_tokens") or ()}
    hide = {s for s in added if s in model["vocab"] and s not in built and s not in byte_alphabet()}
    model["vocab"] = {(f"\0{i}" if s in hide else s): i for s, i in model["vocab"].items()}
    return state | {"model": model, "added_tokens": [], "post_processor": None}


def _from_state(state: dict, path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(state))
    except Exception as e:  # the library raises bare Exception
        raise TokenizerError(f"{path} is not a tokenizer that the tokenizers library can load: {e}") from e


def _token_text(value) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _folder_template(folder: Path, config: dict) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates: [{"name": ..., "template": ...}]
        named = {t.get("name"): t.get("template") for t in template}
        template = named.get("default", next(iter(named.values()), None))
    return template


BYTES = (
    "bytes"  # given instead of a path: ids 0 to 255 are the bytes of UTF-8 text, for checkpoints without a tokenizer
)
_BYTES_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Tokenizer of a .gguf, of a folder with tokenizer.json or a .gguf, or "bytes". Raises TokenizerError."""
    from loaders import gguf  # imported late: a folder needs no reader of weights

    path = Path(path)
    if str(path) == BYTES and not path.exists():
        return Tokenizer.of_bytes()
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return Tokenizer.from_folder(path)
    if path.name == "tokenizer.json":
        return Tokenizer.from_folder(path.parent)
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if not found:
            raise TokenizerError(
                f"{path} has neither tokenizer.json nor a .gguf file; need one of them for the tokenizer."
            )
        path = found[0]  # the first part of a split file, which holds the metadata
    if not path.is_file():
        raise TokenizerError(f"{path} not found; need a folder with tokenizer.json or a .gguf file.")
    return Tokenizer.from_gguf(gguf.read_metadata(path))
