"""GET /v1/models and /v1/models/{id}, and what a request's ``model`` field means."""

from __future__ import annotations

import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from flint_jax.server.body import Fields
from flint_jax.server.errors import ApiError
from flint_jax.server.replies import JsonReply
from flint_jax.server.state import ServedModel, ServerState

_ANTHROPIC = "anthropic-version"  # the header by which its clients, who expect another form, are known
# Codex reads its own catalogue of models from here and warns when the field is not there. An entry must hold its whole
# prompt for that model, which is Codex's to know: with none it uses what its configuration says.
_CODEX: list[dict[str, Any]] = []


async def list_models(request: Request) -> Response:
    """Every name of the served model, the main one first."""
    served = request.app.state.server.served
    if _ANTHROPIC in request.headers:
        cards = [_anthropic_card(served, name) for name in served.names]
        return JsonReply({"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]})
    return JsonReply({"object": "list", "data": [_card(served, name) for name in served.names], "models": _CODEX})


async def one_model(request: Request) -> Response:
    """One name; 404 for any other."""
    served, name = request.app.state.server.served, request.path_params["name"]
    if name not in served.names:
        raise _not_found(served, name)
    card = _anthropic_card if _ANTHROPIC in request.headers else _card
    return JsonReply(card(served, name))


def reply_name(fields: Fields, state: ServerState) -> str:
    """The model name to put into a reply.

    There is one model, so any name gets it, unless --strict-model is set: then another name is a 404.
    """
    served = state.served
    asked = fields.string("model")
    if asked in served.names:
        return asked
    if state.settings.strict_model and asked is not None:
        raise _not_found(served, asked)
    return served.names[0]


def _card(served: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "flint-jax",
        "root": served.names[0],
        "parent": None,
        "max_model_len": served.max_model_len,
    }


def _anthropic_card(served: ServedModel, name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.datetime.fromtimestamp(served.created, datetime.UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": served.max_model_len,
        "max_tokens": served.max_model_len,
    }


def _not_found(served: ServedModel, name: str) -> ApiError:
    return ApiError(
        404,
        f"the model {name!r:.200} does not exist here; served: {', '.join(served.names)}",
        param="model",
        code="model_not_found",
    )
