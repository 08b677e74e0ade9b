"""Run in transformers' environment (Python with torch): random Flint -> checkpoint folder and its logits.

usage: python oracle.py FOLDER CONFIG_JSON SEED LENGTH
"""

import json
import sys

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main():
    folder, settings, seed, length = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.manual_seed(seed)
    config = AutoConfig.for_model("flint", **settings)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                value = 1 + 0.3 * torch.randn(p.shape, generator=generator)
            elif "sink" in name:
                value = torch.randn(p.shape, generator=generator)
            else:
                value = torch.randn(p.shape, generator=generator) * (1.5 / p.shape[-1] ** 0.5)
            p.copy_(value.to(p.dtype))
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(0, config.vocab_size, (1, length), generator=generator)
    with torch.no_grad():
        logits = model(ids).logits[0].float().numpy()
    np.savez(f"{folder}/oracle.npz", ids=ids.numpy(), logits=logits)


main()
