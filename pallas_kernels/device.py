"""What the kernels have to know of the device they are traced for."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """kind: the vendor's name. capability: compute capability (major, minor), (0, 0) when it is no NVIDIA GPU.
    cores: streaming multiprocessors. bandwidth: peak memory bytes per second by the data sheet, 0 when unknown."""

    kind: str
    capability: tuple[int, int]
    cores: int
    bandwidth: float

    @property
    def kernels(self) -> bool:
        """Whether this package's kernels can run: bulk copies need Hopper or newer."""
        return self.capability >= (9, 0)


CPU = Device("cpu", (0, 0), 1, 0.0)
BANDWIDTH = {
    "H100": 3.35e12,
    "H200": 4.8e12,
    "B200": 8.0e12,
    "GB200": 8.0e12,
    "B300": 8.0e12,
    "GB300": 8.0e12,
}
_override: contextvars.ContextVar[Device | None] = contextvars.ContextVar("device_override", default=None)


@contextlib.contextmanager
def assume(device: Device) -> Iterator[None]:
    """Within the block, trace for this device instead of the one at hand (ahead-of-time compilation)."""
    token = _override.set(device)
    try:
        yield
    finally:
        _override.reset(token)


def current() -> Device:
    """The device that programs are traced for: an assumed one, else the default backend's first."""
    return _override.get() or describe(jax.devices()[0])


def describe(device: jax.Device) -> Device:
    """A JAX device in this module's words."""
    if device.platform not in ("gpu", "cuda"):
        return dataclasses.replace(CPU, kind=device.device_kind)
    major, _, minor = str(getattr(device, "compute_capability", "0.0")).partition(".")
    kind = device.device_kind
    model = next((name for name in sorted(BANDWIDTH, key=len, reverse=True) if name in kind), "")
    return Device(kind, (int(major), int(minor or 0)), getattr(device, "core_count", 132), BANDWIDTH.get(model, 0.0))
