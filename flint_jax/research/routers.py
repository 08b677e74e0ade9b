"""Router statistics over a corpus, accumulated on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from flint_jax.errors import RequestError
from flint_jax.research.tracing import as_model, as_rows, forward


@dataclasses.dataclass(frozen=True)
class RouterStatistics:
    """What the routers did over ``tokens`` tokens. Lm layers with experts (``layers``: their indices), E experts.

    counts: tokens that chose each expert. together: tokens that chose both of a pair (diagonal: counts).
    token_entropy: mean over tokens of the entropy, in nats, of the scores divided by their sum over all experts.
    """

    layers: tuple[int, ...]
    tokens: int
    counts: Int[np.ndarray, "Lm E"]
    together: Int[np.ndarray, "Lm E E"]
    token_entropy: Float[np.ndarray, " Lm"]

    @property
    def load(self) -> Float[np.ndarray, "Lm E"]:
        """Share of the tokens that chose each expert; a row sums to the active experts of a token."""
        return self.counts / self.tokens

    @property
    def load_entropy(self) -> Float[np.ndarray, " Lm"]:
        """Entropy in nats of how the choices spread over the experts; log E when all are used equally."""
        share = self.counts / self.counts.sum(-1, keepdims=True)
        return -np.sum(share * np.log(np.where(share > 0, share, 1.0)), axis=-1)


def router_statistics(lm, batches: Iterable) -> RouterStatistics:
    """Load, co-activation and entropy of every router over a corpus.

    batches: token ids [B,T], or pairs (ids [B,T] right-padded, lengths [B]); padding does not count. Batches of one
    shape share one program. int32 counters: up to 2,147,483,647 tokens. Raises RequestError when there is no batch.
    """
    model = as_model(lm)
    c = model.config
    graph, state = nnx.split(model)
    layers, experts = len(c.moe_layers), c.num_experts
    if not layers:
        raise RequestError("the model has no layer with experts, so no router")
    total = {
        "tokens": jnp.zeros((), jnp.int32),
        "together": jnp.zeros((layers, experts, experts), jnp.int32),
        "entropy": jnp.zeros((layers,), jnp.float32),
    }
    seen = False
    for batch in batches:
        tokens, lengths = as_rows(model, *batch) if isinstance(batch, tuple) else as_rows(model, batch)
        total = _add(graph, total, state, tokens, lengths)
        seen = True
    if not seen:
        raise RequestError("no batch of tokens was given", param="batches")
    host = jax.device_get(total)
    count = int(host["tokens"])
    if not count:
        raise RequestError("the batches hold no token: all lengths are 0", param="batches")
    return RouterStatistics(
        layers=c.moe_layers,
        tokens=count,
        counts=np.diagonal(host["together"], axis1=1, axis2=2).copy(),
        together=host["together"],
        token_entropy=host["entropy"] / count,
    )


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="total")
def _add(graph, total, state, tokens, lengths):
    model = nnx.merge(graph, state)
    layers, experts = model.config.moe_layers, model.config.num_experts
    wanted = [f"blocks.{i}.mlp.router.{what}" for i in layers for what in ("logits", "ids")]
    _, tracer = forward(model, tokens, lengths, wanted, {})
    real = (jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]).reshape(-1)
    together, entropy = [], []
    for i in layers:
        ids = tracer.found[f"blocks.{i}.mlp.router.ids"].reshape(real.size, -1)
        logits = tracer.found[f"blocks.{i}.mlp.router.logits"].reshape(real.size, -1)
        chosen = jax.nn.one_hot(ids, experts, dtype=jnp.float32).sum(1) * real[:, None].astype(jnp.float32)
        # Sums of ones: exact in float32 up to 16,777,216 tokens a batch.
        together.append(jnp.dot(chosen.T, chosen, precision="highest").astype(jnp.int32))
        log_score = jax.nn.log_sigmoid(logits)
        log_share = log_score - jax.nn.logsumexp(log_score, axis=-1, keepdims=True)
        each = -jnp.sum(jnp.exp(log_share) * log_share, axis=-1)
        entropy.append(jnp.sum(jnp.where(real, each, 0.0)))
    return {
        "tokens": total["tokens"] + real.sum(dtype=jnp.int32),
        "together": total["together"] + jnp.stack(together),
        "entropy": total["entropy"] + jnp.stack(entropy),
    }
