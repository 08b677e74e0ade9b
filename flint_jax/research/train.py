"""Training: the loss, a jitted and donated step with gradient accumulation, and the loop around it.

What is trained is any pytree ``params``; ``build(params, frozen, length)`` makes the model from it: ``full`` for all
weights (float32 master copies), ``lora.adapters_over`` for adapters over frozen, possibly packed, weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from flint_jax import moe
from flint_jax.config import FlintConfig
from flint_jax.errors import CheckpointError, RequestError
from flint_jax.model import Flint, add_norm
from flint_jax.numerics import Numerics
from flint_jax.research.attention import TrainingSequence
from flint_jax.sites import recording
from flint_jax.weights import shapes
from loaders import partial

LOSS_BYTES = 512 << 20  # of logits that exist at once: 800 positions of Flint's vocabulary
EXPERT_BYTES = 2 << 30  # of gathered expert weights a layer; beyond it a (slower) loop over blocks runs

Build = Callable[[Any, Any, int], Flint]


class Batch(NamedTuple):
    """tokens: int32 [B,T], right-padded. lengths: int32 [B]. targets: bool [B,T], the tokens to be predicted.

    The first token of a row and padding never count, whatever ``targets`` says; None: all others do.
    """

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    targets: Bool[Array, "B T"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step changes. step: int32, steps done."""

    step: Int[Array, ""]
    params: Any
    optimizer: Any


class Sums(NamedTuple):
    """Of a batch: summed -log p of its targets (nats), how many there are, balance loss, experts' choices."""

    nll: Float[Array, ""]
    count: Float[Array, ""]
    balance: Float[Array, ""]
    chosen: Float[Array, "Lm E"]


# -- loss --------------------------------------------------------------------------------------------------------------


def loss(model: Flint, batch: Batch, *, balance: float = 0.0, remat: bool = True) -> Float[Array, ""]:
    """Mean -log p of the targets in nats, plus ``balance`` times the routers' balance loss. Differentiable.

    The balance loss of a layer is E * sum_e f_e p_e: f_e the share of choices that expert e got, p_e the mean of its
    score over the sum of all scores. It is 1 when both are uniform; the layers' mean counts.
    """
    sums = loss_sums(model, batch, remat=remat)
    return sums.nll / jnp.maximum(sums.count, 1) + jnp.float32(balance) * sums.balance


def loss_sums(model: Flint, batch: Batch, *, remat: bool = True) -> Sums:
    """What the loss is made of. remat: keep only the streams between blocks, run each block again backwards."""
    batch = _complete(batch)
    with moe.grouped(EXPERT_BYTES):
        hidden, routings = _hidden(model, batch, remat)
    nll, count = _cross_entropy(model, hidden, batch)
    real = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None] < batch.lengths[:, None]
    balance, chosen = _balance(model.config, routings, real.reshape(-1).astype(jnp.float32))
    return Sums(nll, count, balance, chosen)


def _complete(batch: Batch) -> Batch:
    place = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]
    counts = (place > 0) & (place < batch.lengths[:, None])
    return batch._replace(targets=counts if batch.targets is None else counts & batch.targets)


def _hidden(model: Flint, batch: Batch, remat: bool):
    kv = TrainingSequence(model.config, model.numerics, batch.tokens.shape, batch.lengths)

    def run(block, residual, branch):
        routing = {}

        def keep(name, value):
            if ".mlp.router." in name:
                routing[name.rsplit(".", 1)[1]] = value
            return value

        with recording(keep):
            residual, branch = block(residual, branch, kv)
        return residual, branch, {name: routing[name] for name in ("logits", "ids") if routing}

    residual, branch, routings = model.embed.matrix[batch.tokens].astype(model.numerics.dtype), None, []
    for block in model.blocks:
        one = functools.partial(run, block)
        residual, branch, routing = (jax.checkpoint(one) if remat else one)(residual, branch)
        routings += [routing] if routing else []
    return add_norm(residual, branch, model.norm)[1], routings


def _cross_entropy(model: Flint, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Array, Array]:
    inputs = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    wanted, counts = batch.tokens[:, 1:].reshape(-1), batch.targets[:, 1:].reshape(-1)
    block = min(max(LOSS_BYTES // (4 * model.config.vocab_size), 1), max(len(wanted), 1))
    pad = -len(wanted) % block
    pieces = (
        jnp.pad(inputs, ((0, pad), (0, 0))).reshape(-1, block, hidden.shape[-1]),
        jnp.pad(wanted, (0, pad)).reshape(-1, block),
        jnp.pad(counts, (0, pad)).reshape(-1, block),
    )

    @jax.checkpoint
    def one(total, piece):
        x, target, real = piece
        logits = model.logits(x)
        found = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return total + jnp.sum(jnp.where(real, found, 0.0)), None

    total, _ = jax.lax.scan(one, jnp.zeros((), jnp.float32), pieces)
    return total, counts.sum(dtype=jnp.float32)


def _balance(config: FlintConfig, routings: list, real: Float[Array, " M"]) -> tuple[Array, Array]:
    if not routings:
        return jnp.zeros((), jnp.float32), jnp.zeros((0, config.num_experts), jnp.float32)
    losses, chosen = [], []
    for routing in routings:
        hits = jax.nn.one_hot(routing["ids"], config.num_experts, dtype=jnp.float32).sum(1) * real[:, None]
        scores = jax.nn.sigmoid(routing["logits"])
        share = scores / (scores.sum(-1, keepdims=True) + jnp.float32(1e-20))
        mean = (share * real[:, None]).sum(0) / jnp.maximum(real.sum(), 1)
        used = hits.sum(0)
        losses.append(config.num_experts * jnp.sum(used / jnp.maximum(used.sum(), 1) * mean))
        chosen.append(used)
    return jnp.stack(losses).mean(), jnp.stack(chosen)


# -- what is trained ---------------------------------------------------------------------------------------------------


def full(config: FlintConfig, numerics: Numerics) -> Build:
    """Train every weight: params are float32 stacks, computed with in the dtypes of ``numerics``."""

    def build(params, frozen, length: int) -> Flint:
        def cast(name: str, leaf: Array) -> Array:
            dtype = {"sinks": jnp.float32, "router": numerics.router_dtype}.get(name, numerics.dtype)
            return leaf.astype(dtype)

        weights = {name: cast(name, leaf) for name, leaf in params.items()}
        return Flint(config, weights, numerics, max_positions=length)

    return build


def initial_weights(config: FlintConfig, seed: int = 0, std: float = 0.02) -> dict[str, Array]:
    """Weights to train from: float32, normal with ``std``; branches' last matrices smaller by sqrt(2 L); sinks 0."""
    out = {}
    for n, (name, spec) in enumerate(shapes(config).items()):
        if name.endswith("norm"):
            out[name] = jnp.ones(spec.shape, jnp.float32)
        elif name == "sinks":
            out[name] = jnp.zeros(spec.shape, jnp.float32)
        else:
            last = name == "o" or name.endswith("down")
            size = std / math.sqrt(2 * config.num_hidden_layers) if last else std
            out[name] = size * jax.random.normal(jax.random.fold_in(jax.random.key(seed), n), spec.shape, jnp.float32)
    return out


# -- step and loop -----------------------------------------------------------------------------------------------------


def start(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """State before the first step. The step donates it, so ``params`` are copied."""
    params = jax.tree.map(jnp.array, params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_step(
    build: Build,
    optimizer: optax.GradientTransformation,
    *,
    balance: float = 0.0,
    accumulate: int = 1,
    remat: bool = True,
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, dict[str, Array]]]:
    """One jitted step ``(state, frozen, batch) -> (state, metrics)``; the state is donated, frozen weights are not.

    accumulate: run the batch in this many parts, one after the other; the gradient is that of the whole batch (the
    balance loss is the parts' mean). Metrics, on the device: loss (mean -log p, nats), balance, tokens (targets),
    gradient_norm, and load (largest share of an expert in any layer over the even share).
    """

    _count("accumulate", accumulate)

    def step(state: TrainState, frozen, batch: Batch):
        batch = _complete(batch)
        rows, length = batch.tokens.shape
        if rows % accumulate:
            raise RequestError(f"a batch of {rows} rows cannot be run in {accumulate} equal parts", param="accumulate")
        parts = jax.tree.map(lambda a: a.reshape(accumulate, rows // accumulate, *a.shape[1:]), batch)
        place = jnp.arange(length, dtype=jnp.int32)[None]
        count = jnp.maximum(jnp.sum(batch.targets & (place > 0), dtype=jnp.float32), 1)

        def one(params, part):
            sums = loss_sums(build(params, frozen, length), part, remat=remat)
            return sums.nll / count + jnp.float32(balance / accumulate) * sums.balance, sums

        def add(total, part):
            (_, sums), gradient = jax.value_and_grad(one, has_aux=True)(state.params, part)
            return jax.tree.map(jnp.add, total, (gradient, sums)), None

        first = jax.tree.map(lambda a: a[0], parts)
        shape = jax.eval_shape(lambda: jax.value_and_grad(one, has_aux=True)(state.params, first))
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (shape[1], shape[0][1]))
        (gradient, sums), _ = jax.lax.scan(add, zeros, parts) if accumulate > 1 else add(zeros, first)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes float32 with its int32 step count
            updates, opt = optimizer.update(gradient, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": sums.nll / count,
            "balance": sums.balance / accumulate,
            "tokens": count,
            "gradient_norm": optax.tree.norm(gradient),
            "load": _peak(sums.chosen),
        }
        return TrainState(state.step + 1, params, opt), metrics

    return jax.jit(step, donate_argnums=0)


def _count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise RequestError(f"{name} = {value!r:.60}: need a whole number, at least 1", param=name)


def _peak(chosen: Float[Array, "Lm E"]) -> Float[Array, ""]:
    if not chosen.shape[0]:
        return jnp.ones((), jnp.float32)
    return jnp.max(chosen / jnp.maximum(chosen.mean(-1, keepdims=True), 1))


def fit(
    step: Callable,
    state: TrainState,
    batches: Iterable[Batch],
    *,
    frozen: Any = None,
    report: Callable[[int, dict[str, float]], None] | None = None,
    every: int = 10,
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """Run the step over all batches; (last state, metrics of every step as arrays).

    report(step, metrics) is called every ``every`` steps. Metrics are read one interval late, so that the device never
    waits for the host. The given state is consumed.
    """
    _count("every", every)
    history: list[dict[str, Any]] = []
    done = int(state.step)
    for n, batch in enumerate(batches, start=1):
        state, metrics = step(state, frozen, batch)
        history.append(metrics)
        if report is not None and n % every == 0:
            late = max(n - every, 1)
            report(done + late, {name: float(value) for name, value in history[late - 1].items()})
    host = jax.device_get(history)
    names = host[0] if host else {}
    return state, {name: np.asarray([metrics[name] for metrics in host]) for name in names}


def save(folder: str | Path, state: TrainState) -> None:
    """Write a state as a new Orbax folder (it appears when it is whole). Raises CheckpointError when it exists."""
    import orbax.checkpoint as ocp

    partial.refuse_existing(Path(folder))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder).absolute(), state)


def restore(folder: str | Path, like: TrainState) -> TrainState:
    """Read a state back; ``like`` gives structure, shapes and shardings (a fresh ``start`` does)."""
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give one that train.save wrote")
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), like)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, abstract)
