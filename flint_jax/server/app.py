"""The ASGI application: routes, and the layers around them."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flint_jax.server.chat_completions import chat_completions
from flint_jax.server.completions import completions
from flint_jax.server.errors import ApiError
from flint_jax.server.interval_log import IntervalLog
from flint_jax.server.messages import count_tokens, messages
from flint_jax.server.metrics import Metrics, metrics
from flint_jax.server.middleware import Gate, RequestIds
from flint_jax.server.models import list_models, one_model
from flint_jax.server.openapi import openapi
from flint_jax.server.page import page
from flint_jax.server.responses import responses
from flint_jax.server.settings import LOCAL_ORIGINS, ServerSettings
from flint_jax.server.state import ServerState
from flint_jax.server.status import health, load, version
from flint_jax.server.tokenization import detokenize, tokenize, tokenizer_info

ROUTES = (
    Route("/", page, methods=["GET"]),
    Route("/health", health, methods=["GET"]),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/load", load, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/openapi.json", openapi, methods=["GET"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", one_model, methods=["GET"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
)


def create_app(state: ServerState) -> Starlette:
    """The application for ``state``; it answers 503 until ``state.set_ready`` is called on the event loop."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(state.watch()), asyncio.create_task(IntervalLog(state).run())]
        yield
        for task in tasks:
            task.cancel()

    app = Starlette(
        routes=list(ROUTES),
        lifespan=lifespan,
        middleware=[Middleware(RequestIds), _cors(state.settings), Middleware(Gate, state=state)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    app.state.server = state
    app.state.metrics = Metrics(state)
    return app


def _cors(settings: ServerSettings) -> Middleware:
    origins = settings.allowed_origins
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_origin_regex=None if origins else LOCAL_ORIGINS,
        allow_methods=list(settings.allowed_methods),
        allow_headers=list(settings.allowed_headers),
        allow_credentials=settings.allow_credentials,
        expose_headers=["x-request-id", "retry-after"],
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the shape of all other errors."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 404:
        answer = ApiError(404, f"there is no route {method} {path}{_hint(path)}", code="unknown_route")
    elif error.status_code == 405 and method == "OPTIONS":  # not a browser's question, which the layer for CORS answers
        return Response(status_code=204, headers=error.headers)
    elif error.status_code == 405:
        answer = ApiError(405, f"{path} does not take {method}", code="method_not_allowed")
    else:
        answer = ApiError(error.status_code, str(error.detail))
    response = answer.response(path, request.state.request_id)
    response.headers.update(error.headers or {})
    return response


def _hint(path: str) -> str:
    """Which route was meant: most often a base URL has a /v1 too many or too few."""
    known = [route.path for route in ROUTES]
    for other in (f"/v1{path}", path.removeprefix("/v1")):
        if other in known:
            return f"; did you mean {other}? (base URLs end in /v1 for OpenAI's clients, and have none for Anthropic's)"
    near = difflib.get_close_matches(path[:100], known, n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""
