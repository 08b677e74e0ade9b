"""GET /health, /ping, /load and /version."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from flint_jax import __version__
from flint_jax.server.errors import RETRY_AFTER_S
from flint_jax.server.replies import JsonReply
from flint_jax.server.state import READY, ServerState
from flint_jax.server.usage import prompt_progress


async def health(request: Request) -> Response:
    """200 once requests are answered, else 503; the body says what is going on. Needs no key.

    engine: its counters. prompts: how far the prompts are that are being read, oldest first.
    """
    state: ServerState = request.app.state.server
    stalled = state.watchdog.stalled_s if state.phase == READY else 0.0
    body = {"status": "stalled" if stalled else state.phase}
    if stalled:
        body["detail"] = f"requests wait, and the engine has done nothing for {stalled:.0f} s"
    elif state.detail:
        body["detail"] = state.detail
    if state.healthy:
        engine = state.served.engine
        prompts = [prompt_progress(progress) for progress in engine.progress().values()]
        return JsonReply(body | {"engine": engine.stats(), "prompts": prompts})
    return JsonReply(body, 503, {"retry-after": str(RETRY_AFTER_S)})


async def load(request: Request) -> Response:
    """How many HTTP requests are being answered by the model, waiting ones included; vLLM's shape."""
    return JsonReply({"server_load": len(request.app.state.server.jobs)})


async def version(request: Request) -> Response:
    """The version of this package."""
    return JsonReply({"version": __version__})
