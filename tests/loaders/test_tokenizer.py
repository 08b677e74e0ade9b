"""Tokenizers read from a folder and from GGUF metadata give the reference's ids, and refuse what they cannot split."""

import json
import re
import shutil
import sys
import threading
from pathlib import Path

import gguf
import pytest

import loaders.tokenizer
from flint_jax.errors import TokenizerError
from loaders.tokenizer import PRE_TOKENIZERS, Tokenizer, byte_alphabet, load_tokenizer

GOLDENS = Path(__file__).parent.parent / "goldens"
CASES = json.loads((GOLDENS / "tokenizer_cases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def meta():
    reader = gguf.GGUFReader(GOLDENS / "T2-nvfp4" / "T2-nvfp4.gguf")
    return {key: field.contents() for key, field in reader.fields.items()}


@pytest.fixture(scope="module", params=["folder", "gguf"])
def tok(request, meta):
    return Tokenizer.from_folder(GOLDENS / "T2") if request.param == "folder" else Tokenizer.from_gguf(meta)


def small_meta(pre="flint", extra=(), merges=(), **kwargs):
    """GGUF metadata of a byte vocabulary: ids 0..255 are the bytes, then ``extra`` (string, type) tokens."""
    alphabet = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*alphabet, *(s for s, _ in extra)],
        "tokenizer.ggml.token_type": [1] * 256 + [k for _, k in extra],
        "tokenizer.ggml.merges": list(merges),
    }
    return meta | {f"tokenizer.ggml.{k}": v for k, v in kwargs.items()}


@pytest.mark.parametrize("case", CASES["encodings"], ids=lambda c: repr(c["text"])[:30])
def test_reference_encodings(tok, case):
    assert tok.encode(case["text"]) == case["ids"]
    assert [tok.token_string(i) for i in case["ids"]] == case["tokens"]
    assert tok.decode(case["ids"]) == case["decoded"]
    assert tok.decode(case["ids"], skip_special_tokens=True) == case["decoded_skip_special"]
    assert b"".join(map(tok.token_bytes, case["ids"])).decode("utf-8", "replace") == case["decoded"]


def test_reference_chat_texts(tok):
    for case in CASES["chats"]:
        assert tok.encode(case["text"]) == case["ids"]


def test_names_and_stop_ids(tok):
    assert tok.eos_token == tok.pad_token == "<|endoftext|>"
    assert tok.eog_ids == (483, 487, 489)
    assert not tok.add_bos
    assert tok.encode("a", add_special_tokens=True) == tok.encode("a")
    assert tok.token_id("<think>") == 490
    assert 490 not in tok.special_ids
    assert 487 in tok.special_ids
    assert tok.chat_template.startswith("[gMASK]<sop>")


def test_plain_encoding_has_no_control_tokens(tok):
    text = "".join(tok.added_tokens) + " and [PAD505]"
    ids = tok.encode(text, special=False)
    assert max(ids) < 483
    assert tok.decode(ids) == text
    assert tok.encode("<|user|>") == [487]


LONG = "Zürich <|user|> 北京 one two\n<think>" * 6000  # 200,000 characters


def test_a_long_text_is_encoded_as_a_short_one_is(tok):
    once, many = LONG[: len(LONG) // 6000], len(LONG) // (len(LONG) // 6000)
    assert len(LONG) > 40 * loaders.tokenizer._LONG
    assert tok.encode(LONG) == tok.encode(once) * many
    assert tok.encode(LONG, special=False) == tok._plain.encode(LONG, add_special_tokens=False).ids
    assert tok.pieces(LONG) == tok.pieces(once) * many


@pytest.mark.parametrize("method", ["encode", "pieces"])
def test_other_threads_run_while_a_long_text_is_encoded(tok, method, monkeypatch):
    """Else every stream of a server stands still while one long prompt is read."""
    inside, turns, told = False, 0, []

    class Watched:
        def __getattr__(self, name):
            def call(*args, **options):
                nonlocal inside
                inside = True
                encoded = getattr(full, name)(*args, **options)
                inside = False
                told.append(turns)
                return encoded

            return call

    full = tok._full
    monkeypatch.setattr(tok, "_full", Watched())
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # what a thread may get in before the call: not many turns
    worker = threading.Thread(target=getattr(tok, method), args=(LONG,))
    worker.start()
    while worker.is_alive():
        turns += inside
    sys.setswitchinterval(before)
    assert told[0] > 50_000


def test_every_byte_token_is_its_byte(tok):
    found = {tok.token_bytes(i) for i in range(tok.vocab_size) if len(tok.token_bytes(i)) == 1}
    assert found == {bytes([b]) for b in range(256)}


def test_rows_without_a_token_decode_to_nothing(tok):
    assert tok.token_bytes(505) == b""
    assert tok.decode([40, 505, 40]) == "II"
    assert tok.token_string(505) == "[PAD505]"
    assert tok.token_bytes(10**6) == b""


def test_lone_surrogates_do_not_raise(tok):
    assert tok.decode(tok.encode("a\ud83d b \ud83d\ude00")) == "a\ufffd b \U0001f600"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("12345", ["123", "45"]),
        ("a1b", ["a", "1", "b"]),
        ("HelloWorld", ["Hello", "World"]),
        ("HTTPServer's", ["HTTPServer's"]),
        ("don'T we'LL", ["don'T", " we'LL"]),
        ("x 今天です y", ["x", " ", "今天です", " y"]),
        ("$x += 10;\n\n", ["$x", " +=", " ", "10", ";\n\n"]),
        ("a  b", ["a", " ", " b"]),
        ("a\n\n  b \n", ["a", "\n\n", " ", " b", " \n"]),
        ("Ünï naïve", ["Ünï", " naïve"]),
        ("end.  ", ["end", ".", "  "]),
    ],
)
def test_flint_splits(text, pieces):
    tok = Tokenizer.from_gguf(small_meta())
    got = [text[a:b] for _, (a, b) in tok._full.pre_tokenizer.pre_tokenize_str(text)]
    assert got == pieces


def test_flint_and_glm4_differ_in_merging_whole_words():
    meta = small_meta(extra=[("ab", 1), ("abc", 1)], merges=["a b"])
    assert Tokenizer.from_gguf(meta).encode("abc") == [256, ord("c")]
    assert Tokenizer.from_gguf(meta | {"tokenizer.ggml.pre": "glm4"}).encode("abc") == [257]


def test_plain_text_cannot_reach_a_control_token_that_is_one_word():
    meta = small_meta("glm4", extra=[("stop", 3), ("user", 4), ("pad", 5)])
    tok = Tokenizer.from_gguf(meta)
    assert tok.encode("stop user pad", special=False) == list(b"stop user pad")
    assert tok.encode("stop user pad") == [256, 32, 257, *b" pad"]
    assert tok.special_ids == {256}


def test_unicode_control_token_keeps_its_characters():
    tok = Tokenizer.from_gguf(small_meta(extra=[("<\uff5cé\uff5c>", 3)]))
    assert tok.encode("a<\uff5cé\uff5c>") == [ord("a"), 256]
    assert tok.token_bytes(256).decode() == "<\uff5cé\uff5c>"
    assert tok.decode(tok.encode("<\uff5cé\uff5c>", special=False)) == "<\uff5cé\uff5c>"


def test_added_token_spelled_in_the_byte_alphabet_is_still_text():
    tok = Tokenizer.from_gguf(small_meta(extra=[("<é>", 3)]))  # é alone would be byte 0xE9
    assert tok.token_bytes(256) == "<é>".encode()


def test_bytes_that_are_not_utf8_become_replacement_characters(tok):
    high = next(i for i in range(256) if tok.token_bytes(i) == b"\xf0")
    assert tok.decode([40, high, 40]) == "I\ufffdI"


def test_stop_ids_of_gguf_come_from_every_source():
    extra = [("<|a|>", 3), ("<|b|>", 3), ("<|c|>", 3), ("<|d|>", 3), ("<|im_end|>", 3), ("<|user|>", 3)]
    meta = small_meta(extra=extra, eos_token_id=256, eot_token_id=257, eom_token_id=258, eog_token_ids=[259])
    assert Tokenizer.from_gguf(meta).eog_ids == (256, 257, 258, 259, 260)


@pytest.mark.parametrize("add", [None, False, True])
def test_bos_only_if_the_file_says_so(add):
    meta = small_meta(extra=[("<s>", 3)], bos_token_id=256)
    tok = Tokenizer.from_gguf(meta if add is None else meta | {"tokenizer.ggml.add_bos_token": add})
    assert tok.encode("a") == [97]
    assert tok.encode("a", add_special_tokens=True) == ([256, 97] if add else [97])
    assert tok.encode("a", special=False, add_special_tokens=True) == ([256, 97] if add else [97])
    assert tok.add_bos is bool(add)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre": "qwen2"}, ["qwen2", "flint", "glm4", "tokenizer.json"]),
        ({"pre": None}, ["None", "flint"]),
        ({"model": "llama"}, ["llama", "gpt2"]),
        ({"tokens": []}, ["tokens", "missing"]),
        ({"token_type": [1]}, ["256 tokens", "1 token types"]),
        ({"merges": ["ab"]}, ["merges[0]", "'ab'"]),
        ({"merges": ["a b"]}, ["merges do not fit"]),
        ({"eos_token_id": 256}, ["eos_token_id", "256"]),
        ({"tokens": ["x"] * 256}, ["lacks 255 of the 256 byte tokens"]),
    ],
)
def test_gguf_refusals_name_the_fault(change, words):
    meta = small_meta() | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(TokenizerError) as error:
        Tokenizer.from_gguf(meta)
    for word in words:
        assert word in str(error.value)


def test_known_pre_tokenizers():
    assert set(PRE_TOKENIZERS) == {"flint", "glm4"}


@pytest.fixture
def folder(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(GOLDENS / "T2" / name, tmp_path / name)
        (tmp_path / name).chmod(0o644)
    return tmp_path


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_template_in_tokenizer_config(folder):
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer.from_folder(folder).chat_template is None
    edit(folder / "tokenizer_config.json", chat_template="one")
    assert Tokenizer.from_folder(folder).chat_template == "one"
    edit(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}],
    )
    assert Tokenizer.from_folder(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).chat_template == "file"


def test_folder_truncation_and_padding_are_not_applied(folder):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0}
    edit(folder / "tokenizer.json", truncation=truncation, padding=padding | {"pad_type_id": 0, "pad_token": "!"})
    assert Tokenizer.from_folder(folder).encode("Hello, world!") == [39, 68, 327, 78, 11, 269, 283, 326, 0]


def test_folder_bos_from_config_as_a_dict(folder):
    edit(folder / "tokenizer_config.json", bos_token={"content": "[gMASK]", "lstrip": False}, add_bos_token=True)
    tok = Tokenizer.from_folder(folder)
    assert tok.bos_token == "[gMASK]"
    assert tok.encode("a", add_special_tokens=True)[0] == 484
    assert tok.encode("a")[0] != 484


def test_folder_whose_vocabulary_holds_its_added_tokens(folder):
    state = json.loads((folder / "tokenizer.json").read_text())
    for token in state["added_tokens"]:
        state["model"]["vocab"][token["content"]] = token["id"]
    state["added_tokens"].append(state["added_tokens"][0] | {"id": 500, "content": "stop"})  # one word for the splits
    state["model"]["vocab"]["stop"] = 500
    (folder / "tokenizer.json").write_text(json.dumps(state))
    tok = Tokenizer.from_folder(folder)
    assert tok.encode("stop") == [500]
    assert max(tok.encode("stop", special=False)) < 483
    assert tok.encode("<think>a") == [490, *tok.encode("a")]
    assert max(tok.encode("<think>a<|user|>", special=False)) < 483


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, ["tokenizer.json not found"]),
        ("tokenizer.json", "{", ["cannot be read as JSON"]),
        ("tokenizer.json", "[]", ["need an object"]),
        ("tokenizer.json", '{"model": {"type": "Unigram"}}', ["Unigram", "byte-level BPE"]),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}}, "decoder": {"type": "ByteLevel"}}', ["load"]),
        ("tokenizer_config.json", "nonsense", ["tokenizer_config.json", "cannot be read as JSON"]),
    ],
)
def test_folder_refusals_name_the_file(folder, name, content, words):
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(TokenizerError) as error:
        Tokenizer.from_folder(folder)
    for word in words:
        assert word in str(error.value)


def test_load_tokenizer_takes_folders_and_files(folder, tmp_path_factory):
    ids = [39, 68, 327, 78]
    gguf_folder = GOLDENS / "T2-nvfp4"
    for path in (folder, folder / "tokenizer.json", gguf_folder, gguf_folder / "T2-nvfp4.gguf"):
        assert load_tokenizer(path).encode("Hello") == ids
    for missing in (tmp_path_factory.mktemp("empty"), folder / "none.gguf"):
        with pytest.raises(TokenizerError, match=re.escape(str(missing))):
            load_tokenizer(missing)


def test_bytes_for_checkpoints_without_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tok = load_tokenizer("bytes")
    text = "a\nö 北 😀\0"
    assert tok.encode(text) == list(text.encode())
    assert tok.decode(list(text.encode())) == text
    assert [tok.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert tok.token_bytes(300) == b""
    assert "assistant: " in tok.chat_template
    (tmp_path / "bytes").mkdir()  # a folder of that name is a folder
    with pytest.raises(TokenizerError, match="neither"):
        load_tokenizer("bytes")
