"""Processes that make training rows while the device works."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np

DEPTH = 200  # batches made ahead (0.5 MB each): most of a minute, while the device still compiles


def _work(folder: str, length: int, rows: int, seed: int, long: bool, out) -> None:
    from examples.train_tiny.data import Encoder
    from examples.train_tiny.data import rows as make_rows
    from flint_jax.chat import ChatTemplate
    from loaders.tokenizer import load_tokenizer

    os.nice(5)  # the process that feeds the device comes first
    tokenizer = load_tokenizer(Path(folder))
    made = make_rows(Encoder(tokenizer, ChatTemplate.from_tokenizer(tokenizer)), length, seed, long)
    while True:
        picked = [next(made) for _ in range(rows)]
        out.put((np.stack([t for t, _ in picked]), np.stack([w for _, w in picked])))


class Rows:
    """Batches (tokens int32 [rows, length + 1], weights float32 [rows, length]) from ``processes`` processes.

    Each process has a random stream of its own; which batch comes first depends on the machine's timing.
    """

    def __init__(self, folder: Path, length: int, rows: int, processes: int, *, seed: int = 0, long: bool = False):
        context = multiprocessing.get_context("spawn")
        self._queue = context.Queue(maxsize=DEPTH)
        self._processes = [
            context.Process(
                target=_work,
                args=(str(folder), length, rows, 1000 * seed + i + 500 * long, long, self._queue),
                daemon=True,
            )
            for i in range(processes)
        ]
        for process in self._processes:
            process.start()

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            try:
                yield self._queue.get(timeout=60)
            except queue.Empty:
                raise RuntimeError("no training rows came for a minute: a worker process has died") from None

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
