"""How many slots and pages fit: from free memory, the config and what the caller asked for."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp

from flint_jax import moe
from flint_jax.cache import PAGE, page_bytes, slot_bytes
from flint_jax.config import FlintConfig
from flint_jax.errors import ConfigError
from flint_jax.numerics import Numerics
from flint_jax.prompt_scores import BLOCK
from flint_jax.step import Sizes

BATCHES = (1, 2, 4, 8, 16, 32, 64)
HOST_SHARE = 0.25  # of free host memory, when the host is the device
SNAPSHOT_SHARE = 0.1  # of the room for the KV cache, for ring snapshots of the prefix cache ...
SNAPSHOTS_PER_SLOT = 8  # ... and no more than this many for each slot
PREFIX_ROOM = 2  # with a prefix cache: pages for this many times what the slots themselves can hold
SAMPLING_BYTES = 9  # a slot's sampling state per vocabulary entry: bool, int32, float32


PROCESS_SHARE = "0.92"  # of a GPU's memory, for XLA in a process of our own; see ``prepare_process``
_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the name, and the older one


def prepare_process() -> None:
    """For a process of our own, before JAX sees the GPU: its share of the GPU's memory, and of the host's.

    XLA takes 75 % of a GPU by itself; Flint in bfloat16 peaks at 122 GiB of the H200's 140 while its weights are put
    into tiles. 92 % leaves the driver, captured graphs and libraries a gigabyte and more on any GPU of 16 GB.
    The pool of pinned transfer buffers doubles as it grows (a full-size load was seen at 4.9 GiB of host memory, with
    pieces of 32 MiB), so it is bounded to 2 GiB. Not for a library: with the bound, one transfer of more than that
    fails. XLA's own variables, if set, win.
    """
    if not any(os.environ.get(name) for name in _FRACTION):
        os.environ[_FRACTION[0]] = PROCESS_SHARE
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "2")


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Sizes of the compiled steps and the bytes behind them."""

    sizes: Sizes
    free: int
    workspace: int
    page_bytes: int
    slot_bytes: int
    snapshot_bytes: int

    def with_workspace(self, needed: int, program: str) -> MemoryPlan:
        """The plan when activations take ``needed`` bytes, as ``program`` does: fewer pages if there is no slack.

        Raises ConfigError when not even one page per slot is left.
        """
        s = self.sizes
        workspace = max(self.workspace, needed)
        room = self.free - workspace - s.slots * self.slot_bytes - s.snapshots * self.snapshot_bytes
        pages = min(s.pages, room // self.page_bytes) if self.page_bytes else s.pages
        if pages < s.slots:
            raise ConfigError(
                f"no room for the KV cache: the compiled program {program} needs {needed / 2**30:.2f} GiB for "
                f"activations, {self.free / 2**30:.2f} GiB are free, {s.slots} slots take "
                f"{s.slots * self.slot_bytes / 2**30:.2f} GiB and {s.snapshots} snapshots of the prefix cache "
                f"{s.snapshots * self.snapshot_bytes / 2**30:.2f} GiB. "
                f"Lower --max-num-batched-tokens (now {s.chunks[-1]}), --max-num-seqs or --prefix-snapshots."
            )
        return dataclasses.replace(self, workspace=workspace).with_pages(int(pages))

    def with_pages(self, pages: int) -> MemoryPlan:
        """The plan with another pool."""
        s = self.sizes
        sizes = dataclasses.replace(s, pages=pages, max_context=min(s.max_context, pages * PAGE))
        return dataclasses.replace(self, sizes=sizes)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache, the slots' sampling state and the snapshots."""
        s = self.sizes
        return s.pages * self.page_bytes + s.slots * self.slot_bytes + s.snapshots * self.snapshot_bytes

    def table(self) -> str:
        """A few lines for people."""
        s = self.sizes
        rows = [
            ("free before the cache", self.free),
            ("set aside for activations", self.workspace),
            (f"{s.slots} slots (window rings, sampling)", s.slots * self.slot_bytes),
            (f"{s.pages} pages = {s.pages * PAGE:,} tokens", s.pages * self.page_bytes),
        ]
        if s.snapshots:
            rows.append((f"{s.snapshots} snapshots for the prefix cache", s.snapshots * self.snapshot_bytes))
        lines = [f"  {name:<38}{size / 2**30:>9.2f} GiB" for name, size in rows]
        return "\n".join([*lines, f"  longest request: {s.max_context:,} tokens"])


def plan(
    config: FlintConfig,
    numerics: Numerics,
    *,
    max_model_len: int,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    utilization: float = 0.9,
    prefix_caching: bool = False,
    prefix_snapshots: int | None = None,
    pending: int = 0,
    largest: int = 0,
    device_bytes: int | None = None,
    packed: bool = False,
) -> MemoryPlan:
    """Slots and pages for the free memory of the default device, or of a GPU of ``device_bytes`` that nothing uses.

    max_model_len: longest request wanted; lowered to what the pool holds. prefix_snapshots: how many rings the prefix
    cache may keep, default a tenth of the room, at most eight a slot; 0 switches it off, too. pending: bytes of weights
    that are still to be loaded; largest: of one array among them. packed: prefill runs in kernels (``Steps.packed``),
    which keep no scores and gain from longer steps. Raises ConfigError when not even one page per slot fits, or a
    number is out of range.
    """
    _check(max_model_len, max_num_seqs, max_num_batched_tokens, utilization, prefix_snapshots)
    on_host = device_bytes is None and jax.default_backend() == "cpu"
    itemsize = jnp.dtype(numerics.dtype).itemsize
    slots = max_num_seqs or (4 if on_host else 16)
    chunk = _chunk(max_num_batched_tokens or (256 if on_host else 8192 if packed else 2048), max_model_len)
    page = page_bytes(config, itemsize)
    slot = slot_bytes(config, itemsize) + SAMPLING_BYTES * config.vocab_size
    if device_bytes is None:
        free = _free_bytes(utilization, on_host, pending)
    else:  # XLA's share of it, if that is less
        free = int(device_bytes * min(utilization, float(PROCESS_SHARE))) - pending
    workspace = _workspace(config, chunk, slots, itemsize, packed)
    room = free - workspace - slots * slot
    snapshot = slot_bytes(config, itemsize)
    snapshots = 0
    if prefix_caching:
        most = min(SNAPSHOTS_PER_SLOT * slots, int(max(room, 0) * SNAPSHOT_SHARE) // snapshot)
        snapshots = most if prefix_snapshots is None else prefix_snapshots
    room -= snapshots * snapshot
    if largest:
        room = min(room, _in_one_piece(free, largest, snapshots * snapshot))
    wanted = -(-(max_model_len + 1) // PAGE) * slots * (PREFIX_ROOM if snapshots else 1)
    pages = min(room // page, wanted) if page else wanted
    if pages < slots or pages < 1:
        raise ConfigError(
            f"no room for the KV cache: {free / 2**30:.2f} GiB are free, activations take {workspace / 2**30:.2f} GiB, "
            f"{slots} slots take {slots * slot / 2**30:.2f} GiB, {snapshots} snapshots of the prefix cache "
            f"{snapshots * snapshot / 2**30:.2f} GiB, and a page of {PAGE} tokens {page / 2**20:.2f} MiB. "
            "Lower --max-num-seqs, --prefix-snapshots or --max-num-batched-tokens, or raise --gpu-memory-utilization."
        )
    longest = min(max_model_len, pages * PAGE)
    batches = (*(b for b in BATCHES if b < slots), slots)
    sizes = Sizes(slots, int(pages), longest, batches, _chunks(chunk, 128 if packed and not on_host else 64), snapshots)
    return MemoryPlan(sizes, free, workspace, page, slot, snapshot)


def _in_one_piece(free: int, largest: int, snapshots: int) -> int:
    """Most bytes of keys and values that find room behind the weights, or in the hole that they leave.

    Every stack of weights is put into tiles beside itself, so that loading leaves a hole as large as the largest one
    below memory that nothing used yet. A pool is one array and has to lie in one of both: with 51 GiB free in two
    pieces an H200 had no place for a pool of 48.
    """
    behind, hole = free - largest, int(0.9 * largest) - snapshots
    return max(behind, hole, 2 * min(behind, hole))  # both pools in one place, or one in each


def process_limit() -> int | None:
    """Bytes that this process may have of the default device; None on the host."""
    if jax.default_backend() == "cpu":
        return None
    return int(jax.devices()[0].memory_stats()["bytes_limit"])


def check_weights(weights: int, largest: int, limit: int) -> None:
    """Raises ConfigError when loading would not fit: all weights, and the largest stack twice while it is laid out.

    Bytes. limit: what this process may have of the GPU.
    """
    if weights + largest > limit:
        raise ConfigError(
            f"the weights do not fit: they take {weights / 2**30:.2f} GiB, laying out the largest stack of them "
            f"{largest / 2**30:.2f} GiB more for a moment, and this process may use {limit / 2**30:.2f} GiB of the "
            "GPU. Take the NVFP4 checkpoint if this is the BF16 one, a larger GPU, or one that nothing else uses."
        )


def _check(max_model_len, max_num_seqs, max_num_batched_tokens, utilization, prefix_snapshots) -> None:
    for name, value in (
        ("max_model_len", max_model_len),
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} = {value!r}: need a positive integer")
    if prefix_snapshots is not None and (not isinstance(prefix_snapshots, int) or prefix_snapshots < 0):
        raise ConfigError(f"prefix_snapshots = {prefix_snapshots!r}: need a whole number, 0 or more")
    if not 0 < utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization = {utilization!r}: need a number above 0, at most 1")


def _chunk(wanted: int, longest: int) -> int:
    """Largest prefill chunk: a power of two, not longer than the context needs."""
    return max(16, min(1 << (wanted.bit_length() - 1), 1 << (longest - 1).bit_length()))


def _chunks(largest: int, least: int = 64) -> tuple[int, ...]:
    """Compiled chunk lengths: 16 and every fourth power up to the largest, so padding wastes at most 3/4."""
    sizes = [largest]
    while sizes[-1] > least:
        sizes.append(sizes[-1] // 4)
    return tuple(reversed(sizes))


def _free_bytes(utilization: float, on_host: bool, pending: int = 0) -> int:
    if on_host:
        return int((os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - pending) * HOST_SHARE)
    stats = jax.devices()[0].memory_stats()
    # XLA's limit is its fraction of what was free when it started; the flag is a share of the whole.
    fraction = float(next((os.environ[name] for name in _FRACTION if os.environ.get(name)), 0.75))
    return int(stats["bytes_limit"] * min(1.0, utilization / fraction) - stats["bytes_in_use"]) - pending


def _workspace(config: FlintConfig, chunk: int, slots: int, itemsize: int, packed: bool = False) -> int:
    """Activations of one prefill chunk, generously: residuals, scores of a key block, padded expert rows, logits; and
    the unpacked weights of a group of experts, with the codes in the order of their values (a quarter of that)."""
    scores = 0 if packed else 4 * config.num_attention_heads * chunk * 512 * 3
    pairs = chunk * config.num_experts_per_tok + 64 * config.num_experts
    rows = pairs * (2 * config.hidden_size + 3 * config.moe_intermediate_size) * itemsize * 2
    layer = 3 * config.num_experts * config.hidden_size * config.moe_intermediate_size * itemsize
    unpacked = min(layer, moe.GROUP_BYTES) * 3 // 2
    dense = chunk * (2 * config.intermediate_size + 8 * config.hidden_size + 3 * config.q_size) * 4
    logits = 6 * 4 * max(slots, min(chunk, BLOCK)) * config.vocab_size
    return scores + rows + unpacked + dense + logits + (64 << 20)
