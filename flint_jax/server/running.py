"""Running a job: prompts in, pieces out."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flint_jax.server.choices import Choice, Piece
from flint_jax.server.jobs import Job
from flint_jax.server.records import STOP, TOOL_CALLS
from flint_jax.server.state import ServedModel

_INLINE_CHARACTERS = 4096  # encoding this much takes under 2 ms; longer texts would stall the other streams

COMPILES = 1 << 20  # compiling rules takes as long as encoding a text of this size: not on the loop

_QUICK_CHARACTERS = 1 << 17  # what takes under a tenth of a second never waits behind what takes longer

# Few threads each: the order of arrival is all but kept, and the engine's thread keeps its core.
_quick = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")
_slow = ThreadPoolExecutor(max_workers=max(2, (os.cpu_count() or 1) // 8), thread_name_prefix="encode-long")

_left: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("left", default=None)
_at_work: set[threading.Event] = set()  # one for each piece of work that a thread has or will have


class NobodyWaits(Exception):
    """Ends work off the loop whose result nobody wants any more."""


def look() -> None:
    """For long work off the loop, to be called now and then: raises NobodyWaits when its request is gone."""
    left = _left.get()
    if left is not None and left.is_set():
        raise NobodyWaits


def threads_busy() -> bool:
    """Whether a thread is at work; it may be for long, and cannot be interrupted."""
    return bool(_at_work)


async def off_loop(size: int, work: Callable[..., Any], *args: Any) -> Any:
    """``work(*args)``, on another thread when ``size`` (characters) is large. When the caller is cancelled, work that
    has not begun never does, and what has ends where it calls ``look``.
    """
    if size <= _INLINE_CHARACTERS:
        return work(*args)
    left = threading.Event()
    context = contextvars.copy_context()
    context.run(_left.set, left)
    pool = _quick if size <= _QUICK_CHARACTERS or size == COMPILES else _slow
    _at_work.add(left)
    future = pool.submit(context.run, work, *args)
    future.add_done_callback(lambda _: _at_work.discard(left))
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        left.set()
        raise


async def encode_text(
    served: ServedModel, text: str, special: bool, accept: Callable[[str], None] = lambda text: None
) -> list[int]:
    """Token ids of a plain prompt. special: add the start token where the tokenizer's own settings ask for one.

    accept: called with the text first, off the loop, too; raises for one that is not to be encoded.
    """

    def work() -> list[int]:
        accept(text)
        return list(served.tokenizer.encode(text, add_special_tokens=special))

    return await off_loop(len(text), work)


async def pieces(job: Job, choices: Sequence[Choice]) -> AsyncIterator[Piece | None]:
    """Pieces of all choices as they come, until each has ended; None means silence.

    ``choices[i]`` is fed by the job's request i.
    """
    left = sum(not c.done for c in choices)
    while left:
        batch = await job.events()
        if not batch:
            yield None
        ready: dict[int, Piece] = {}
        for index, event in batch:
            choice = choices[index]
            if choice.done:
                continue
            piece = choice.push(event)
            if choice.done:
                left -= 1
                if event.finish_reason is None:  # a stop string ended it before the engine did
                    job.abort(index)
                job.ended(index, TOOL_CALLS if choice.calls and piece.finish_reason == STOP else piece.finish_reason)
            if index in ready:
                ready[index].join(piece)
            else:
                ready[index] = piece
        for piece in ready.values():
            yield piece


async def finished(stream: AsyncIterator[Piece | None]) -> AsyncIterator[Piece]:
    """The pieces without the silences, for replies that are sent as a whole."""
    async for piece in stream:
        if piece is not None:
            yield piece
