"""FlintConfig from config.json or from GGUF metadata.

Both are brought to one dictionary of config.json's names and judged by the same rules. A key that would make the model
compute something else is either understood, or set to a value that changes nothing, or refused by name; a key that only
concerns training or bookkeeping is ignored.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flint_jax.config import FULL, SLIDING, FlintConfig
from flint_jax.errors import ConfigError

log = logging.getLogger(__name__)

ARCHITECTURE = "FlintForCausalLM"
MODEL_TYPE = "flint"
MAX_JSON = 1 << 22
MAX_LAYERS = 1 << 12

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
)
_ALIASES = {
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
}
_UNDERSTOOD = {
    *_SIZES,
    *_ALIASES,
    "architectures",
    "model_type",
    "layer_types",
    "no_rope_layer_indices",
    "mlp_only_layers",
    "decoder_sparse_step",
    "sliding_window",
    "use_sliding_window",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "rms_norm_eps",
    "max_position_embeddings",
    "norm_topk_prob",
    "routed_scaling_factor",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}
_UNSET = (None, False, 0, "", "none")

# Architecture switches and the values of them that this model computes. Absent or null is always fine.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_chunk_size": (),
    "attn_output_gate": (False,),
    "clip_qkv": (),
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "moe_layer_freq": (1,),
    "interleave_moe_layer_step": (1,),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "position_embedding_type": ("rope", "rotary"),
    "qk_layernorm": (True,),
    "qk_norm": (True,),
    "use_qk_norm": (True,),
    "router_score_function": ("sigmoid",),
    "scoring_func": ("sigmoid",),
    "moe_router_activation_func": ("sigmoid",),
    "softmax_type": ("learnable",),
    "tie_word_embeddings": (False,),
    "topk_method": ("greedy",),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "num_expert_group": (0, 1),
    "n_shared_experts": (1,),
    "num_shared_experts": (1,),
    "use_moe": (True,),
    "use_sinks": (True,),
    "use_attention_sinks": (True,),
    "attention_sink": (True,),
    "attention_sinks": (True,),
    "text_config": (),
    "vision_config": (),
    "audio_config": (),
    "swiglu_limit": (),
    "sliding_window_pattern": (),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "original_max_position_embeddings": (),
}
# Keys we have never seen but whose names say that they change the computation: neutral values pass, others do not.
_SUSPECT = re.compile(
    r"bias$|_bias_|scaling|softcap|soft_cap|multiplier|_scale$|^scale_|lora|alibi|mtp|nextn|gated|_gate$|group|capping|"
    r"clip|quant|rope|rotary|rotation|sink|window|chunk|expert|moe_|sparse|norm_(type|topology|before|after|position)|"
    r"(pre|post|sandwich|layer)_?norm(?!_eps)|parallel_(block|attn|residual)|mamba|ssm|linear_attn|linear_attention|"
    r"kv_shared|shared_kv|cross_|hash|per_layer|mla|conv|state_|_act(ivation)?(_fn|_func)?$|attn_"
)
_TRAINING_ONLY = re.compile(r"(dtype|implementation|_coef|dropout|_loss\w*)$")
_ONE_IS_NEUTRAL = re.compile(r"scal|multiplier|factor|freq|step|group|chunk")
# Names that the pattern above catches although they only concern training, bookkeeping or other software.
_HARMLESS = {
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "output_router_logits", "router_jitter_noise", "initializer_range",
    "use_cache", "max_window_layers", "chunk_size_feed_forward", "seq_aux", "aux_loss_alpha", "pretraining_tp",
    "ep_size", "moe_token_dropping", "bad_words_ids", "cross_attention_hidden_size",
}  # fmt: skip


def read_json(path: str | Path) -> dict[str, Any]:
    """A small JSON object from a file; ConfigError when it is none."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_JSON:
            raise ConfigError(f"{path}: larger than {MAX_JSON} bytes, not a configuration")
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: need a JSON object")
    return value


def config_from_json(values: Mapping[str, Any]) -> FlintConfig:
    """The content of config.json -> FlintConfig. Raises ConfigError naming each missing or unsupported key."""
    problems: list[str] = []
    values = {key: value for key, value in values.items() if value is not None}
    _check_identity(values, problems)
    for alias, name in _ALIASES.items():
        if alias in values and values.setdefault(name, values[alias]) != values[alias]:
            problems.append(f"{alias} = {values[alias]!r} contradicts {name} = {values[name]!r}")
    _check_switches(values, problems)
    fields: dict[str, Any] = {}
    for name in _SIZES:
        if name not in values:
            problems.append(f"{name} is missing")
        elif not _is_int(values[name]):
            problems.append(f"{name} = {values[name]!r}: need an integer")
        else:
            fields[name] = values[name]
    if not 0 < fields.get("num_hidden_layers", 0) <= MAX_LAYERS:
        problems.append(f"num_hidden_layers = {values.get('num_hidden_layers')!r}: need 1 to {MAX_LAYERS}")
    if problems:
        raise _error(problems)
    layers = fields["num_hidden_layers"]
    fields |= _layers(values, layers, problems)
    fields["rope_theta"] = _rope_theta(values, problems)
    fields |= _numbers(values, problems)
    fields |= _token_ids(values, problems)
    if problems:
        raise _error(problems)
    return FlintConfig(**fields)


def _error(problems: list[str], limit: int = 20) -> ConfigError:
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return ConfigError("this configuration is not a Flint we can run: " + "; ".join(problems[:limit]) + more)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _same(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Equality that keeps True apart from 1 and 0 apart from False."""
    return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)


def _check_identity(values: Mapping[str, Any], problems: list[str]) -> None:
    kind = values.get("model_type", MODEL_TYPE)
    if kind != MODEL_TYPE:
        problems.append(f"model_type = {kind!r}; supported: {MODEL_TYPE!r}")
    names = values.get("architectures", [ARCHITECTURE])
    if names != [ARCHITECTURE]:
        problems.append(f"architectures = {names!r}; supported: [{ARCHITECTURE!r}]")
    if "model_type" not in values and "architectures" not in values:
        problems.append("neither model_type nor architectures is there, so it may be any model")


def _check_switches(values: Mapping[str, Any], problems: list[str]) -> None:
    for key, value in values.items():
        if key in _UNDERSTOOD or key in _HARMLESS:
            continue
        if key in _FIXED:
            if not _same(value, _FIXED[key]):
                supported = " or ".join(repr(v) for v in _FIXED[key]) or "absent"
                problems.append(f"{key} = {_short(value)}; supported: {supported}")
        elif key in ("query_pre_attn_scalar", "v_head_dim", "qk_head_dim", "rotary_dim"):
            if value != values.get("head_dim"):
                problems.append(f"{key} = {_short(value)}; supported: head_dim ({values.get('head_dim')!r})")
        elif key == "first_k_dense_replace":
            if values.get("mlp_only_layers") != list(range(value if _is_int(value) else 0)):
                problems.append(
                    f"{key} = {_short(value)} contradicts mlp_only_layers = {values.get('mlp_only_layers')!r}"
                )
        elif _SUSPECT.search(key.lower()) and not _TRAINING_ONLY.search(key.lower()):
            neutral = value in _UNSET or value in ([], {}) or (value == 1 and _ONE_IS_NEUTRAL.search(key.lower()))
            if not neutral:
                problems.append(
                    f"{key} = {_short(value)} is not known here and may change the model; supported: absent"
                )
        else:
            log.debug("config key %s ignored", key)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _indices(values: Mapping[str, Any], key: str, layers: int, default: list[int], problems: list[str]) -> list[int]:
    found = values.get(key, default)
    if not isinstance(found, list) or not all(_is_int(i) and 0 <= i < layers for i in found):
        problems.append(f"{key} = {_short(found)}: need a list of layer indices below {layers}")
        return default
    if len(set(found)) != len(found):
        problems.append(f"{key} = {_short(found)}: an index is there twice")
    return found


def _layers(values: Mapping[str, Any], layers: int, problems: list[str]) -> dict[str, Any]:
    window_on = values.get("use_sliding_window", True)
    if not isinstance(window_on, bool):
        problems.append(f"use_sliding_window = {_short(window_on)}: need true or false")
    default = [FULL if not window_on or i < 2 or i % 4 == 1 or i == layers - 1 else SLIDING for i in range(layers)]
    kinds = values.get("layer_types", default)
    if not isinstance(kinds, list) or len(kinds) != layers or not all(k in (FULL, SLIDING) for k in kinds):
        size = f"{len(kinds)} entries" if isinstance(kinds, list) else _short(kinds)
        odd = sorted({str(k) for k in kinds} - {FULL, SLIDING}) if isinstance(kinds, list) else []
        problems.append(
            f"layer_types has {size}{f', unknown kinds {odd}' if odd else ''}; need one of {FULL}, {SLIDING} for each "
            f"of the {layers} layers (num_hidden_layers)"
        )
        kinds = default
    if not window_on and SLIDING in kinds:
        problems.append(
            f"use_sliding_window = false contradicts layer_types, which has {kinds.count(SLIDING)} {SLIDING}"
        )
    window = values.get("sliding_window")
    if SLIDING not in kinds and not _is_int(window):
        window = values.get("max_position_embeddings", 262144)  # no layer looks at it
    elif not _is_int(window) or window < 1:
        problems.append(f"sliding_window = {window!r}: need a positive integer, since layer_types has {SLIDING}")
    full = [i for i, kind in enumerate(kinds) if kind == FULL]
    no_rope = _indices(values, "no_rope_layer_indices", layers, full, problems)
    step = values.get("decoder_sparse_step", 1)
    if not _is_int(step) or step < 1:
        problems.append(f"decoder_sparse_step = {_short(step)}: need a positive integer")
        step = 1
    dense = _indices(values, "mlp_only_layers", layers, [i for i in (0, 1) if i < layers], problems)
    dense = sorted({*dense, *(i for i in range(layers) if (i + 1) % step)})
    return {
        "layer_types": tuple(kinds),
        "rope_layers": tuple(i not in set(no_rope) for i in range(layers)),
        "mlp_only_layers": tuple(dense),
        "sliding_window": window,
    }


def _rope_theta(values: Mapping[str, Any], problems: list[str]) -> float:
    """The base, from wherever it is written; any scaling of positions or partial rotation is refused."""
    found: dict[str, Any] = {}
    if "rope_theta" in values:
        found["rope_theta"] = values["rope_theta"]
    for key in ("rope_parameters", "rope_scaling"):
        block = values.get(key)
        if block is None or block == {}:
            continue
        if not isinstance(block, Mapping):
            problems.append(f"{key} = {_short(block)}: need an object")
            continue
        if set(block) <= {FULL, SLIDING}:  # one block per kind of layer; only sliding layers rotate
            block = block.get(SLIDING) or block.get(FULL) or {}
            key = f"{key}.{SLIDING}"
        for name, value in block.items():
            if name == "rope_theta":
                found[f"{key}.rope_theta"] = value
            elif name in ("rope_type", "type"):
                if value not in (None, "default", "none"):
                    problems.append(f"{key}.{name} = {_short(value)}; supported: 'default'")
            elif value is not None and not (
                name in ("factor", "partial_rotary_factor", "attention_factor") and value == 1
            ):
                problems.append(f"{key}.{name} = {_short(value)}; supported: absent")
    for where, value in found.items():
        if not _is_number(value) or value <= 0:
            problems.append(f"{where} = {_short(value)}: need a positive number")
            return 10000.0
    if len(set(found.values())) > 1:
        problems.append("contradicting values: " + ", ".join(f"{k} = {v!r}" for k, v in found.items()))
    return float(next(iter(found.values()), 10000.0))


def _numbers(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in ("rms_norm_eps", "routed_scaling_factor"):
        if name in values:
            if _is_number(values[name]):
                out[name] = float(values[name])
            else:
                problems.append(f"{name} = {_short(values[name])}: need a number")
    if "max_position_embeddings" in values:
        out["max_position_embeddings"] = values["max_position_embeddings"]
    if "norm_topk_prob" in values:
        if isinstance(values["norm_topk_prob"], bool):
            out["norm_topk_prob"] = values["norm_topk_prob"]
        else:
            problems.append(f"norm_topk_prob = {_short(values['norm_topk_prob'])}: need true or false")
    return out


def _token_ids(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"eos_token_ids": tuple(token_ids(values.get("eos_token_id"), "eos_token_id", problems))}
    for name in ("bos_token_id", "pad_token_id"):
        value = values.get(name)
        if value is not None and not _is_int(value):
            problems.append(f"{name} = {_short(value)}: need an integer")
        elif value is not None and value >= 0:  # -1 is how some writers say "none"
            out[name] = value
    return out


def token_ids(value: Any, key: str, problems: list[str]) -> list[int]:
    """An id, a list of ids or nothing -> a list without repeats, in order."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    found = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if not all(_is_int(i) and i >= 0 for i in found):
        problems.append(f"{key} = {_short(value)}: need token ids")
        return []
    return list(dict.fromkeys(found))


# -- GGUF ------------------------------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
}
_GGUF_FIXED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (2,),  # sigmoid
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "moe_every_n_layers": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "logit_scale": (0, 1),
}
_GGUF_ELSEWHERE = {
    "attention.sliding_window_pattern", "attention.rope_pattern", "leading_dense_block_count", "vocab_size",
    "attention.value_length", "rope.dimension_count", "rope.freq_base_swa", "expert_shared_count", "attention.scale",
}  # fmt: skip


def config_from_gguf(metadata: Mapping[str, Any], vocab_rows: int | None = None) -> FlintConfig:
    """GGUF metadata -> FlintConfig; ``vocab_rows`` is the number of rows of token_embd.weight.

    Raises ConfigError for another architecture, for missing keys, for any ``flint.*`` key that is not understood and
    has a value other than zero, and for files that ask for 4-bit activations.
    """
    problems: list[str] = []
    architecture = metadata.get("general.architecture")
    if architecture != MODEL_TYPE:
        raise ConfigError(f"general.architecture = {_short(architecture)}; supported: {MODEL_TYPE!r}")
    prefix = MODEL_TYPE + "."
    given = {key[len(prefix) :]: _plain(value) for key, value in metadata.items() if key.startswith(prefix)}
    values: dict[str, Any] = {"model_type": MODEL_TYPE}
    for key, value in given.items():
        if key in _GGUF_NAMES:
            values[_GGUF_NAMES[key]] = _one_for_all_layers(prefix + key, value, problems)
        elif key in _GGUF_FIXED:
            if not _same(value, _GGUF_FIXED[key]):
                supported = " or ".join(repr(v) for v in _GGUF_FIXED[key])
                problems.append(f"{prefix}{key} = {_short(value)}; supported: {supported}")
        elif key not in _GGUF_ELSEWHERE and not (value in _UNSET or (isinstance(value, list) and not any(value))):
            problems.append(
                f"{prefix}{key} = {_short(value)} is not known here and may change the model; supported: absent"
            )
    for key, name in _GGUF_NAMES.items():
        if name in _SIZES and name not in values:
            problems.append(f"{prefix}{key} is missing")
    _gguf_layers(given, values, problems)
    _gguf_repeats(given, values, problems)
    _gguf_vocabulary(metadata, given, values, vocab_rows, problems)
    marked = np.asarray(metadata.get("general.tensor_extra.prec_a4", False))
    if marked.any():
        problems.append(
            f"general.tensor_extra.prec_a4 marks {int(marked.sum())} tensors for 4-bit activations; supported: "
            "weights only (all false)"
        )
    if problems:
        raise _error(problems)
    return config_from_json(values)


def _plain(value: Any) -> Any:
    """numpy arrays -> lists; float32 -> the shortest decimal that names it (1e-06, not 9.999999974752427e-07)."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            narrow = np.float32(value)
        return float(str(narrow)) if float(narrow) == value else value
    return value


def _one_for_all_layers(key: str, value: Any, problems: list[str]) -> Any:
    if not isinstance(value, list):
        return value
    if not value or any(v != value[0] for v in value):
        problems.append(f"{key} differs between layers ({_short(value)}); supported: one value")
    return value[0] if value else None


def _gguf_layers(given: Mapping[str, Any], values: dict[str, Any], problems: list[str]) -> None:
    layers = values.get("num_hidden_layers")
    if not _is_int(layers) or not 0 < layers <= MAX_LAYERS:
        return  # reported as missing, or by config_from_json
    patterns = {}
    for key in ("attention.sliding_window_pattern", "attention.rope_pattern"):
        pattern = given.get(key)
        if pattern is None:
            continue
        found = pattern if isinstance(pattern, list) else [pattern] * layers  # one value is for all layers
        flags = all(isinstance(v, bool) or (_is_int(v) and v in (0, 1)) for v in found)
        if not flags or len(found) != layers:
            size = f"has {len(pattern)} entries" if isinstance(pattern, list) and flags else f"= {_short(pattern)}"
            problems.append(
                f"flint.{key} {size}; need a boolean (or 0, 1) for each of the {layers} layers, or one for all"
            )
            continue
        patterns[key] = [bool(v) for v in found]
    sliding = patterns.get("attention.sliding_window_pattern")
    if sliding is not None:
        values["layer_types"] = [SLIDING if s else FULL for s in sliding]
    rope = patterns.get("attention.rope_pattern")
    if rope is not None:
        values["no_rope_layer_indices"] = [i for i, r in enumerate(rope) if not r]
    dense = given.get("leading_dense_block_count", 0)
    if not _is_int(dense) or not 0 <= dense <= layers:
        problems.append(f"flint.leading_dense_block_count = {_short(dense)}: need 0 to {layers}")
        dense = 0
    values["mlp_only_layers"] = list(range(dense))


def _gguf_repeats(given: Mapping[str, Any], values: Mapping[str, Any], problems: list[str]) -> None:
    """Keys that say again what another key has said."""
    head = values.get("head_dim")
    for key in ("attention.value_length", "rope.dimension_count"):
        if key in given and given[key] != head:
            problems.append(f"flint.{key} = {_short(given[key])}; supported: attention.key_length ({head!r})")
    theta = values.get("rope_theta", 10000.0)
    if given.get("rope.freq_base_swa", theta) != theta:
        problems.append(f"flint.rope.freq_base_swa = {_short(given['rope.freq_base_swa'])}, rope.freq_base = {theta!r}")
    scale = given.get("attention.scale")
    if scale and _is_int(head) and not (_is_number(scale) and math.isclose(scale, head**-0.5, rel_tol=1e-6)):
        problems.append(f"flint.attention.scale = {_short(scale)}; supported: key_length ** -0.5 ({head**-0.5!r})")
    # The converter writes shared width / expert width although the shared expert is one MLP; some write 1.
    shared, width = values.get("shared_expert_intermediate_size"), values.get("moe_intermediate_size")
    count = given.get("expert_shared_count", 1)
    if count != 1 and not (_is_int(count) and _is_int(shared) and _is_int(width) and count * width == shared):
        problems.append(f"flint.expert_shared_count = {_short(count)}; supported: 1, or shared width / expert width")


def _gguf_vocabulary(
    metadata: Mapping[str, Any], given: Mapping[str, Any], values: dict[str, Any], rows: int | None, problems: list[str]
) -> None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    sizes = {
        "rows of token_embd.weight": rows,
        "flint.vocab_size": given.get("vocab_size"),
        "entries of tokenizer.ggml.tokens": len(tokens) if isinstance(tokens, list) else None,
    }
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if not sizes:
        problems.append("the vocabulary size is nowhere: no token_embd.weight, flint.vocab_size, tokenizer.ggml.tokens")
    elif len(set(sizes.values())) > 1:
        problems.append("vocabulary sizes differ: " + ", ".join(f"{size} {name}" for name, size in sizes.items()))
    values["vocab_size"] = next(iter(sizes.values()), 0)
    values["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    values["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    values["eos_token_id"] = gguf_stop_ids(metadata, problems)


def gguf_stop_ids(metadata: Mapping[str, Any], problems: list[str]) -> list[int]:
    """Ids that end a turn: eos, eot, eom, and the list of further ones."""
    ids: list[int] = []
    for name in ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids", "eog_token_ids"):
        ids += token_ids(metadata.get(f"tokenizer.ggml.{name}"), f"tokenizer.ggml.{name}", problems)
    return list(dict.fromkeys(ids))


# -- generation defaults ---------------------------------------------------------------------------------------------

_GGUF_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def generation_from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json -> its settings; ``eos_token_id`` always a list, nulls and bookkeeping left out."""
    out = {k: v for k, v in values.items() if v is not None and not k.startswith("_") and k != "transformers_version"}
    problems: list[str] = []
    if "eos_token_id" in out:
        out["eos_token_id"] = token_ids(out["eos_token_id"], "eos_token_id", problems)
    if problems:
        raise ConfigError("generation_config.json: " + "; ".join(problems))
    return out


def generation_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF's sampling keys under the names of generation_config.json, and the stop ids."""
    out = {
        name: _plain(metadata[f"general.sampling.{key}"])
        for key, name in _GGUF_SAMPLING.items()
        if f"general.sampling.{key}" in metadata
    }
    ids = gguf_stop_ids(metadata, [])
    return out | ({"eos_token_id": ids} if ids else {})
