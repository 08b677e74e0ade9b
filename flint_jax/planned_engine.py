"""An engine in the order in which it can start: plan its memory, compile, take the weights, allocate, run once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import jax

from flint_jax import decode, fit, memory
from flint_jax.engine import Engine
from flint_jax.errors import ConfigError
from flint_jax.model import Flint
from flint_jax.step import Steps

log = logging.getLogger("flint_jax")
SMALLER = 3  # times that the pool may be made smaller


class PlannedEngine:
    """An engine that holds nothing on the device yet.

    model: its weights may be shapes. pending: bytes of each array of its weights that is not loaded. Everything else as
    in ``memory.plan``. Raises ConfigError when the weights do not fit, or the plan has no room for the KV cache.
    """

    def __init__(
        self,
        model: Flint,
        *,
        eos_ids: Sequence[int],
        seed: int,
        max_prefill_ms: float | None = None,
        pending: Sequence[int] = (),
        **sizes,
    ):
        limit = memory.process_limit()
        if pending and limit is not None:
            memory.check_weights(sum(pending), max(pending), limit)
        self._options = {
            "eos_ids": eos_ids,
            "seed": seed,
            "budget": sizes["max_num_batched_tokens"],
            "max_prefill_ms": max_prefill_ms,
        }
        self.plan = memory.plan(
            model.config,
            model.numerics,
            pending=sum(pending),
            largest=max(pending, default=0),
            packed=decode.supported(model),
            **sizes,
        )
        self.steps = Steps(model, self.plan.sizes, allocate=False)
        self.seconds: dict[str, float] = {}

    def build(self, progress: fit.Progress | None = None) -> None:
        """Compile all programs; the pool gets smaller where they need more than was planned."""
        self.plan, self.seconds = fit.build(self.steps, self.plan, progress)

    def finish(self, model: Flint) -> Engine:
        """The engine over the loaded ``model``. Raises ConfigError when the device has less memory than it said."""
        begin = time.monotonic()
        self.steps.use(model)
        self._allocate()
        if self.seconds:
            _warm_up(self.steps, self.plan)
        engine = Engine(self.steps, **self._options)
        engine.memory = self.plan
        if self.seconds:
            engine.compile_seconds = self.seconds["wall"] + time.monotonic() - begin
        return engine

    def _allocate(self) -> None:
        """Put the empty state on the device; a smaller pool, compiled again, where its memory is in too many pieces."""
        for _ in range(SMALLER):
            try:
                self.steps.allocate()
                jax.block_until_ready((self.steps.state, self.steps.snapshots))
                return
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
            self.plan = self.plan.with_pages(int(0.9 * self.plan.sizes.pages))
            log.warning(
                "no place for the KV cache in one piece; trying %d pages and compiling again", self.plan.sizes.pages
            )
            self.steps.resize(self.plan.sizes)  # drops what was allocated
            if self.seconds:
                self.seconds["wall"] += self.steps.build()["wall"]
        self.steps.allocate()


def _warm_up(steps: Steps, plan: memory.MemoryPlan) -> None:
    """Run every large program once. Raises ConfigError where the device has less memory than it said."""
    try:
        steps.warm_up()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"the GPU ran out of memory in the first step ({str(error).splitlines()[0]:.200}): the plan was\n"
            f"{plan.table()}\nIs another process using the GPU? Otherwise lower --gpu-memory-utilization."
        ) from error
