"""Compile kernels for an NVIDIA GPU that this machine does not have.

XLA's CUDA plugin needs only a description of the target and a ``ptxas``; the result is real machine code that cannot be
run here. Mosaic registers its assembler once per process for the first target it sees, so a process can compile for
**one** architecture only: ``python -m pallas_kernels.aot sm_100a`` starts from the command line, tests start it as a
child process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
import traceback

import jax

from pallas_kernels import device, dispatch


@dataclasses.dataclass(frozen=True)
class Target:
    """What the compiler has to know of a GPU. memory and bandwidth only steer XLA's cost model."""

    name: str
    capability: int  # major part of the compute capability
    cores: int
    l2_bytes: int
    bandwidth: int
    memory: int


TARGETS = {
    "sm_90a": Target("NVIDIA H200", 9, 132, 52_428_800, 4_800_000_000_000, 151_397_597_184),
    "sm_100a": Target("NVIDIA B200", 10, 148, 132_644_864, 7_672_320_000_000, 191_514_411_008),
}


def _description(target: Target) -> str:
    """The target as a text-form GpuTargetConfigProto."""
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: {target.cores} fpus_per_core: 128 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {target.bandwidth} l2_cache_size: {target.l2_bytes} clock_rate_ghz: 1.98
  device_memory_size: {target.memory} device_address_bits: 64
  cuda_compute_capability {{ major: {target.capability} feature_extension: ACCELERATED_FEATURES }}
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {target.capability}.0a"
  name: "{target.name}" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{target.name}"
"""


def available() -> bool:
    """Whether the CUDA plugin is installed (a GPU is not needed)."""
    import importlib.util

    return importlib.util.find_spec("jax_cuda13_plugin") is not None


_first_target: str | None = None


def compile_for(target: str, fn, *args, donate_argnums=(), **jit_options) -> jax.stages.Compiled:
    """Compile ``fn`` for ``target`` ("sm_90a", "sm_100a").

    args: arrays or ShapeDtypeStructs (pytrees of them). Raises RuntimeError when this process already compiled for
    another target, and whatever the compiler says when the program does not build.
    """
    return lower_for(target, fn, *args, donate_argnums=donate_argnums, **jit_options).compile()


def lower_for(target: str, fn, *args, donate_argnums=(), **jit_options) -> jax.stages.Lowered:
    """What ``compile_for`` compiles."""
    global _first_target
    if _first_target not in (None, target):
        raise RuntimeError(f"this process compiles for {_first_target}; start another one for {target}")
    _first_target = target
    from jax.experimental import topologies
    from jax.experimental.mosaic.gpu import utils as mosaic_utils

    # Mosaic asks the device for its capability; an abstract device has none and is taken for 9.0.
    mosaic_utils._infer_arch = lambda: (TARGETS[target].capability, 0)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_description(TARGETS[target]), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    assumed = device.Device(TARGETS[target].name, (TARGETS[target].capability, 0), TARGETS[target].cores, 0.0)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), device.assume(assumed), dispatch.force("kernels"):
        return jax.jit(fn, donate_argnums=donate_argnums, **jit_options).trace(*shapes).lower()


def main(argv: list[str] | None = None) -> int:
    """Compile every kernel case of the chosen ops; one line each, then a JSON line {"case": seconds or error}."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot", description=main.__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--ops", default="", help="comma-separated names; all of them when empty")
    parser.add_argument("--only", default="", help="compile only the cases whose name contains this")
    options = parser.parse_args(argv)
    if "JAX_PLATFORMS" not in os.environ:  # the plugin without a GPU would be tried first, and fail
        jax.config.update("jax_platforms", "cpu")
    from pallas_kernels import bench

    report: dict[str, float | str] = {}
    for case in bench.cases(options.ops):
        if options.only not in case.name:
            continue
        started = time.perf_counter()
        try:
            run = functools.partial(case.run, 0)
            compile_for(options.target, run, *jax.eval_shape(case.make, jax.random.key(0)))
            report[case.name] = round(time.perf_counter() - started, 2)
        except Exception as error:
            traceback.print_exc(limit=-4)
            report[case.name] = f"{type(error).__name__}: {str(error)[:500]}"
        print(f"{options.target} {case.name}: {report[case.name]}", flush=True)
    print(json.dumps({"target": options.target, "cases": report}), flush=True)
    return int(any(isinstance(result, str) for result in report.values()))


if __name__ == "__main__":
    sys.exit(main())
