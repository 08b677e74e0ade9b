"""GET /openapi.json: every route, its fields and its answers, for client generators and fuzzers.

Requests are described as far as types, ranges and spelling go; further fields are allowed, as the routes allow them.
A route without a description of its own still appears, with any object for its body.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flint_jax import __version__
from flint_jax.server import openapi_schemas as schemas
from flint_jax.server.replies import JsonReply

_ERRORS = {
    "400": "the request asks for something that cannot be done; the message says what and the param which field",
    "401": "no valid API key",
    "404": "no such model or route",
    "413": "the body is too large",
    "415": "a body of this Content-Encoding cannot be read",
    "429": "the queue is full; try again after Retry-After seconds",
    "500": "a fault of the server; its log has the request id",
    "503": "loading or shutting down; try again after Retry-After seconds",
}


def document(routes: Iterable[Route], root_path: str = "") -> dict[str, Any]:
    """The description of ``routes``."""
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        paths[path] = {m.lower(): _operation(path, m.lower(), route) for m in _methods(route)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Flint in JAX",
            "version": __version__,
            "description": "OpenAI- and Anthropic-compatible server.",
        },
        "servers": [{"url": root_path or "/"}],
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas.COMPONENTS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _methods(route: Route) -> Iterable[str]:
    return sorted((route.methods or set()) - {"HEAD", "OPTIONS"})


def _operation(path: str, method: str, route: Route) -> dict[str, Any]:
    doc = (route.endpoint.__doc__ or "").strip().splitlines()
    known = schemas.ROUTES.get((method, path), {})
    operation: dict[str, Any] = {
        "operationId": f"{method}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_') or 'page'}",
        "summary": doc[0] if doc else "",
        "responses": {"200": {"description": "the answer", "content": known.get("answer", _any_object())}},
    }
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names
        ]
    if method == "post" and known.get("body") is not False:
        body = {"schema": known.get("body", {"type": "object"})}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    error = {"application/json": {"schema": known.get("error", {"$ref": "#/components/schemas/Error"})}}
    for status, text in _ERRORS.items():
        operation["responses"][status] = {"description": text, "content": error}
    for status, answer in known.get("more", {}).items():
        operation["responses"][status] = answer
    return operation


def _any_object() -> dict[str, Any]:
    return {"application/json": {"schema": {"type": "object"}}}


async def openapi(request: Request) -> Response:
    """This description."""
    state = request.app.state
    return JsonReply(document(request.app.routes, state.server.settings.root_path))
