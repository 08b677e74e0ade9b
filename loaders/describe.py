"""A FlintConfig and a tokenizer as checkpoints hold them: config.json, tokenizer files, GGUF metadata."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flint_jax.config import SLIDING, FlintConfig
from flint_jax.errors import ConfigError, TokenizerError

if TYPE_CHECKING:
    from loaders.tokenizer import Tokenizer

_SAME_NAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts",
    "num_experts_per_tok", "sliding_window",
)  # fmt: skip
_GENERATION_TO_GGUF = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def config_json(config: FlintConfig) -> dict[str, Any]:
    """config.json of a config, without token ids."""
    c = config
    return {
        "architectures": ["FlintForCausalLM"],
        "model_type": "flint",
        **{f: getattr(c, f) for f in _SAME_NAME},
        "max_position_embeddings": c.max_position_embeddings,
        "mlp_only_layers": list(c.mlp_only_layers),
        "decoder_sparse_step": 1,
        "router_score_function": "sigmoid",
        "norm_topk_prob": c.norm_topk_prob,
        "layer_types": list(c.layer_types),
        "no_rope_layer_indices": [i for i, rope in enumerate(c.rope_layers) if not rope],
        "use_sliding_window": True,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.rms_norm_eps,
        "softmax_type": "learnable",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def config_gguf(config: FlintConfig) -> dict[str, Any]:
    """The ``flint.*`` keys of GGUF metadata. Raises ConfigError for what those keys cannot say."""
    c = config
    if sorted(c.mlp_only_layers) != list(range(len(c.mlp_only_layers))):
        raise ConfigError(
            f"mlp_only_layers = {list(c.mlp_only_layers)}: GGUF can only say how many layers at the start are dense; "
            "write safetensors or Orbax"
        )
    keys = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": np.array([k == SLIDING for k in c.layer_types]),
        "attention.rope_pattern": np.array(c.rope_layers),
        "rope.freq_base": c.rope_theta,
        "leading_dense_block_count": len(c.mlp_only_layers),
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
        "expert_shared_count": max(c.shared_expert_intermediate_size // c.moe_intermediate_size, 1),
        "expert_gating_func": 2,
        "expert_weights_norm": c.norm_topk_prob,
        "expert_weights_scale": c.routed_scaling_factor,
    }
    return {f"flint.{k}": v for k, v in keys.items()}


def general_gguf(name: str, packed: list[str]) -> dict[str, Any]:
    """The ``general.*`` keys; ``packed``: names of the NVFP4 tensors, whose activations stay in 16 bits."""
    return {
        "general.architecture": "flint",
        "general.type": "model",
        "general.name": name,
        "general.file_type": 39 if packed else 32,  # mostly NVFP4, mostly BF16
        "general.quantization_version": 2,
        **({"general.tensor_extra.name": packed} if packed else {}),
        **({"general.tensor_extra.prec_a4": np.zeros(len(packed), bool)} if packed else {}),
    }


def sampling_gguf(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults under GGUF's names."""
    found = {g: generation[k] for k, g in _GENERATION_TO_GGUF.items() if generation.get(k) is not None}
    return {f"general.sampling.{g}": int(v) if g == "top_k" else float(v) for g, v in found.items()}


def stop_ids_gguf(config: FlintConfig) -> dict[str, Any]:
    """Stop and padding ids of a model without a tokenizer."""
    first = dict(zip(("eos", "eot", "eom"), config.eos_token_ids, strict=False))
    keys: dict[str, Any] = {f"{name}_token_id": i for name, i in first.items()}
    if len(config.eos_token_ids) > 3:
        keys["eog_token_ids"] = np.asarray(config.eos_token_ids[3:], np.int32)
    if config.bos_token_id is not None:
        keys["bos_token_id"] = config.bos_token_id
    if config.pad_token_id is not None:
        keys["padding_token_id"] = config.pad_token_id
    return {f"tokenizer.ggml.{k}": v for k, v in keys.items()}


# -- tokenizer ---------------------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None, config: FlintConfig, source: Path | None = None) -> None:
    """Tokenizer files for a folder: those of the ``source`` folder as they are, else made from the tokenizer."""
    if source is not None and source.is_dir() and (source / "tokenizer.json").is_file():
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return
    if tokenizer is None:
        return
    state = tokenizer.state()
    # Names that no text can spell stand for unused ids, and for added tokens that the list of those has anyway.
    state["model"]["vocab"] = {t: i for t, i in state["model"]["vocab"].items() if not t.startswith("\0")}
    write_json(folder / "tokenizer.json", state)
    named = {f"{k}_token": getattr(tokenizer, f"{k}_token") for k in ("bos", "eos", "pad")}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": tokenizer.add_bos,
            **{name: token for name, token in named.items() if token is not None},
        },
    )
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def tokenizer_gguf(tokenizer: Tokenizer, config: FlintConfig) -> dict[str, Any]:
    """The ``tokenizer.*`` keys. Raises TokenizerError when GGUF has no name for how the tokenizer splits text."""
    from loaders.tokenizer import PRE_TOKENIZERS

    state = tokenizer.state()
    model = state["model"]
    parts = (state.get("pre_tokenizer") or {}).get("pretokenizers") or [state.get("pre_tokenizer") or {}]
    splits = tuple(p["pattern"].get("Regex", "") for p in parts if p.get("type") == "Split")
    rule = splits, bool(model.get("ignore_merges"))
    pre = next((name for name, known in PRE_TOKENIZERS.items() if known == rule), None)
    if pre is None:
        raise TokenizerError(
            f"GGUF names the rule by which text is split, and this tokenizer's is none of {', '.join(PRE_TOKENIZERS)}; "
            "write safetensors or Orbax, or give --tokenizer none"
        )
    normal, control, user, unused = 1, 3, 4, 5  # tokenizer.ggml.token_type
    tokens, types = [], []
    taken: set[str] = set()
    for i in range(config.vocab_size):
        text = tokenizer.token_string(i) if i < tokenizer.vocab_size else ""
        used = text != "" and not text.startswith("\0") and text not in taken and i not in tokenizer.unused_ids
        tokens.append(text if used else f"[PAD{i}]")
        added = tokenizer.added_tokens.get(text) == i
        types.append(unused if not used else normal if not added else control if i in tokenizer.special_ids else user)
        taken.add(tokens[-1])
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or ()]
    bos, pad = (None if t is None else tokenizer.token_id(t) for t in (tokenizer.bos_token, tokenizer.pad_token))
    stops = tokenizer.eog_ids
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.asarray(types, np.int32),
        "merges": merges,
        **{f"{name}_token_id": i for name, i in zip(("eos", "eot", "eom"), stops, strict=False)},
        "add_bos_token": tokenizer.add_bos,
    }
    if len(stops) > 3:
        keys["eog_token_ids"] = np.asarray(stops[3:], np.int32)
    keys |= {f"{n}_token_id": i for n, i in (("bos", bos), ("padding", pad)) if i is not None}
    out = {f"tokenizer.ggml.{k}": v for k, v in keys.items()}
    if tokenizer.chat_template is not None:
        out["tokenizer.chat_template"] = tokenizer.chat_template
    return out


def write_json(path: Path, value: Any) -> None:
    """JSON, readable, with a newline at the end."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
