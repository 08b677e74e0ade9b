"""The train step: accumulation, masks, balance, packed frozen weights, adapters to a file and into the weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flint_jax import CheckpointError, RequestError
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from flint_jax.research import lora, train
from flint_jax.weights import shapes
from loaders import writers
from tests.research import small

F32 = Numerics("transformers", "float32")
BF16 = Numerics("serving", "bfloat16")
# Two layers compile in half the time: dense and full, experts and window.
CONFIG = dataclasses.replace(
    small.CONFIG,
    num_hidden_layers=2,
    layer_types=small.CONFIG.layer_types[:2],
    rope_layers=small.CONFIG.rope_layers[:2],
)
RNG = np.random.default_rng(7)
ROWS = RNG.integers(0, CONFIG.vocab_size, (4, 12)).astype(np.int32)
BATCH = train.Batch(jnp.asarray(ROWS), jnp.array([12, 12, 5, 9], jnp.int32))
SGD = optax.sgd(0.1)


def weights(*kind):
    """The first two layers of the small model."""

    def cut(name, leaf):
        count = shapes(CONFIG)[name].shape[0]
        return leaf if name in ("embed", "head", "final_norm") else jax.tree.map(lambda a: a[:count], leaf)

    return {name: cut(name, leaf) for name, leaf in small.weights(*kind).items()}


@functools.cache
def step(accumulate=1):
    return train.make_step(train.full(CONFIG, F32), SGD, accumulate=accumulate)


def test_accumulation_is_the_whole_batch():
    """Rows of unequal length, so that a mean of means would differ."""
    one, whole = step()(train.start(weights(), SGD), None, BATCH)
    two, parts = step(2)(train.start(weights(), SGD), None, BATCH)
    assert int(one.step) == int(two.step) == 1
    small.close(parts["loss"], whole["loss"])
    small.close(parts["gradient_norm"], whole["gradient_norm"])
    assert float(whole["tokens"]) == 11 + 11 + 4 + 8
    jax.tree.map(lambda a, b: small.close(a, b, 1e-5), two.params, one.params)
    assert np.abs(np.asarray(one.params["o"] - weights()["o"])).max() > 1e-4
    for count in (0, 1.5, True):
        with pytest.raises(RequestError, match=f"accumulate = {count}: need a whole number, at least 1"):
            train.make_step(train.full(CONFIG, F32), SGD, accumulate=count)
        with pytest.raises(RequestError, match=f"every = {count}: need a whole number"):
            train.fit(step(), None, [], every=count)
    with pytest.raises(RequestError, match="4 rows cannot be run in 3 equal parts"):
        train.make_step(train.full(CONFIG, F32), SGD, accumulate=3)(train.start(weights(), SGD), None, BATCH)


def test_the_loss_is_that_of_the_logits():
    model = Flint(CONFIG, weights(), F32)
    logits = small.plain(model, ROWS, BATCH.lengths).astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    each = -np.take_along_axis(logp[:, :-1], ROWS[:, 1:, None], -1)[..., 0]
    place = np.arange(1, 12)[None]
    counts = place < np.asarray(BATCH.lengths)[:, None]
    wanted = RNG.random((4, 12)) < 0.5
    chosen = counts & wanted[:, 1:]
    some = jax.jit(lambda b: train.loss(model, b))(BATCH._replace(targets=jnp.asarray(wanted)))
    small.close(some, each[chosen].mean())
    state = train.start(weights(), SGD)
    small.close(step()(state, None, BATCH)[1]["loss"], each[counts].mean())
    # What padding holds means nothing.
    noisy = np.where(np.arange(12)[None] < np.asarray(BATCH.lengths)[:, None], ROWS, 3).astype(np.int32)
    assert (noisy != ROWS).any()
    other = step()(train.start(weights(), SGD), None, BATCH._replace(tokens=jnp.asarray(noisy)))
    small.close(other[1]["loss"], each[counts].mean())


def test_balance_loss():
    """1 when even; more the more one expert takes; its gradient takes score from the expert that is used most."""
    ids = jnp.asarray([[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]], jnp.int32)
    logits = jnp.zeros((5, 8), jnp.float32)
    real = jnp.array([1, 1, 1, 1, 0], jnp.float32)

    def balance(logits, ids, real):
        return train._balance(CONFIG, [{"logits": logits, "ids": ids}], real)[0]

    small.close(balance(logits, ids, real), 1.0)
    skew = jnp.zeros((5, 8)).at[:, 0].set(3.0)
    same = jnp.tile(jnp.asarray([[0, 1]], jnp.int32), (5, 1))
    share = 1 / (1 + np.exp(-np.array([3.0] + [0.0] * 7)))
    share /= share.sum()
    small.close(balance(skew, same, real), 8 * (0.5 * share[0] + 0.5 * share[1]))
    slope = np.asarray(jax.grad(balance)(skew, same, real))
    assert (slope[:4, :2] > 0).all()
    assert (slope[:4, 2:] < 0).all()
    assert not slope[4].any()  # padding
    peak = train._peak(jnp.asarray([[4.0, 4.0, 0, 0], [2, 2, 2, 2]]))
    assert float(peak) == 2.0


def test_training_from_scratch_learns_and_resumes(tmp_path):
    """Full parameters, bfloat16 compute over float32 masters: one batch by heart, then on from a saved state."""
    optimizer = optax.adamw(3e-3)
    run = train.make_step(train.full(CONFIG, BF16), optimizer, balance=1e-3)
    state = train.start(train.initial_weights(CONFIG, seed=1), optimizer)
    heard = []
    state, history = train.fit(
        run, state, [BATCH] * 40, report=lambda n, metrics: heard.append((n, metrics["loss"])), every=10
    )
    assert abs(history["loss"][0] - np.log(96)) < 0.2
    assert history["loss"][-1] < 1.0
    assert [n for n, _ in heard] == [1, 10, 20, 30]
    small.close(heard[1][1], history["loss"][9])
    train.save(tmp_path / "state", state)
    with pytest.raises(CheckpointError, match="state: exists already"):
        train.save(tmp_path / "state", state)
    back = train.restore(tmp_path / "state", train.start(train.initial_weights(CONFIG), optimizer))
    assert int(back.step) == 40
    jax.tree.map(np.testing.assert_array_equal, back, state)
    with pytest.raises(CheckpointError, match="no such folder"):
        train.restore(tmp_path / "nothing", back)


EVERY = lora.targets(CONFIG)


def trained(weight_format, numerics, stacks, steps=12):
    frozen = dict(weights(weight_format, numerics.dtype_name, numerics.mode))
    optimizer = optax.adam(1e-2)
    run = train.make_step(lora.adapters_over(CONFIG, numerics), optimizer)
    adapters = lora.create(CONFIG, stacks, rank=4, alpha=8.0)
    state, history = train.fit(run, train.start(adapters, optimizer), [BATCH] * steps, frozen=frozen)
    return frozen, state.params, history["loss"]


def test_adapters_on_every_matrix_over_packed_weights(tmp_path):
    """NVFP4 frozen, adapters on all matrices (experts and head too): learns, saves, loads, merges."""
    frozen, adapters, losses = trained("nvfp4", F32, EVERY)
    assert losses[-1] < losses[0] - 1.5
    moved = {name: float(jnp.abs(up).max()) for name, up in adapters.up.items()}
    assert min(moved.values()) > 0, moved
    path = tmp_path / "adapters.safetensors"
    lora.save(path, adapters)
    back = lora.load(path, CONFIG)
    assert back.alpha == 8.0
    assert list(back.up) == list(EVERY)
    jax.tree.map(np.testing.assert_array_equal, back, adapters)

    base = Flint(CONFIG, frozen, F32)
    merged = lora.merge(frozen, back)
    assert all(leaf.dtype == jnp.bfloat16 for name, leaf in merged.items() if name in EVERY)
    assert all(merged[name] is frozen[name] for name in frozen if name not in EVERY)
    # In float32 the adapted product and the merged matrix are the same function; bfloat16 rounds each weight once.
    logits = small.plain(lora.apply(base, back))
    small.close(small.plain(Flint(CONFIG, lora.merge(frozen, back, jnp.float32), F32)), logits, 1e-4)
    wide = {name: leaf.astype(jnp.float32) for name, leaf in merged.items()}
    drift = np.abs(small.plain(Flint(CONFIG, wide, F32)) - logits)
    assert np.median(drift) < 0.05 * np.median(np.abs(small.plain(base) - logits))
    assert base.stacks["o"].get_value().codes is frozen["o"].codes  # frozen weights are neither changed nor copied


def test_new_adapters_change_nothing_and_misfits_are_refused(tmp_path):
    frozen = weights()
    adapters = lora.create(CONFIG, ("qkv", "expert_down"), rank=2)
    np.testing.assert_array_equal(
        small.plain(Flint(CONFIG, lora.attach(frozen, adapters), F32)), small.plain(Flint(CONFIG, weights(), F32))
    )
    assert sum(np.abs(np.asarray(d)).min() == 0 for d in adapters.down.values()) == 0
    with pytest.raises(RequestError, match="names among"):
        lora.create(CONFIG, ("q_norm",))
    for options, text in [
        ({"rank": 0}, "rank = 0: need a whole number, at least 1"),
        ({"rank": -2}, "rank = -2"),
        ({"rank": 4.0}, "rank = 4.0: need a whole number"),
        ({"rank": True}, "rank = True: need a whole number"),
        ({"rank": "8"}, "rank = '8'"),
        ({"alpha": float("nan")}, "alpha = nan: need a finite number"),
        ({"alpha": "16"}, "alpha = '16'"),
        ({"alpha": True}, "alpha = True"),
        ({"seed": 0.5}, "seed = 0.5"),
        ({"stacks": "qkv"}, "stacks = 'qkv': need a list of names among"),
        ({"stacks": ()}, "need a list of names"),
        ({"stacks": 3}, "stacks = 3"),
        ({"stacks": ["qkv", ["o"]]}, "need a list of names"),
    ]:
        with pytest.raises(RequestError, match=text):
            lora.create(CONFIG, **options)
    with pytest.raises(RequestError, match="adapters are for qkv, and this model has no qkv"):
        lora.attach({"o": frozen["o"]}, lora.create(CONFIG, ("qkv",), rank=np.int64(2)))
    fewer = frozen | {"expert_down": frozen["expert_down"][:, :7]}
    with pytest.raises(RequestError, match=r"the adapters of expert_down are for .*, this model has"):
        lora.merge(fewer, adapters)
    path = tmp_path / "a.safetensors"
    lora.save(path, adapters)
    with pytest.raises(CheckpointError, match="made for another"):
        lora.load(path, dataclasses.replace(CONFIG, head_dim=32))
    writers.write_safetensors_file(path, [writers.from_array("x", np.zeros(3, np.float32))], {})
    with pytest.raises(CheckpointError, match=r"not adapters \(format None\)"):
        lora.load(path, CONFIG)
