"""FlintConfig from config.json and from GGUF metadata: what is understood, what is refused and how it is named."""

import json

import numpy as np
import pytest

from flint_jax.config import FULL, SLIDING
from flint_jax.errors import ConfigError
from loaders import gguf
from loaders.config import config_from_gguf, config_from_json, generation_from_gguf, generation_from_json, read_json
from tests.loaders import files


def refused(**changes) -> str:
    with pytest.raises(ConfigError) as caught:
        files.config(**changes)
    return str(caught.value)


def gguf_refused(rows=128, **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_gguf(files.metadata(**changes), rows)
    return str(caught.value)


# -- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["T1", "T2", "T2-nvfp4"])
def test_goldens(model):
    given = json.loads((files.GOLDENS / model / "config.json").read_text())
    config = config_from_json(given)
    for name, value in given.items():
        if hasattr(config, name):
            assert getattr(config, name) == (tuple(value) if isinstance(value, list) else value), name
    assert [i for i, r in enumerate(config.rope_layers) if not r] == given["no_rope_layer_indices"]
    assert config.rope_theta == 10000.0


def test_default_schedule():
    config = files.config(num_hidden_layers=49, mlp_only_layers=None)
    assert config.full_layers == (0, 1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 48)
    assert [i for i, r in enumerate(config.rope_layers) if not r] == list(config.full_layers)
    assert config.mlp_only_layers == (0, 1)


def test_explicit_schedule_wins():
    config = files.config(
        layer_types=[SLIDING, FULL, SLIDING, FULL], no_rope_layer_indices=[3], mlp_only_layers=[2], sliding_window=5
    )
    assert config.layer_types == (SLIDING, FULL, SLIDING, FULL)
    assert config.rope_layers == (True, True, True, False)
    assert config.mlp_only_layers == (2,)
    assert config.sliding_window == 5


def test_window_switched_off():
    assert files.config(use_sliding_window=False, sliding_window=None).layer_types == (FULL,) * 4
    message = refused(use_sliding_window=False, layer_types=[FULL, SLIDING, FULL, FULL])
    assert "use_sliding_window = false contradicts layer_types" in message
    assert "sliding_window = None" in refused(sliding_window=None)


def test_decoder_sparse_step():
    assert files.config(decoder_sparse_step=2, mlp_only_layers=[1]).mlp_only_layers == (0, 1, 2)
    assert "decoder_sparse_step = 0" in refused(decoder_sparse_step=0)


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0),
        ({"rope_theta": 7, "rope_parameters": {"rope_theta": 7.0}}, 7.0),
        ({"rope_theta": 7, "rope_scaling": {"type": "default", "factor": 1.0}}, 7.0),
        ({"rope_theta": 7, "rope_scaling": None}, 7.0),
        ({"rope_theta": None}, 10000.0),
        ({"rope_theta": None, "rope_parameters": {FULL: {"rope_theta": 3.0}, SLIDING: {"rope_theta": 4.0}}}, 4.0),
    ],
)
def test_rope_theta(changes, theta):
    assert files.config(**changes).rope_theta == theta


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
            "rope_parameters.rope_type = 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.factor = 2.0"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta = 10000.0, rope_parameters.rope_theta = 5.0"),
        ({"rope_theta": 0}, "rope_theta = 0"),
        ({"rope_theta": "big"}, "rope_theta = 'big'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
    ],
)
def test_rope_refusals(changes, words):
    assert words in refused(**changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("router_score_function", "softmax"),
        ("softmax_type", "vanilla"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("qkv_bias", True),
        ("tie_word_embeddings", True),
        ("n_group", 8),
        ("topk_group", 4),
        ("topk_method", "noaux_tc"),
        ("use_expert_bias", True),
        ("moe_router_enable_expert_bias", True),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("num_nextn_predict_layers", 1),
        ("partial_rotary_factor", 0.5),
        ("rope_interleave", True),
        ("query_pre_attn_scalar", 256),
        ("v_head_dim", 64),
        ("kv_lora_rank", 512),
        ("quantization_config", {"quant_method": "fp8"}),
        ("residual_multiplier", 0.5),
        ("logits_scaling", 8.0),
        ("attention_chunk_size", 8192),
        ("attn_output_gate", True),
        ("use_qk_norm", False),
        ("swiglu_limit", 7.0),
        ("shared_expert_gate", True),
        ("text_config", {"hidden_size": 3}),
        ("is_encoder_decoder", True),
        ("model_type", "qwen3_moe"),
        ("architectures", ["LlamaForCausalLM"]),
        ("first_k_dense_replace", 3),
        ("num_local_experts", 8),
        ("n_shared_experts", 2),
    ],
)
def test_other_architectures_are_refused_by_key_and_value(key, value):
    message = refused(**{key: value})
    assert f"{key} = {value!r}" in message


def test_neutral_and_harmless_keys_pass():
    neutral = {
        "router_score_function": "sigmoid",
        "softmax_type": "learnable",
        "attention_bias": False,
        "attention_dropout": 0.1,
        "n_group": 1,
        "topk_group": 1,
        "router_aux_loss_coef": 0.0005,
        "initializer_range": 0.02,
        "output_router_logits": False,
        "final_logit_softcapping": None,
        "num_nextn_predict_layers": 0,
        "quantization_config": None,
        "query_pre_attn_scalar": 32,
        "logits_scaling": 1.0,
        "first_k_dense_replace": 2,
        "head_dtype": "float32",
        "moe_router_dtype": "float32",
        "attention_sink": True,
        "transformers_version": "5.24.0",
        "auto_map": {"AutoConfig": "configuration_flint.FlintConfig"},
        "max_window_layers": 28,
        "torch_dtype": "bfloat16",
        "some_training_note": "x",
    }
    assert files.config(**neutral) == files.config()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": [FULL] * 3}, "layer_types has 3 entries"),
        ({"layer_types": [FULL, FULL, "linear_attention", FULL]}, "linear_attention"),
        ({"mlp_only_layers": [0, 9]}, "mlp_only_layers = [0, 9]"),
        ({"no_rope_layer_indices": [4]}, "no_rope_layer_indices = [4]"),
        ({"num_attention_heads": 3}, "num_attention_heads = 3"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 64.5}, "hidden_size = 64.5"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": -1}, "vocab_size = -1"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob = 1"),
        ({"eos_token_id": 128}, "eos_token_ids = (128,)"),
        ({"eos_token_id": "x"}, "eos_token_id = 'x'"),
        ({"max_position_embeddings": 1.5}, "max_position_embeddings = 1.5"),
        ({"model_type": None, "architectures": None}, "neither model_type nor architectures"),
    ],
)
def test_contradictions_and_nonsense(changes, words):
    assert words in refused(**changes)


def test_all_problems_at_once():
    message = refused(hidden_act="gelu", attention_bias=True, vocab_size=None)
    assert all(word in message for word in ("hidden_act", "attention_bias", "vocab_size is missing"))


def test_read_json(tmp_path):
    path = tmp_path / "config.json"
    for content in (b"", b"{", b"[]", b"\xff", b"[" * 100000, b"{}" + b" " * (1 << 23)):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"config\.json"):
            read_json(path)


# -- GGUF ------------------------------------------------------------------------------------------------------------


def test_gguf_and_json_agree():
    assert config_from_gguf(files.metadata(), 128) == files.config()
    golden = gguf.open_gguf(files.GOLDENS / "T2-nvfp4" / "T2-nvfp4.gguf")
    from_json = config_from_json(read_json(files.GOLDENS / "T2-nvfp4" / "config.json"))
    from_gguf = config_from_gguf(golden.metadata, 512)
    assert from_gguf.bos_token_id == 484
    assert from_json == type(from_json)(**{**from_gguf.__dict__, "bos_token_id": None})


def test_gguf_stop_ids_come_from_all_their_keys():
    values = files.metadata() | {
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 9,
        "tokenizer.ggml.eog_token_ids": np.array([9, 11], np.int32),
    }
    assert config_from_gguf(values, 128).eos_token_ids == (7, 9, 11)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "llama"}, "general.architecture = 'llama'"),
        ({"flint__block_count": None}, "flint.block_count is missing"),
        ({"flint__attention__sliding_window_pattern": [True]}, "sliding_window_pattern has 1 entries"),
        ({"flint__attention__sliding_window_pattern": 4}, "sliding_window_pattern = 4"),
        ({"flint__attention__rope_pattern": [0, 0, 2, 0]}, "rope_pattern = [0, 0, 2, 0]; need a boolean (or 0, 1)"),
        ({"flint__attention__rope_pattern": "yes"}, "rope_pattern = 'yes'"),
        ({"flint__attention__rope_pattern": [0, 0, 1]}, "rope_pattern has 3 entries"),
        ({"flint__expert_gating_func": 1}, "flint.expert_gating_func = 1"),
        ({"flint__expert_group_count": 4}, "flint.expert_group_count = 4"),
        ({"flint__rope__scaling__type": "yarn"}, "flint.rope.scaling.type = 'yarn'"),
        ({"flint__rope__scaling__factor": 4.0}, "flint.rope.scaling.factor = 4.0"),
        ({"flint__rope__dimension_count": 16}, "flint.rope.dimension_count = 16"),
        ({"flint__attention__value_length": 16}, "flint.attention.value_length = 16"),
        ({"flint__attention__causal": False}, "flint.attention.causal = False"),
        ({"flint__nextn_predict_layers": 1}, "flint.nextn_predict_layers = 1"),
        ({"flint__attn_logit_softcapping": 50.0}, "flint.attn_logit_softcapping = 50.0"),
        ({"flint__something_new": "x"}, "flint.something_new = 'x'"),
        ({"flint__expert_shared_count": 3}, "flint.expert_shared_count = 3"),
        ({"flint__leading_dense_block_count": 5}, "leading_dense_block_count = 5"),
        ({"flint__attention__scale": 1.0}, "flint.attention.scale = 1.0"),
        ({"flint__attention__head_count_kv": [2, 2, 1, 2]}, "head_count_kv differs between layers"),
        ({"flint__vocab_size": 100}, "vocabulary sizes differ: 128 rows of token_embd.weight, 100 flint.vocab_size"),
        ({"tokenizer__ggml__tokens": ["a"] * 127}, "127 entries of tokenizer.ggml.tokens"),
        ({"general__tensor_extra__prec_a4": [False, True]}, "general.tensor_extra.prec_a4 marks 1 tensors"),
    ],
)
def test_gguf_refusals(changes, words):
    assert words in gguf_refused(**changes)


def test_gguf_neutral_keys_pass():
    neutral = {
        "flint__rope__scaling__type": "none",
        "flint__rope__dimension_count": 32,
        "flint__attention__value_length": 32,
        "flint__vocab_size": 128,
        "flint__expert_group_count": 1,
        "flint__nextn_predict_layers": 0,
        "flint__attention__head_count_kv": [2, 2, 2, 2],
        "general__tensor_extra__prec_a4": [False, False],
        "flint__attn_logit_softcapping": 0.0,
    }
    assert config_from_gguf(files.metadata(**neutral), 128) == files.config()


def test_gguf_other_layer_patterns():
    config = config_from_gguf(
        files.metadata(
            flint__attention__sliding_window_pattern=[True, False, True, True],
            flint__attention__rope_pattern=[True, True, False, True],
            flint__leading_dense_block_count=1,
        ),
        128,
    )
    assert config.layer_types == (SLIDING, FULL, SLIDING, SLIDING)
    assert config.rope_layers == (True, True, False, True)
    assert config.mlp_only_layers == (0,)


@pytest.mark.parametrize("numbers", [np.array([0, 0, 1, 0], np.int32), [0, 0, 1, 0], np.array([0, 0, 1, 0], np.uint8)])
def test_gguf_layer_patterns_as_numbers(numbers):
    given = {"flint__attention__sliding_window_pattern": numbers, "flint__attention__rope_pattern": numbers}
    assert config_from_gguf(files.metadata(**given), 128) == files.config()


@pytest.mark.parametrize("one", [True, False, 1, 0])
def test_gguf_layer_pattern_of_one_value_for_all(one):
    given = {"flint__attention__sliding_window_pattern": one, "flint__attention__rope_pattern": one}
    config = config_from_gguf(files.metadata(**given), 128)
    assert config.layer_types == ((SLIDING if one else FULL),) * 4
    assert config.rope_layers == (bool(one),) * 4


# -- generation defaults ---------------------------------------------------------------------------------------------


def test_generation():
    given = {
        "_from_model_config": True,
        "transformers_version": "5",
        "temperature": 0.7,
        "top_k": None,
        "eos_token_id": 3,
    }
    assert generation_from_json(given) == {"temperature": 0.7, "eos_token_id": [3]}
    metadata = {
        "general.sampling.temp": float(np.float32(0.6)),
        "general.sampling.top_k": 20,
        "general.sampling.top_p": float(np.float32(0.95)),
        "general.sampling.penalty_repeat": 1.0,
        "tokenizer.ggml.eos_token_id": 5,
    }
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.0, "eos_token_id": [5]}
    assert generation_from_gguf(metadata) == expected
