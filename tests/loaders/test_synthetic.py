"""Random checkpoints: readable by independent readers, the same in both formats, and of ordinary size inside."""

import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer as HFTokenizer

import loaders
from flint_jax.chat import ChatTemplate, encode_chat, prepare_chat
from flint_jax.config import SLIDING
from loaders import synthetic, vocabulary, writers
from loaders.tokenizer import Tokenizer
from pallas_kernels import nvfp4

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder, .gguf) of the tiny preset."""
    where = tmp_path_factory.mktemp("tiny")
    config = synthetic.preset("tiny")
    synthetic.write_safetensors(where / "folder", config)
    synthetic.write_gguf(where / "tiny.gguf", config)
    return where / "folder", where / "tiny.gguf"


def read_folder(folder):
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= safetensors.numpy.load_file(path)
    return {k: v.astype(np.float32) for k, v in weights.items()}


def header(path):
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return [v for k, v in json.loads(raw[8 : 8 + size]).items() if k != "__metadata__"]


# -- number format ---------------------------------------------------------------------------------------------------


def test_records_decode_as_gguf_py_decodes_them():
    weights = np.random.default_rng(0).standard_normal((5, 192)).astype(np.float32)
    codes, scales, scale = nvfp4.quantize_numpy(weights)
    records = synthetic.to_records(codes, scales)
    assert records.shape == (5, 192 // 64 * 36)
    back = gguf.dequantize(records, gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(back, nvfp4.decode_numpy(codes, scales))
    assert np.abs(back * scale - weights).max() <= np.abs(weights).max() / 6 + 1e-6  # half the widest gap, 4 to 6
    for plane, again in zip((codes, scales), nvfp4.repack_gguf(records), strict=True):
        np.testing.assert_array_equal(plane, again)


def test_random_records_are_well_formed_and_of_the_right_size():
    stream = synthetic.Stream(0, "o", 0, 0, 0, 0.02)
    records = stream.records(0, writers.PART).reshape(-1, 36)
    scales = records[:, :4]
    assert scales.min() == 0x30
    assert scales.max() == 0x3F
    assert len(np.unique(records[:, 4:])) == 256
    values = gguf.dequantize(records[:4096].reshape(64, -1), gguf.GGMLQuantizationType.NVFP4)
    assert values.std() == pytest.approx(synthetic._CODE_RMS * synthetic._SCALE_RMS, rel=0.01)
    assert abs(values.mean()) < 0.02


# -- files -----------------------------------------------------------------------------------------------------------


def test_gguf_py_reads_the_file(tiny):
    reader = gguf.GGUFReader(tiny[1])
    config = synthetic.preset("tiny")
    fields = {k: f.contents() for k, f in reader.fields.items()}
    assert fields["general.architecture"] == "flint"
    assert fields["flint.attention.sliding_window_pattern"] == [k == SLIDING for k in config.layer_types]
    assert fields["flint.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert fields["tokenizer.ggml.pre"] == "flint"
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["token_embd.weight"] == "BF16"
    assert kinds["output.weight"] == "NVFP4"
    assert kinds["blk.2.ffn_gate_inp.weight"] == kinds["blk.2.attn_sinks.weight"] == "F32"
    assert sum(k == "NVFP4" for k in kinds.values()) == 1 + 6 * 4 + 2 * 3 + 4 * 6
    shapes = {t.name: t.shape.tolist()[::-1] for t in reader.tensors}
    assert shapes["blk.2.ffn_down_exps.weight"] == [16, 128, 64]
    assert shapes["blk.2.ffn_down_exps.scale"] == [16]
    count = sum(math.prod(s) for n, s in shapes.items() if not n.endswith(".scale"))
    assert count == config.num_parameters


def test_both_formats_hold_the_same_weights(tiny):
    folder = read_folder(tiny[0])
    tensors = {t.name: t for t in gguf.GGUFReader(tiny[1]).tensors}

    def packed(name):
        t = tensors[name + ".weight"]
        scale = tensors[name + ".scale"].data
        values = gguf.dequantize(t.data, gguf.GGMLQuantizationType.NVFP4).reshape(t.shape.tolist()[::-1])
        return values * scale.reshape(-1, *[1] * (values.ndim - 1))

    pairs = [
        (packed("output"), folder["lm_head.weight"]),
        (packed("blk.3.attn_k"), folder["model.layers.3.self_attn.k_proj.weight"]),
        (packed("blk.5.ffn_down_exps")[7], folder["model.layers.5.mlp.experts.7.down_proj.weight"]),
        (packed("blk.2.ffn_gate_exps")[1], folder["model.layers.2.mlp.experts.1.gate_proj.weight"]),
        (packed("blk.2.ffn_up_shexp"), folder["model.layers.2.mlp.shared_expert.up_proj.weight"]),
    ]
    for got, want in pairs:
        assert np.sqrt(np.mean((got - want) ** 2)) < 0.12 * want.std()  # FP4 of uniform numbers: about 9 %
    exact = {
        "blk.4.ffn_gate_inp.weight": "model.layers.4.mlp.gate.weight",
        "blk.4.attn_sinks.weight": "model.layers.4.self_attn.softmax_offset",
        "output_norm.weight": "model.norm.weight",
    }
    for ours, theirs in exact.items():
        np.testing.assert_array_equal(tensors[ours].data.reshape(folder[theirs].shape), folder[theirs])
    embed = tensors["token_embd.weight"].data.view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(embed, folder["model.embed_tokens.weight"])


def test_every_tensor_differs_from_every_other(tiny):
    weights = read_folder(tiny[0])
    firsts = [w.ravel()[:8].tobytes() for n, w in weights.items() if w.size >= 64 and not n.endswith("norm.weight")]
    assert len(set(firsts)) == len(firsts)


def test_folder_has_what_a_published_folder_has(tiny):
    index = json.loads((tiny[0] / "model.safetensors.index.json").read_text())
    weights = read_folder(tiny[0])
    assert set(index["weight_map"]) == set(weights)
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == 2 * synthetic.preset("tiny").num_parameters
    for path in tiny[0].glob("*.safetensors"):
        assert {t["dtype"] for t in header(path)} == {"BF16"}
    assert json.loads((tiny[0] / "generation_config.json").read_text())["top_k"] == 20
    assert not list(tiny[0].glob("*.partial"))


def test_our_loader_opens_both(tiny):
    want = synthetic.preset("tiny")
    for path, weight_format in zip(tiny, ("bf16", "nvfp4"), strict=True):
        found = loaders.open_checkpoint(path)
        assert found.weight_format == weight_format
        assert found.config.layer_types == want.layer_types
        assert found.config.num_parameters == want.num_parameters
        assert found.config.max_position_embeddings == 4096
        assert found.generation["top_k"] == 20
        assert found.config.eos_token_ids == found.tokenizer.eog_ids


def test_threads_and_order_do_not_matter(tmp_path):
    config = synthetic.preset("tiny")
    for threads in (1, 3):
        synthetic.write_gguf(tmp_path / "tiny.gguf", config, threads=threads, same=False)
        (tmp_path / "tiny.gguf").rename(tmp_path / f"{threads}")
    assert (tmp_path / "1").read_bytes() == (tmp_path / "3").read_bytes()
    synthetic.write_gguf(tmp_path / "tiny.gguf", config, seed=1, same=False)
    assert (tmp_path / "tiny.gguf").read_bytes() != (tmp_path / "1").read_bytes()


def test_tensors_longer_than_a_part(tmp_path):
    rows = writers.PART // 128 // 2 + 100
    config = synthetic.preset("tiny", layers=2, vocab_size=rows)
    synthetic.write_safetensors(tmp_path / "folder", config)
    embed = read_folder(tmp_path / "folder")["model.embed_tokens.weight"]
    assert embed.nbytes // 2 > writers.PART
    assert embed.std() == pytest.approx(1.0, rel=0.01)
    flat, second = embed.ravel(), writers.PART // 2
    assert not np.array_equal(flat[:64], flat[second : second + 64])
    synthetic.write_gguf(tmp_path / "x.gguf", config, same=True)
    tensor = next(t for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors if t.name == "token_embd.weight")
    np.testing.assert_array_equal(tensor.data.view(ml_dtypes.bfloat16).astype(np.float32), embed)


def test_a_failed_write_leaves_no_file(tmp_path):
    def fail(part, nbytes):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        writers.write_gguf(tmp_path / "a.gguf", {}, [writers.Tensor("a", "F32", (4,), fail)], threads=2)
    assert not (tmp_path / "a.gguf").exists()


def test_full_preset_is_flint():
    config = synthetic.preset("full")
    assert config.num_parameters == 39_785_287_456
    assert config.full_layers == (0, 1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 48)
    tensors = list(synthetic.gguf_tensors(synthetic.preset("full", layers=3), 0, same=False))
    layer = sum(t.nbytes for t in tensors if t.name.startswith("blk.2."))
    rest = sum(t.nbytes for t in tensors if not t.name.startswith("blk."))
    dense = sum(t.nbytes for t in tensors if t.name.startswith("blk.0."))
    assert (47 * layer + 2 * dense + rest) / 1e9 == pytest.approx(22.91, abs=0.01)


def test_layers_can_be_cut():
    config = synthetic.preset("full", layers=6)
    assert config.num_hidden_layers == 6
    assert config.full_layers == (0, 1, 5)
    assert config.hidden_size == 2048


# -- what runs through it --------------------------------------------------------------------------------------------


def forward(config, weights, tokens):
    """Float32 forward in numpy: (residual rms after each layer, expert ids [M, T, A], logits [T, V])."""
    c, p = config, "model.layers.{}.".format

    def norm(x, w):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * w

    def mlp(x, name):
        gate, up, down = (weights[f"{name}{n}_proj.weight"] for n in ("gate", "up", "down"))
        g = x @ gate.T
        return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T

    t = len(tokens)
    at = np.arange(t)
    angle = at[:, None] * c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    x = weights["model.embed_tokens.weight"][tokens]
    sizes, chosen = [], []
    for i in range(c.num_hidden_layers):
        a = p(i) + "self_attn."
        h = norm(x, weights[p(i) + "input_layernorm.weight"])
        q, k, v = ((h @ weights[f"{a}{n}_proj.weight"].T).reshape(t, -1, c.head_dim) for n in "qkv")
        q, k = norm(q, weights[a + "q_norm.weight"]), norm(k, weights[a + "k_norm.weight"])
        seen = at[:, None] >= at
        if c.layer_types[i] == SLIDING:
            seen &= at[:, None] - at < c.sliding_window
            half = c.head_dim // 2
            q, k = (
                np.concatenate(
                    [y[..., :half] * cos - y[..., half:] * sin, y[..., half:] * cos + y[..., :half] * sin], -1
                )
                for y in (q, k)
            )
        k, v = (np.repeat(y, c.num_attention_heads // c.num_key_value_heads, 1) for y in (k, v))
        score = np.where(seen, np.einsum("qnh,knh->nqk", q, k) * c.head_dim**-0.5, -np.inf)
        weight = np.exp(score)
        weight /= weight.sum(-1, keepdims=True) + np.exp(weights[a + "softmax_offset"])[:, None, None]
        out = np.einsum("nqk,knh->qnh", weight, v).reshape(t, -1)
        x = x + out @ weights[a + "o_proj.weight"].T
        h = norm(x, weights[p(i) + "post_attention_layernorm.weight"])
        m = p(i) + "mlp."
        if i in c.mlp_only_layers:
            x = x + mlp(h, m)
        else:
            score = 1 / (1 + np.exp(-(h @ weights[m + "gate.weight"].T)))
            top = np.argsort(-score, -1)[:, : c.num_experts_per_tok]
            share = np.take_along_axis(score, top, -1)
            share /= share.sum(-1, keepdims=True)
            y = mlp(h, m + "shared_expert.")
            for e in range(c.num_experts):
                row, rank = np.nonzero(top == e)
                if len(row):
                    y[row] += share[row, rank][:, None] * mlp(h[row], f"{m}experts.{e}.")
            x = x + y
            chosen.append(top)
        sizes.append(np.sqrt((x * x).mean()))
    return np.array(sizes), np.array(chosen), norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def check_health(config, weights, tokens):
    sizes, chosen, logits = forward(config, weights, tokens)
    assert sizes.min() > 1.0
    assert sizes.max() < 10
    assert 2.0 < logits.std() < 3.0
    for layer in chosen:
        load = np.bincount(layer.ravel(), minlength=config.num_experts) / layer.size
        entropy = -(load[load > 0] * np.log(load[load > 0])).sum() / math.log(config.num_experts)
        assert entropy > 0.95
        assert load.max() < 6 / config.num_experts
    return sizes, chosen, logits


def test_tiny_is_healthy(tiny):
    config = synthetic.preset("tiny")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 256)
    _, _, logits = check_health(config, read_folder(tiny[0]), tokens)
    assert np.unique(logits.argmax(-1)).size > 64  # not one answer for everything
    text = loaders.load_tokenizer(tiny[0]).encode((vocabulary.EMBEDDED / "corpus.txt").read_text())[:256]
    check_health(config, read_folder(tiny[0]), np.array(text))


@pytest.mark.slow
def test_flints_depth_is_healthy(tmp_path):
    config = synthetic.preset(
        "full", vocab_size=1024, hidden_size=192, num_attention_heads=8, head_dim=32, intermediate_size=256,
        moe_intermediate_size=64, shared_expert_intermediate_size=128, num_experts=16, sliding_window=33,
    )  # fmt: skip
    synthetic.write_safetensors(tmp_path, config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 128)
    sizes, _, _ = check_health(config, read_folder(tmp_path), tokens)
    assert 3 < sizes[-1] < 5


# -- tokenizer and template ------------------------------------------------------------------------------------------


def ids_of(tok, *spellings):
    return [tok.added_tokens[s] for s in spellings]


def test_both_tokenizers_agree_with_each_other_and_with_the_library(tiny):
    folder, file = (loaders.load_tokenizer(path) for path in tiny)
    theirs = HFTokenizer.from_file(str(tiny[0] / "tokenizer.json"))
    text = (vocabulary.EMBEDDED / "corpus.txt").read_text() + "<think>日本 12345\t€ <|user|>"
    ids = folder.encode(text)
    assert ids == file.encode(text) == theirs.encode(text).ids
    assert folder.decode(ids) == text
    assert len(ids) < len(text) / 2
    assert folder.eog_ids == file.eog_ids == tuple(ids_of(folder, vocabulary.EOS, "<|user|>", "<|observation|>"))
    assert folder.special_ids == file.special_ids == set(ids_of(folder, vocabulary.EOS, *vocabulary.ROLES))
    assert folder.added_tokens == file.added_tokens
    assert folder.chat_template == file.chat_template
    assert file.token_bytes(767) == b""
    assert file.token_string(767) == "[PAD767]"


def test_full_vocabulary_is_quick_and_speaks():
    vocab = vocabulary.build(150144)
    assert len(vocab.tokens) == len(vocab.types) == len(set(vocab.tokens)) == 150144
    tok = Tokenizer.from_gguf(vocab.gguf_metadata())
    text = (vocabulary.EMBEDDED / "corpus.txt").read_text()
    assert tok.decode(tok.encode(text)) == text
    assert max(tok.encode(text)) < 1000
    assert tok.decode([100_000]).strip().isalpha()
    assert tok.added_tokens["<think>"] == vocab.id("<think>")


@pytest.mark.parametrize("rows", [271, 300, 719, 720, 800])
def test_vocabularies_of_any_size(rows):
    vocab = vocabulary.build(rows)
    assert len(vocab.tokens) == rows
    Tokenizer.from_gguf(vocab.gguf_metadata())


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="need 271"):
        vocabulary.build(270)


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def chat(tiny):
    tok = loaders.load_tokenizer(tiny[1])
    return tok, ChatTemplate.from_tokenizer(tok)


def test_generation_prompt_leaves_thinking_to_the_model(chat):
    _, template = chat
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": " u "}]
    text = template.render(messages)
    assert text == "<|system|>\ns\n<|user|>\n u \n<|assistant|>\n"
    assert template.render(messages, enable_thinking=True) == text
    assert template.render(messages, enable_thinking=False) == text + "<think></think>"
    assert template.render(messages, add_generation_prompt=False) == text.removesuffix("<|assistant|>\n")


def test_a_reply_sent_back_extends_what_was_generated(chat):
    tok, template = chat
    messages = [{"role": "user", "content": "u"}]
    prompt = encode_chat(tok, template, messages, tools=[TOOL])
    pairs = {"city": "Zürich", "n": "[1, null]"}.items()
    values = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in pairs)
    call = f"<tool_call>weather\n{values}</tool_call>"
    made = tok.encode("<think> I \n</think>\nLet me look." + call + call)
    function = {"name": "weather", "arguments": '{"city": "Zürich", "n": [1, null]}'}
    reply = {
        "role": "assistant",
        "reasoning_content": " I \n",
        "content": "\nLet me look.",
        "tool_calls": [{"id": "1", "type": "function", "function": function}] * 2,
    }
    results = [{"role": "tool", "content": "12"}, {"role": "tool", "content": "13"}]
    whole = prepare_chat(tok, template, [*messages, reply, *results], tools=[TOOL])
    assert whole.ids[: len(prompt) + len(made)] == prompt + made
    end = "<|observation|>\n<tool_response>12</tool_response>\n<tool_response>13</tool_response>\n<|assistant|>\n"
    assert whole.text.endswith(end)
    inline = {"role": "assistant", "content": "<think> I \n</think>\nLet me look.", "tool_calls": reply["tool_calls"]}
    assert encode_chat(tok, template, [*messages, inline, *results], tools=[TOOL]) == whole.ids


def test_thoughts_before_the_last_user_message_are_dropped_unless_kept(chat):
    _, template = chat
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "t"},
        {"role": "user", "content": "c"},
    ]
    assert "<|assistant|>\nb<|user|>" in template.render(messages)
    assert "<|assistant|>\n<think>t</think>b<|user|>" in template.render(messages, clear_thinking=False)


def test_tools_are_shown_as_they_are(chat):
    _, template = chat
    text = template.render([{"role": "user", "content": "x"}], tools=[TOOL, {"name": "Wetter ☂"}])
    assert json.dumps(TOOL) + "\n" in text
    assert '{"name": "Wetter ☂"}\n</tools>' in text
    assert text.startswith("<|system|>\n")


# -- the random model of the cache and the command -------------------------------------------------------------------


def test_random_checkpoint_is_made_once_by_many(tmp_path, monkeypatch):
    monkeypatch.setenv("FLINT_JAX_CACHE", str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: synthetic.random_checkpoint(), range(3)))
    assert len(set(paths)) == 1
    path = paths[0]
    assert [p.name for p in tmp_path.iterdir()] == [path.parent.name]
    before = path.stat().st_mtime_ns
    assert synthetic.random_checkpoint() == path
    assert path.stat().st_mtime_ns == before
    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "write_gguf", None)
        assert synthetic.random_checkpoint() == path
    assert loaders.open_checkpoint(path).weight_format == "nvfp4"
    assert loaders.open_checkpoint(synthetic.random_checkpoint("safetensors")).weight_format == "bf16"


def test_cache_folder_falls_back(tmp_path, monkeypatch):
    monkeypatch.delenv("FLINT_JAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert synthetic._cache_folder() == tmp_path / "flint_jax"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "flint_jax" in str(synthetic._cache_folder())
    assert not str(synthetic._cache_folder()).startswith(str(tmp_path / "file"))


def test_command_overwrites_nothing_and_makes_no_folders(tmp_path, capsys):
    there = tmp_path / "there.gguf"
    there.write_bytes(b"precious")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("mine")
    for path, word in (
        (there, "exists already"),
        (tmp_path / "full", "exists already and is not empty"),
        (tmp_path / "missing" / "x.gguf", "there is no folder"),
        (tmp_path / "missing" / "x", "there is no folder"),
    ):
        with pytest.raises(SystemExit):
            synthetic.main([str(path), "--layers", "2"])
        assert word in capsys.readouterr().err
    assert there.read_bytes() == b"precious"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.json", "full", "there.gguf"]


def test_command(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    assert synthetic.main([str(tmp_path / "a" / "x.gguf"), "--layers", "3", "--seed", "7", "--threads", "2"]) == 0
    assert "GB/s" in capsys.readouterr().out
    assert loaders.open_checkpoint(tmp_path / "a" / "x.gguf").config.num_hidden_layers == 3
    assert synthetic.main([str(tmp_path / "b"), "--layers", "2"]) == 0
    assert loaders.open_checkpoint(tmp_path / "b").weight_format == "bf16"
    for wrong in ([str(tmp_path), "--format", "gguf"], [str(tmp_path / "a" / "x.gguf"), "--format", "safetensors"]):
        with pytest.raises(SystemExit):
            synthetic.main(wrong)


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path):
    """1.6 GB are written by a process whose memory grows by less than 0.5 GB."""
    program = (
        "import resource, sys; from loaders import synthetic\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "synthetic.main([sys.argv[1], '--preset', 'full', '--layers', '3', '--threads', '2'])\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
    )
    path = tmp_path / "big.gguf"
    done = subprocess.run([sys.executable, "-c", program, path], cwd=ROOT, capture_output=True, text=True, check=True)
    assert path.stat().st_size > 1e9
    assert float(done.stdout.split()[-1]) < 500
