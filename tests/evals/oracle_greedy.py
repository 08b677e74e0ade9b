"""Run in transformers' environment: greedy continuations of prompts, float32.

usage: python oracle_greedy.py FOLDER PROMPTS_JSON OUT_JSON MAX_TOKENS
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

folder, prompts, out, most = sys.argv[1:5]
model, report = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
)
assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
stops = set(model.generation_config.eos_token_id)
outputs = []
for ids in json.loads(Path(prompts).read_text()):
    given = torch.tensor([ids])
    made = model.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, temperature=None, top_p=None, top_k=None,
        max_new_tokens=int(most),
    )[0, len(ids) :].tolist()  # fmt: skip
    outputs.append(made[:-1] if made[-1] in stops else made)
Path(out).write_text(json.dumps(outputs))
