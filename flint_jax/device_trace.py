"""Where the time of a region goes: tables of device kernels and host events from XLA's trace."""

from __future__ import annotations

import collections
import contextlib
import glob
import tempfile
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def traced(count: int, *, host: bool = True) -> Iterator[None]:
    """Trace the block, which runs ``count`` steps and waits for them; print time by kernel, then by host event.

    Kernels run one by one in it, outside of graphs, unless xla_enable_command_buffers_during_profiling is set.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
    _table(data, "/device:", "Stream", count)
    if host:
        _table(data, "/host:CPU", "", count)


def _table(data, plane_name: str, line_name: str, count: int) -> None:
    spent, calls = collections.Counter(), collections.Counter()
    for plane in data.planes:
        if plane_name not in plane.name:
            continue
        for line in plane.lines:
            if line_name not in line.name:
                continue
            for event in line.events:
                spent[event.name] += event.duration_ns / 1e3
                calls[event.name] += 1
    total = sum(spent.values()) / count
    print(f"  {plane_name} {total / 1e3:.3f} ms a step, {sum(calls.values()) / count:.0f} events")
    print(f"  {'event':<60}{'calls':>7}{'us each':>9}{'us/step':>9}")
    for name, micros in spent.most_common(30):
        print(f"  {name[:60]:<60}{calls[name] / count:>7.1f}{micros / calls[name]:>9.2f}{micros / count:>9.1f}")
