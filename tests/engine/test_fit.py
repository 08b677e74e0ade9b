"""Compiled before anything is allocated; the pool is what the compiled programs leave over."""

import functools
import logging

import jax
import pytest

from flint_jax import fit
from flint_jax.errors import ConfigError
from flint_jax.memory import MemoryPlan
from flint_jax.model import Flint
from flint_jax.numerics import Numerics
from flint_jax.random_weights import random_weights
from flint_jax.step import Sizes, Steps
from loaders.synthetic import preset, spread

NUMERICS = Numerics("serving", "bfloat16")
CONFIG = preset("tiny", 4)
SIZES = Sizes(2, 40, 1024, (1, 2), (16,), 2)
PAGE_BYTES = 10_000


def weights():
    return random_weights(CONFIG, NUMERICS, weight_format="bf16", spread=spread)


def plan(free, workspace):
    return MemoryPlan(SIZES, free, workspace, PAGE_BYTES, 1000, 1000)


@pytest.fixture(scope="module")
def steps():
    made = Steps(Flint(CONFIG, jax.eval_shape(weights), NUMERICS), SIZES, allocate=False)
    made.build()
    return made


def test_nothing_is_on_the_device_until_it_is_allocated(steps):
    leaves = jax.tree.leaves((steps.weights, steps.state, steps.tables, steps.snapshots))
    there = [leaf.shape for leaf in leaves if not isinstance(leaf, jax.ShapeDtypeStruct)]
    assert there == [(CONFIG.max_position_embeddings, CONFIG.head_dim)]  # cos and sin, which the model makes itself


def test_what_programs_need_is_counted(steps):
    needed, name = fit.needed_bytes(steps)
    assert name in {" ".join(map(str, key)) for key in steps.programs}
    temporaries = max(run.memory_analysis().temp_size_in_bytes for run in steps.programs.values())
    assert temporaries + 3 * 4 * CONFIG.vocab_size <= needed < temporaries + 2**22


def test_programs_compiled_from_shapes_run_on_weights(steps):
    made = Steps(Flint(CONFIG, jax.eval_shape(weights), NUMERICS), SIZES, allocate=False)
    made._compiled = steps.programs
    made.use(Flint(CONFIG, weights(), NUMERICS))
    made.allocate()
    made.warm_up()
    assert made.state.token.shape == (2,)
    wide = Numerics("serving", "float32")
    other = random_weights(CONFIG, wide, weight_format="bf16", spread=spread)
    with pytest.raises(ValueError, match="compiled for a weight bfloat16"):
        made.use(Flint(CONFIG, other, wide))


def test_pages_shrink_to_what_the_programs_leave(steps, caplog):
    caplog.set_level(logging.INFO, "flint_jax")
    needed, _ = fit.needed_bytes(steps)
    free = needed + 2 * 1000 + 2 * 1000 + 30 * PAGE_BYTES + 5000
    before = set(steps.programs.values())
    fitted, spent = fit.build(steps, plan(free, workspace=1000))
    # A smaller pool may take a few bytes less or more, never one of 40 pages again.
    assert 25 <= fitted.sizes.pages <= 30
    assert fitted.sizes.max_context == min(1024, fitted.sizes.pages * 64)
    assert fitted.workspace >= needed
    assert fitted.cache_bytes + fitted.workspace <= free
    assert steps.state.cache.k_pages.shape[1] == fitted.sizes.pages
    assert "pages instead of 40; compiling again" in caplog.text
    kept = {key[0] for key, run in steps.programs.items() if run in before}
    assert kept == {"peek", "logprobs", "redraw", "score", "save", "restore", "stack"}
    assert spent["wall"] > 0


def test_no_program_begins_when_nobody_wants_them(monkeypatch):
    made = Steps(Flint(CONFIG, jax.eval_shape(weights), NUMERICS), SIZES, allocate=False)
    monkeypatch.setattr("flint_jax.step.os.cpu_count", lambda: 1)
    begun = []

    def program(n):
        begun.append(n)
        return jax.jit(lambda x: x + n).lower(jax.ShapeDtypeStruct((), "int32"))

    lower = {("peek", n): functools.partial(program, n) for n in range(20)}
    monkeypatch.setattr(made, "_programs", lambda: lower)

    def stop(*_):
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        made.build(stop)
    assert len(begun) < 20


def test_slack_is_used_before_pages_go():
    roomy = plan(free=2**30, workspace=1000)
    assert roomy.with_workspace(2**20, "prefill 16").sizes == SIZES


def test_what_cannot_fit_says_what_to_lower():
    with pytest.raises(ConfigError, match=r"prefill 16 needs .*Lower --max-num-batched-tokens \(now 16\)"):
        plan(free=2**20, workspace=1000).with_workspace(2**20, "prefill 16")
