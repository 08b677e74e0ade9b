"""Server-sent events: a reply sent piece by piece, that ends when the client hangs up and says so when it fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response

from flint_jax.server.errors import ApiError, ClientGone, to_api_error
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


def named_event(value: dict[str, Any]) -> bytes:
    """One event whose name is the ``type`` of its data."""
    return b"event: " + value["type"].encode() + b"\ndata: " + to_json(value) + b"\n\n"


def plain_error(error: ApiError) -> bytes:
    """An event ``{"error": ...}``."""
    return event(error.body)


class EventStream(Response):
    """Streams what ``frames`` yields and closes ``job`` at the end, whatever the end is.

    The status line waits for the first frame, so a request that fails before it gets an ordinary error response. After
    that an error becomes a last event, which ``error`` writes.
    """

    def __init__(
        self,
        job: Job,
        frames: AsyncIterator[bytes],
        request_id: str,
        error: Callable[[ApiError], bytes] = plain_error,
    ):
        super().__init__()
        self._job, self._frames, self._request_id, self._error = job, frames, request_id, error

    async def __call__(self, scope, receive, send) -> None:
        """Send the stream. Raises what went wrong before the first frame."""
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
                if not started:
                    raise
                frame = self._error(to_api_error(e, self._request_id))
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
