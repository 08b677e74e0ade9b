"""The library's front door: text in, text out; what it refuses; the command line."""

import json

import numpy as np
import pytest

import flint_jax
from flint_jax import RequestError, SamplingParams, TokenizerError
from flint_jax.__main__ import main
from tests.model import golden

ITEMS = {name: golden.cases(name)["cases"]["text"]["items"] for name in ("T2", "T2-nvfp4")}


@pytest.mark.parametrize(("name", "index"), [(n, i) for n in ITEMS for i in range(len(ITEMS[n]))][:12])
def test_text_of_the_goldens(name, index):
    item = ITEMS[name][index]
    lm = golden.language_model(name)
    prompt = item.get("prompt", item.get("messages"))
    template = {k: v for k, v in item.items() if k in ("tools", "enable_thinking", "chat_template_kwargs")}
    if "messages" in item and lm.encode(prompt, **template) != item["ids"]:
        pytest.skip("a chat with arguments of its own; the chat tests cover it")
    assert lm.encode(prompt, **template) == item["ids"]
    clear = item["clear_tokens"]
    out = lm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=clear, ignore_eos=True), **template)
    assert list(out.token_ids) == item["tokens"][:clear]
    if clear == len(item["tokens"]):
        assert out.raw_text == item["text_without_special"]
        assert out.text == out.raw_text or "messages" in item  # of a chat: the answer, apart from thoughts
    assert out.finish_reason == "length"
    assert out.prompt_token_ids == tuple(item["ids"])


def test_the_models_stop_ids_end_generation():
    item = next(i for i in ITEMS["T2"] if i["first_stop_token_at"] is not None)
    lm = golden.language_model("T2")
    out = lm.generate(item["ids"], SamplingParams(temperature=0.0, max_tokens=24))
    assert out.finish_reason == "stop"
    assert list(out.token_ids) == item["tokens"][: item["first_stop_token_at"]]


def test_stop_strings_end_generation():
    item = ITEMS["T2-nvfp4"][0]
    lm = golden.language_model("T2-nvfp4")
    out = lm.generate(item["ids"], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=(" count",)))
    assert out.finish_reason == "stop"
    assert out.text == item["text_without_special"].split(" count")[0]
    again = lm.generate(item["ids"], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert list(again.token_ids) == item["tokens"][:4]


def test_default_sampling_is_the_checkpoints():
    lm = golden.language_model("T2-nvfp4")
    first = lm.generate([5, 6, 7], SamplingParams(temperature=None, top_p=None, top_k=None, seed=1, max_tokens=8))
    second = lm.generate([5, 6, 7], SamplingParams(temperature=1.0, top_p=0.95, top_k=20, seed=1, max_tokens=8))
    assert first.token_ids == second.token_ids


def test_logits_and_score_agree_with_each_other():
    lm = golden.language_model("T2-nvfp4")
    ids = np.random.default_rng(0).integers(0, 512, 20)
    logits = np.asarray(lm.logits(ids[None]))[0].astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    (score,) = lm.score([(ids[:12], ids[12:])])
    np.testing.assert_allclose(score, logp[np.arange(11, 19), ids[12:]], atol=2e-5)
    whole, empty, first = lm.score([((), ids), (ids, ()), (ids[:1], ids[1:])])
    assert whole[0] == 0.0
    np.testing.assert_allclose(whole[1:], first, atol=1e-6)
    assert empty.shape == (0,)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda lm: lm.logits([[1, 2], [3]]), "rectangle"),
        (lambda lm: lm.logits([1, 2]), r"\[B, T\]"),
        (lambda lm: lm.logits([[512]]), "outside the vocabulary"),
        (lambda lm: lm.logits([[-1]]), "outside the vocabulary"),
        (lambda lm: lm.logits([[1.5]]), "integers"),
        (lambda lm: lm.logits([[1, 2]], [3]), "lengths"),
        (lambda lm: lm.logits(np.zeros((1, 5000), int)), "maximum context length is 4096"),
        (lambda lm: lm.score([([1], [600])]), "outside the vocabulary"),
        (lambda lm: lm.generate([]), "at least one"),
    ],
)
def test_refusals(call, match):
    with pytest.raises(RequestError, match=match):
        call(golden.language_model("T2-nvfp4"))


def test_padding_may_hold_anything():
    lm = golden.language_model("T2-nvfp4")
    a = np.asarray(lm.logits([[1, 2, 3, -100]], [3]))[0, :3]
    b = np.asarray(lm.logits([[1, 2, 3]]))[0]
    np.testing.assert_array_equal(a, b)


def test_text_needs_a_tokenizer():
    lm = golden.language_model("T1")
    with pytest.raises(TokenizerError, match="no tokenizer"):
        lm.generate("hello")
    with pytest.raises(TokenizerError, match="stop strings need a tokenizer"):
        lm.generate([1, 2], SamplingParams(stop=("x",)))


def test_weights_can_be_changed_in_place():
    lm = flint_jax.load(golden.FOLDER / "T1", dtype="float32", progress=False)
    before = np.asarray(lm.logits([[1, 2, 3]]))
    attn = lm.model.blocks[2].attn
    attn.o.matrix = attn.o.matrix * 0
    after = np.asarray(lm.logits([[1, 2, 3]]))
    assert np.abs(after - before).max() > 1e-3
    assert (np.asarray(lm.model.blocks[3].attn.o.matrix) != 0).any()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dtype": "float16"}, "dtype = 'float16'"),
        ({"numerics": "exact"}, "numerics = 'exact'"),
        ({"kernels": "cuda"}, "kernels = 'cuda'"),
        ({"max_context": 5000}, "max_context = 5000"),
    ],
)
def test_load_refuses_what_it_does_not_know(arguments, match):
    with pytest.raises(flint_jax.FlintError, match=match):
        flint_jax.load(golden.FOLDER / "T1", progress=False, **arguments)


# -- command line ------------------------------------------------------------------------------------------------------


def test_info_reads_no_weights(capsys):
    assert main(["info", "--model", str(golden.FOLDER / "T2-nvfp4")]) == 0
    out = capsys.readouterr().out
    assert "nvfp4 weights" in out
    assert "16 experts, 4 active" in out


def test_generate_prints_the_goldens_text(capsys):
    item = ITEMS["T2-nvfp4"][0]
    flags = [
        "--dtype",
        "float32",
        "--numerics",
        "transformers",
        "--temperature",
        "0",
        "--max-tokens",
        "4",
        "--json",
        "--raw",
    ]
    assert main(["generate", "--model", str(golden.FOLDER / "T2-nvfp4"), *flags, item["prompt"]]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == item["tokens"][:4]


def test_a_missing_model_is_one_line(capsys):
    assert main(["info", "--model", "/nowhere/at/all"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("flint_jax info: error: ")
    assert "/nowhere/at/all" in err
    assert err.count("\n") == 1
