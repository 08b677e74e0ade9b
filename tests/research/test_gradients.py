"""The module is differentiable: against difference quotients, against transformers, packed weights left alone."""

import functools
import json
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flint_jax
from flint_jax.numerics import Numerics
from flint_jax.research import lora, train
from flint_jax.weights import shapes
from tests.model import golden
from tests.model.test_oracle import BASE, PYTHON
from tests.research import small

BATCH = train.Batch(jnp.asarray(small.TOKENS), jnp.array([12, 9], jnp.int32))


@functools.cache
def gradient(config, numerics, balance=0.0):
    build = train.full(config, numerics)

    def loss(weights, batch):
        return train.loss(build(weights, None, batch.tokens.shape[1]), batch, balance=balance)

    return jax.jit(jax.value_and_grad(loss))


def test_against_difference_quotients():
    """Every stack along its own gradient, at float32: a central difference of 0.2 % of a step, to 2 %."""
    run = gradient(small.CONFIG, small.model().numerics, balance=0.1)
    weights = small.weights()
    _, grads = run(weights, BATCH)
    for name, grad in grads.items():
        size = float(jnp.linalg.norm(grad))
        assert np.isfinite(size)
        assert size > 1e-5, name
        step = 2e-3 * grad / size
        up, down = (run(weights | {name: weights[name] + sign * step}, BATCH)[0] for sign in (1, -1))
        slope = float(up - down) / 4e-3
        assert abs(slope - size) <= 0.02 * size + 3e-4, name


def test_without_remat_and_through_nnx_it_is_the_same():
    _, grads = gradient(small.CONFIG, small.model().numerics)(small.weights(), BATCH)
    through = nnx.jit(nnx.grad(lambda model: train.loss(model, BATCH, remat=False)))(small.model())
    small.close(through.blocks[0].attn.qkv.weight.get_value(), grads["qkv"])  # a stack is named where it is met first
    small.close(through.blocks[1].mlp.gate_up.weight.get_value(), grads["expert_gate_up"])
    small.close(through.embed.weight.get_value(), grads["embed"])
    small.close(through.head.weight.get_value(), grads["head"])


def test_bfloat16_gradients_point_the_same_way():
    """Cosine with the float32 gradient; 0.99 and more measured, experts less where a token is routed elsewhere."""
    _, want = gradient(small.CONFIG, small.model().numerics)(small.weights(), BATCH)
    _, got = gradient(small.CONFIG, Numerics("serving", "bfloat16"))(small.weights(), BATCH)
    for name, grad in got.items():
        a, b = np.asarray(grad, np.float64).ravel(), np.asarray(want[name], np.float64).ravel()
        assert a @ b >= 0.95 * np.linalg.norm(a) * np.linalg.norm(b), name


def digest(grad):
    flat = np.asarray(grad, np.float64).reshape(grad.shape[0] if grad.ndim > 2 else 1, -1)
    return np.stack([np.linalg.norm(flat, axis=-1), flat @ np.cos(np.arange(flat.shape[1]))], -1)


def test_golden_gradients_of_transformers():
    """T1.grads.npz (oracle_grads.py wrote it): every stack to 2e-4 of its largest number."""
    lm = golden.language_model("T1")
    ids = golden.arrays("T1")["len27.input_ids"][None]
    batch = train.Batch(jnp.asarray(ids), jnp.array([ids.shape[1]], jnp.int32))
    loss, grads = gradient(lm.config, lm.model.numerics)(lora.weights_of(lm), batch)
    with np.load(golden.FOLDER / "T1.grads.npz") as file:
        want = dict(file)
    assert abs(float(loss) - float(want.pop("loss"))) < 1e-4
    assert want.keys() == grads.keys()
    for name, value in want.items():
        grad = np.asarray(grads[name])
        small.close(digest(grad) if grad.size > 8192 else grad, value, 2e-4)


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="no environment with transformers")
def test_live_gradients_of_transformers(tmp_path):
    """Whole gradients of a random model with padding-free rows, every stack to 2e-4 of its largest number."""
    here = Path(__file__)
    settings = json.dumps(BASE | {"num_experts_per_tok": 3})
    command = [PYTHON, str(here.parents[1] / "model" / "oracle.py"), str(tmp_path), settings, "3", "30"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    ids = np.random.default_rng(5).integers(0, BASE["vocab_size"], (2, 20))
    out = tmp_path / "grads.npz"
    command = [PYTHON, str(here.with_name("oracle_grads.py")), str(tmp_path), json.dumps(ids.tolist()), str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    lm = flint_jax.load(tmp_path, dtype="float32", numerics="transformers", progress=False)
    batch = train.Batch(jnp.asarray(ids, jnp.int32), jnp.array([20, 20], jnp.int32))
    loss, grads = gradient(lm.config, lm.model.numerics)(lora.weights_of(lm), batch)
    with np.load(out) as file:
        want = dict(file)
    assert abs(float(loss) - float(want.pop("loss"))) < 1e-4
    assert want.keys() == grads.keys() == shapes(lm.config).keys()
    for name, value in want.items():
        small.close(grads[name], value, 2e-4)
