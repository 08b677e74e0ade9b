"""``info --memory``: what would fit on a GPU, by arithmetic. No device is asked."""

from __future__ import annotations

import math

from flint_jax import memory
from flint_jax.config import FlintConfig
from flint_jax.errors import ConfigError
from flint_jax.numerics import Numerics
from flint_jax.weights import shapes
from pallas_kernels import nvfp4

GIB = 2**30


def weight_bytes(config: FlintConfig, weight_format: str) -> tuple[int, int]:
    """Bytes of the weights on the device, and of the largest stack, which exists twice while it is laid out.

    weight_format: "nvfp4", or "bf16" (also for a mixture, whose packed matrices are unpacked).
    """
    sizes = []
    for spec in shapes(config).values():
        count = math.prod(spec.shape)
        if spec.is_matrix and weight_format == "nvfp4":
            sizes.append(count // 2 + count // nvfp4.GROUP)
        else:
            sizes.append(2 * count)
    rope = 4 * config.max_position_embeddings * config.head_dim
    return sum(sizes) + rope, max(sizes)


def table(config: FlintConfig, weight_format: str, device_gib: float, **asked: int | float | bool | None) -> str:
    """The memory plan of ``serve.py`` on a GPU of ``device_gib`` GiB that nothing else uses, for people.

    asked: arguments of ``memory.plan``. Raises ConfigError when the model cannot be served there, saying why.
    """
    if not (device_gib > 0 and math.isfinite(device_gib)):
        raise ConfigError(f"--device-gib {device_gib}: need a number above 0")
    device = int(device_gib * GIB)
    weights, largest = weight_bytes(config, weight_format)
    memory.check_weights(weights, largest, int(device * float(memory.PROCESS_SHARE)))
    numerics = Numerics("serving", "bfloat16")
    plan = memory.plan(
        config,
        numerics,
        device_bytes=device,
        pending=weights,
        largest=largest,
        packed=True,
        **{"max_model_len": config.max_position_embeddings, "prefix_caching": True, **asked},
    )
    head = [
        ("the GPU", device),
        ("weights", weights),
        ("kept from XLA: driver, CUDA graphs", int(device * (1 - float(memory.PROCESS_SHARE)))),
    ]
    lines = [f"  {name:<38}{size / GIB:>9.2f} GiB" for name, size in head]
    return "\n".join([*lines, plan.table()])
