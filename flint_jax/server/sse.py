"""Server-sent events: a reply sent piece by piece, that ends when the client hangs up and says so when it fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from flint_jax.server.errors import ClientGone, to_api_error
from flint_jax.server.jobs import Job
from flint_jax.server.replies import to_json

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients skip it, proxies see life

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the stream otherwise
)


def event(value: Any) -> bytes:
    """One ``data:`` event."""
    return b"data: " + to_json(value) + b"\n\n"


class EventStream(Response):
    """Streams what ``frames`` yields and closes ``job`` at the end, whatever the end is.

    The status line waits for the first frame, so a request that fails before it gets an ordinary error response. After
    that an error is an event ``{"error": ...}`` and the stream ends without ``[DONE]``.
    """

    def __init__(self, job: Job, frames: AsyncIterator[bytes], request_id: str):
        super().__init__()
        self._job, self._frames, self._request_id = job, frames, request_id

    async def __call__(self, scope, receive, send) -> None:
        """Send the stream."""
        started = False
        with self._job:
            self._job.watch_client(receive)
            try:
                async for frame in self._frames:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                        started = True
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            except ClientGone:
                return
            except Exception as e:
                error = to_api_error(e, self._request_id)
                if not started:
                    await error.response()(scope, receive, send)
                    return
                await send({"type": "http.response.body", "body": event(error.body), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
