"""Running a job: prompts in, pieces out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flint_jax.server.choices import Choice, Piece
from flint_jax.server.jobs import Job
from flint_jax.server.records import STOP, TOOL_CALLS
from flint_jax.server.state import ServedModel

_INLINE_CHARACTERS = 4096  # encoding this much takes under 2 ms; longer texts would stall the other streams

COMPILES = 1 << 20  # compiling rules takes as long as encoding a text of this size: not on the loop

# One thread: the order of arrival is kept, and the engine's thread keeps its core.
_encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")


async def off_loop(size: int, work: Callable[..., Any], *args: Any) -> Any:
    """``work(*args)``, on another thread when ``size`` (characters) is large."""
    if size <= _INLINE_CHARACTERS:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_encoder, work, *args)


async def encode_text(served: ServedModel, text: str, special: bool) -> list[int]:
    """Token ids of a plain prompt. special: add the start token where the tokenizer's own settings ask for one."""

    def work() -> list[int]:
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
