"""What happens around every request: an id, a key, a refusal while there is no model, and a last answer to any error.

Plain ASGI: Starlette's middleware class would hide a client's disconnect from the endpoints.
"""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from time import monotonic

from starlette.datastructures import Headers, MutableHeaders

from flint_jax.server.errors import ApiError, ClientGone, is_anthropic, to_api_error
from flint_jax.server.records import Arrival, arrival, timings
from flint_jax.server.state import ServerState

log = logging.getLogger("flint_jax.server")

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SLASHES = re.compile("/{2,}")
OPEN_PATHS = frozenset({"/health", "/ping"})  # need no key
# are answered without a model
ALWAYS_PATHS = frozenset({"/", "/health", "/ping", "/load", "/version", "/metrics", "/openapi.json"})


class RequestIds:
    """Gives every request an id: the client's own ``x-request-id`` if it is sane, else a new one. Sends it back.

    Slashes that a client puts too many into a URL are taken out here, before anyone looks at the path.
    """

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = scope | {"path": _tidy(scope["path"], scope.get("root_path", ""))}
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        arrival.set(Arrival(request_id, f"{scope['method']} {scope['path'][:200]!r}"[:220], monotonic()))

        async def send_with_id(message):
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropic(_path(scope)):
                    headers["request-id"] = request_id  # the name that Anthropic's client reads
            await send(message)

        await self._app(scope, receive, send_with_id)


class Gate:
    """Asks for a key, refuses while there is no model, and turns whatever goes wrong inside into the route's shape."""

    def __init__(self, app, state: ServerState):
        self._app, self._state = app, state
        self._keys = [key.encode() for key in state.settings.api_keys]
        self._open = OPEN_PATHS | ({"/metrics"} if state.settings.open_metrics else set())

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message):
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        timings.set(self._state.timings)
        try:
            self._check(scope)
            await self._app(scope, receive, watched_send)
        except ClientGone:
            return
        except Exception as e:
            request_id = scope["state"]["request_id"]
            error = to_api_error(e, request_id)
            if started:
                raise
            await error.response(_path(scope), request_id)(scope, receive, send)

    def _check(self, scope) -> None:
        path = _path(scope)
        if scope["method"] == "OPTIONS":
            return
        headers = Headers(scope=scope)
        if self._keys and path not in self._open and not _is_page(path, headers) and not self._has_key(headers):
            raise ApiError(
                401,
                "no valid API key: send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
        refusal = self._state.refusal()
        if refusal is not None and path not in ALWAYS_PATHS:
            raise refusal

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip()] if scheme.lower() == "bearer" else []
        given.append(headers.get("x-api-key", ""))
        # every pair is compared, each in constant time
        return any([hmac.compare_digest(g.encode("latin-1", "replace"), key) for g in given for key in self._keys])


def _is_page(path: str, headers: Headers) -> bool:
    """A browser asking for the chat page, which is a fixed file: it cannot send a key before it has shown the field."""
    return path == "/" and "text/html" in headers.get("accept", "")


def _tidy(path: str, root: str) -> str:
    """The path without the slashes that clients add at its end or double when they join URLs."""
    return root + (_SLASHES.sub("/", path.removeprefix(root)).rstrip("/") or "/")


def _path(scope) -> str:
    return scope["path"].removeprefix(scope.get("root_path", ""))
