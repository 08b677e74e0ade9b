"""Packed prefill against the one-slot step on a small model whose shapes fit the kernels; on a GPU the kernels run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flint_jax import sampling, step, tiles
from flint_jax.model import Flint
from flint_jax.sampling_params import SamplingParams
from flint_jax.step import Sizes, Steps
from tests.model.golden import row_error
from tests.model.test_decode_kernels import CONFIG, NUMERICS, weights

SLOTS = 3
# bfloat16 activations through four layers, products in another order: measured 6e-3 on a CPU.
LIMIT = 2e-2


def tables():
    pages = np.random.default_rng(0).permutation(SLOTS * 12).reshape(SLOTS, 12).astype(np.int32)
    return np.pad(pages, ((0, 0), (0, 4)))


class Packed:
    """A state and the packed step over it."""

    def __init__(self, weight_format):
        model = Flint(CONFIG, tiles.tile_weights(dict(weights(weight_format))), NUMERICS)
        graph, tree = nnx.split(model)
        self.leaves, structure = jax.tree.flatten(tree)
        merge = lambda leaves: nnx.merge(graph, jax.tree.unflatten(structure, leaves))  # noqa: E731
        self.state = step.State.create(model, SLOTS, SLOTS * 12)
        cache = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), self.state.cache)
        self.state = step.dataclasses.replace(self.state, cache=cache)
        self.step = jax.jit(functools.partial(step._prefill_packed, merge=merge), donate_argnums=1)

    def __call__(self, places, *pieces):
        """pieces: (slot, start, tokens). Logits and hidden states of each piece."""
        tokens, rows, at = np.zeros(places, np.int32), np.zeros((4, 5), np.int32), 0
        spans = []
        for i, (slot, start, ids) in enumerate(pieces):
            rows[i] = at, slot, start, len(ids), 1
            tokens[at : at + len(ids)] = ids
            spans.append(slice(at, at + len(ids)))
            at += -(-len(ids) // 16) * 16
        self.state, _, logits, hidden = self.step(self.leaves, self.state, tables(), tokens, rows)
        hidden = np.asarray(hidden, np.float32)
        return np.asarray(logits)[: len(pieces)], [hidden[span] for span in spans]


@functools.cache
def one_by_one(weight_format, prompt, chunk):
    """Last logits of a prompt by the plain step of one slot on plain weights."""
    made = Steps(Flint(CONFIG, dict(weights(weight_format)), NUMERICS), Sizes(SLOTS, SLOTS * 12, 700, (1,), (64,)))
    made.set_tables(tables()[:, : made.tables.shape[1]])
    made.admit(0, sampling.slot_row(SamplingParams(temperature=0.0), prompt, CONFIG.vocab_size, (), 0), 699)
    for start in range(0, len(prompt), chunk):
        piece = prompt[start : start + chunk]
        _, logits = made.prefill([(piece, 0, start, start + chunk >= len(prompt))])
    return np.asarray(logits)[0]


def prompt(seed, length):
    return tuple(np.random.default_rng(seed).integers(CONFIG.vocab_size, size=length).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", ["nvfp4", "bf16"])
def test_packed_pieces_match_the_step_of_one_slot(weight_format):
    """A whole prompt, one in two pieces beside it, and one longer than the ring that goes on in its middle."""
    run = Packed(weight_format)
    first, second, third = prompt(1, 70), prompt(2, 50), prompt(3, 640)
    a, _ = run(160, (1, 0, first), (0, 0, second[:33]))
    run(640, (2, 0, third[:601]))
    b, _ = run(160, (0, 33, second[33:]), (2, 601, third[601:]))
    for logits, whole in ((a[0], first), (b[0], second), (b[1], third)):
        assert row_error(logits, one_by_one(weight_format, whole, 64)) < LIMIT


@pytest.mark.slow
def test_the_same_bits_in_any_company():
    run, alone = Packed("nvfp4"), Packed("nvfp4")
    first, second = prompt(1, 70), prompt(2, 50)
    together, hidden = run(160, (1, 0, first), (0, 0, second))
    by_itself, hidden_alone = alone(160, (0, 0, second))
    np.testing.assert_array_equal(hidden[1], hidden_alone[0])
    np.testing.assert_array_equal(together[1], by_itself[0])
