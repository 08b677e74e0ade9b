"""Run in transformers' environment: float32 logits of a checkpoint folder.

usage: python oracle_logits.py FOLDER IDS_JSON OUT_NPZ
"""

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, ids, out = sys.argv[1], torch.tensor(json.loads(sys.argv[2])), sys.argv[3]
model, report = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
)
assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
words = AutoTokenizer.from_pretrained(folder)("The harbour was quiet, 12345 <think>")["input_ids"]
with torch.no_grad():
    np.savez(out, logits=model(ids).logits.numpy(), words=np.asarray(words))
