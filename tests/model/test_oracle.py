"""Random shapes against transformers itself, in an environment of its own (FLINT_ORACLE_PYTHON names its Python).

python3.11 -m venv .venv-oracle && .venv-oracle/bin/pip install torch==2.13.0 transformers==5.24.0
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import flint_jax
from tests.model.golden import row_error

PYTHON = os.environ.get("FLINT_ORACLE_PYTHON", str(Path(__file__).parents[2] / ".venv-oracle/bin/python"))

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="no environment with transformers"),
]

BASE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 7,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "rms_norm_eps": 1e-5,
}
VARIANTS = {
    "base": {},
    "window 1": {"sliding_window": 1},
    "window longer than the prompt": {"sliding_window": 200},
    "one kv head, wide heads, odd theta": {"num_key_value_heads": 1, "head_dim": 32, "rope_theta": 3000.0},
    "no dense layers, one expert each": {"mlp_only_layers": [], "num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 8},
    "a schedule of its own": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "no_rope_layer_indices": [1],
        "mlp_only_layers": [2],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_model(tmp_path, variant):
    settings = BASE | VARIANTS[variant]
    script = Path(__file__).with_name("oracle.py")
    command = [PYTHON, str(script), str(tmp_path), json.dumps(settings), str(len(variant)), "70"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(tmp_path / "oracle.npz") as file:
        ids, want = file["ids"], file["logits"]
    lm = flint_jax.load(tmp_path, dtype="float32", numerics="transformers", progress=False)
    got = np.asarray(lm.logits(ids))[0]
    # float32 noise is 1e-6 a row; a near-tie in routing may flip one row in a random model.
    errors = np.array([row_error(g[None], w[None]) for g, w in zip(got, want, strict=True)])
    assert np.median(errors) <= 1e-5
    assert (errors <= 1e-4).mean() >= 0.97
