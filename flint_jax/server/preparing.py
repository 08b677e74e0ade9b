"""What happens to a request before the engine has it: read, rendered, encoded. It ends when the client hangs up, and
when the server has waited for it long enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from flint_jax.server.errors import ApiError, ClientGone

T = TypeVar("T")


class Preparations:
    """The requests that are being prepared. Event loop only."""

    def __init__(self):
        self._tasks: set[asyncio.Task] = set()
        self._closed: ApiError | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    def close(self, error: ApiError) -> None:
        """End all of them with ``error``, and those that still come."""
        self._closed = error
        for task in list(self._tasks):
            task.cancel()

    async def run(self, work: Coroutine[Any, Any, T], receive: Callable | None = None) -> T:
        """The result of ``work``, which is cancelled when nobody waits for it any more.

        receive: of the request, whose body has been read: it says when the client hangs up. None while it is read.
        Raises what ``work`` raises, ClientGone, and the error that the server was closed with.
        """
        if self._closed is not None:
            work.close()
            raise self._closed
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        waits = {task} if receive is None else {task, asyncio.ensure_future(_hung_up(receive))}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            if task.cancelled() and self._closed is not None:
                raise self._closed
            return task.result()
        finally:
            self._tasks.discard(task)
            for waiting in waits:
                waiting.cancel()


async def _hung_up(receive: Callable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
