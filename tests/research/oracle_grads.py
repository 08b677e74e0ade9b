"""Run in transformers' environment: gradients of the mean cross-entropy of a checkpoint, under our stacks' names.

usage: python oracle_grads.py FOLDER IDS_JSON OUT_NPZ [--digest]

Writes loss and one float32 array per stack. With --digest, stacks above 8,192 numbers are written as two numbers per
layer: the norm of the gradient, and its product with cos(0, 1, 2, ...).
"""

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

NAMES = {
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "self_attn.sinks": "sinks",
    "self_attn.o_proj.weight": "o",
    "mlp.gate.weight": "router",
    "mlp.experts.gate_up_proj": "expert_gate_up",
    "mlp.experts.down_proj": "expert_down",
    "mlp.down_proj.weight": "dense_down",
    "mlp.shared_expert.down_proj.weight": "shared_down",
}
JOINED = {
    "qkv": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "dense_gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "shared_gate_up": ["mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"],
}


def main():
    folder, ids, out = sys.argv[1], torch.tensor(json.loads(sys.argv[2])), sys.argv[3]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    grads = {
        name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
        for name, p in model.named_parameters()
    }
    stacks = {}
    for i in range(model.config.num_hidden_layers):
        layer = f"model.layers.{i}."
        found = {ours: grads[layer + theirs] for theirs, ours in NAMES.items() if layer + theirs in grads}
        for ours, parts in JOINED.items():
            if layer + parts[0] in grads:
                found[ours] = np.concatenate([grads[layer + part] for part in parts])
        for ours, grad in found.items():
            stacks.setdefault(ours, []).append(grad)
    made = {name: np.stack(layers) for name, layers in stacks.items()}
    made |= {
        "embed": grads["model.embed_tokens.weight"],
        "final_norm": grads["model.norm.weight"],
        "head": grads["lm_head.weight"],
    }
    if "--digest" in sys.argv:
        made = {name: digest(grad) if grad.size > 8192 else grad for name, grad in made.items()}
    np.savez(out, loss=np.float32(loss.item()), **made)


def digest(grad):
    flat = grad.reshape(grad.shape[0] if grad.ndim > 2 else 1, -1).astype(np.float64)
    return np.stack([np.linalg.norm(flat, axis=-1), flat @ np.cos(np.arange(flat.shape[1]))], -1).astype(np.float32)


main()
