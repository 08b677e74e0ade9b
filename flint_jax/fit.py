"""Compile first, then size: the pool of pages is what the compiled programs leave over, not what a guess leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flint_jax.memory import MemoryPlan
from flint_jax.step import Steps

log = logging.getLogger("flint_jax")

Progress = Callable[[str, int, int], None]


def needed_bytes(steps: Steps) -> tuple[int, str]:
    """What the compiled programs need beside weights, state and snapshots; and the program that needs the most.

    The largest program's temporaries and those results that take no argument's place (programs run one after the
    other, so they share); and the logits of every decode batch, which stay from step to step.
    """
    worst, name = 0, "none"
    for key, program in steps.programs.items():
        memory = program.memory_analysis()
        if memory is None:  # a backend that does not say
            continue
        own = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        if own > worst:
            worst, name = own, " ".join(map(str, key))
    return worst + 4 * steps.config.vocab_size * sum(steps.sizes.batches), name


def build(steps: Steps, plan: MemoryPlan, progress: Progress | None = None) -> tuple[MemoryPlan, dict[str, float]]:
    """Compile ``steps`` (nothing allocated yet) and make the pool smaller where the programs need more than planned.

    Returns the plan that holds and the seconds of ``Steps.build``, added up. Raises ConfigError when what is left is
    too little for the slots.
    """
    spent = steps.build(progress)
    for _ in range(3):  # other shapes may need a little more than those before
        needed, name = needed_bytes(steps)
        fitted = plan.with_workspace(needed, name)
        if fitted.sizes == plan.sizes:
            return fitted, spent
        log.info(
            "the compiled program %s needs %.2f GiB, %.2f were set aside: %d pages instead of %d; compiling again",
            name, needed / 2**30, plan.workspace / 2**30, fitted.sizes.pages, plan.sizes.pages,
        )  # fmt: skip
        plan = fitted
        steps.resize(plan.sizes)
        more = steps.build(progress)
        spent = {what: seconds + more[what] for what, seconds in spent.items()}
    return plan, spent
