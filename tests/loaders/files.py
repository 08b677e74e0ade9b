"""Writers of small checkpoints for the tests: whole models in both formats, and GGUF headers byte by byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from flint_jax.config import FlintConfig
from loaders.config import config_from_json
from pallas_kernels import nvfp4

GOLDENS = Path(__file__).parent.parent / "goldens"

JSON = {
    "architectures": ["FlintForCausalLM"],
    "model_type": "flint",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0, 1],
    "sliding_window": 9,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}


def config(**changes) -> FlintConfig:
    return config_from_json(JSON | changes)


def metadata(**changes) -> dict:
    """GGUF metadata of the model JSON describes; a change of None removes the key (dots as double underscores)."""
    values = {
        "general.architecture": "flint",
        "general.name": "tiny",
        "flint.block_count": 4,
        "flint.context_length": 512,
        "flint.embedding_length": 64,
        "flint.feed_forward_length": 192,
        "flint.attention.head_count": 4,
        "flint.attention.head_count_kv": 2,
        "flint.attention.key_length": 32,
        "flint.attention.layer_norm_rms_epsilon": 1e-6,
        "flint.attention.sliding_window": 9,
        "flint.attention.sliding_window_pattern": [False, False, True, False],
        "flint.attention.rope_pattern": [False, False, True, False],
        "flint.rope.freq_base": 10000.0,
        "flint.leading_dense_block_count": 2,
        "flint.expert_count": 4,
        "flint.expert_used_count": 2,
        "flint.expert_feed_forward_length": 64,
        "flint.expert_shared_feed_forward_length": 128,
        "flint.expert_shared_count": 2,
        "flint.expert_gating_func": 2,
        "flint.expert_weights_norm": True,
        "flint.expert_weights_scale": 1.0,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in values.items() if value is not None}


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def records(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random NVFP4 records uint8 [..., C/64*36] for a weight of ``shape``, block scales 0x00..0x7E."""
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 64, 36), dtype=np.uint8)
    blocks[..., :4] %= 0x7F
    return blocks.reshape(*shape[:-1], -1)


# -- whole models ----------------------------------------------------------------------------------------------------


def safetensors_model(seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of the model JSON describes, under the published names, all BF16."""
    rng, c = np.random.default_rng(seed), config()
    out = {}

    def put(name, *shape):
        out[name] = bf16(rng, *shape)

    def mlp(head, width):
        put(f"{head}.gate_proj.weight", width, c.hidden_size)
        put(f"{head}.up_proj.weight", width, c.hidden_size)
        put(f"{head}.down_proj.weight", c.hidden_size, width)

    put("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    put("lm_head.weight", c.vocab_size, c.hidden_size)
    put("model.norm.weight", c.hidden_size)
    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}"
        put(f"{layer}.input_layernorm.weight", c.hidden_size)
        put(f"{layer}.post_attention_layernorm.weight", c.hidden_size)
        put(f"{layer}.self_attn.q_proj.weight", c.q_size, c.hidden_size)
        put(f"{layer}.self_attn.k_proj.weight", c.kv_size, c.hidden_size)
        put(f"{layer}.self_attn.v_proj.weight", c.kv_size, c.hidden_size)
        put(f"{layer}.self_attn.o_proj.weight", c.hidden_size, c.q_size)
        put(f"{layer}.self_attn.q_norm.weight", c.head_dim)
        put(f"{layer}.self_attn.k_norm.weight", c.head_dim)
        put(f"{layer}.self_attn.softmax_offset", c.num_attention_heads)
        if i < 2:
            mlp(f"{layer}.mlp", c.intermediate_size)
            continue
        put(f"{layer}.mlp.gate.weight", c.num_experts, c.hidden_size)
        mlp(f"{layer}.mlp.shared_expert", c.shared_expert_intermediate_size)
        for e in range(c.num_experts):
            mlp(f"{layer}.mlp.experts.{e}", c.moe_intermediate_size)
    return out


def save_safetensors(folder: Path, tensors: dict[str, np.ndarray], shards: int = 1, values: dict | None = None) -> Path:
    """One file, or ``shards`` with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values or JSON))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, weight_map = list(tensors), {}
    for s in range(shards):
        file = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[s::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def gguf_model(seed: int = 0) -> dict[str, tuple[str, np.ndarray]]:
    """name -> (type, data) of the same model as an NVFP4 GGUF: every projection packed, each with its own scale."""
    rng, c = np.random.default_rng(seed), config()
    out: dict[str, tuple[str, np.ndarray]] = {}

    def packed(name, *shape):
        out[f"{name}.weight"] = ("NVFP4", records(rng, *shape))
        count = shape[0] if len(shape) == 3 else 1
        out[f"{name}.scale"] = ("F32", rng.uniform(0.001, 0.1, count).astype(np.float32))

    def plain(name, *shape, kind="F32"):
        values = rng.standard_normal(shape, np.float32)
        out[name] = (kind, values if kind == "F32" else values.astype(ml_dtypes.bfloat16))

    def mlp(layer, suffix, width, *lead):
        packed(f"{layer}.ffn_gate{suffix}", *lead, width, c.hidden_size)
        packed(f"{layer}.ffn_up{suffix}", *lead, width, c.hidden_size)
        packed(f"{layer}.ffn_down{suffix}", *lead, c.hidden_size, width)

    plain("token_embd.weight", c.vocab_size, c.hidden_size, kind="BF16")
    plain("output_norm.weight", c.hidden_size)
    packed("output", c.vocab_size, c.hidden_size)
    for i in range(c.num_hidden_layers):
        layer = f"blk.{i}"
        plain(f"{layer}.attn_norm.weight", c.hidden_size)
        plain(f"{layer}.ffn_norm.weight", c.hidden_size)
        packed(f"{layer}.attn_q", c.q_size, c.hidden_size)
        packed(f"{layer}.attn_k", c.kv_size, c.hidden_size)
        packed(f"{layer}.attn_v", c.kv_size, c.hidden_size)
        packed(f"{layer}.attn_output", c.hidden_size, c.q_size)
        plain(f"{layer}.attn_q_norm.weight", c.head_dim)
        plain(f"{layer}.attn_k_norm.weight", c.head_dim)
        plain(f"{layer}.attn_sinks.weight", c.num_attention_heads)
        if i < 2:
            mlp(layer, "", c.intermediate_size)
            continue
        plain(f"{layer}.ffn_gate_inp.weight", c.num_experts, c.hidden_size)
        mlp(layer, "_shexp", c.shared_expert_intermediate_size)
        mlp(layer, "_exps", c.moe_intermediate_size, c.num_experts)
    return out


def save_gguf(path: Path, tensors: dict[str, tuple[str, np.ndarray]], values: dict | None = None) -> Path:
    """Written by gguf-py, the format's own writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = dict(metadata() if values is None else values)
    writer = gguf.GGUFWriter(path, values.pop("general.architecture"))
    kinds = gguf.GGUFValueType
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            by_type = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
            writer.add_key_value(key, value, by_type[type(value)])
    for name, (kind, data) in tensors.items():
        if kind == "BF16":
            data = data.view(np.uint8)
        raw = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def decoded(kind: str, data: np.ndarray) -> np.ndarray:
    """float32 values of a tensor by gguf-py's decoder, without the tensor's own scale."""
    if kind == "NVFP4":
        return gguf.dequantize(data, gguf.GGMLQuantizationType.NVFP4)
    return np.asarray(data, np.float32)


def matrix_values(leaf) -> np.ndarray:
    """float32 values of a leaf of the tree, global scales left out."""
    if isinstance(leaf, nvfp4.Packed):
        return nvfp4.decode_numpy(np.asarray(leaf.codes), np.asarray(leaf.scales))
    return np.asarray(leaf.values_ if isinstance(leaf, nvfp4.Scaled) else leaf, np.float32)


# -- GGUF headers byte by byte ---------------------------------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def info(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's entry; ``dims`` innermost first, as in the file."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw_gguf(
    path: Path,
    keys: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version=3,
    counts=None,
) -> Path:
    """A GGUF from ready-made entries; ``counts`` overrides (tensors, keys)."""
    tensors, kvs = counts or (len(infos), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, kvs) + b"".join(keys) + b"".join(infos)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def key_u32(name: str, value: int) -> bytes:
    return text(name) + struct.pack("<II", 4, value)
