"""What can go wrong with a request, and what the client is told: one exception, one table.

The shape is OpenAI's, ``{"error": {"message", "type", "param", "code"}}``, and Anthropic's on Anthropic's routes.
Clients retry 408, 409, 429 and 5xx on their own, so a wrong 500 costs three runs: everything that the request caused is
a 4xx.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException

from flint_jax.errors import FlintError, RequestError
from flint_jax.server.replies import JsonReply

log = logging.getLogger("flint_jax.server")

# status -> ``type`` of the error object
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

# the same in Anthropic's protocol
ANTHROPIC_TYPES = ERROR_TYPES | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
ANTHROPIC_PATH = "/v1/messages"

TOO_LONG = "context_length_exceeded"

# ``code`` of a RequestError -> status, where it is not 400
CODE_STATUS = {
    "model_not_found": 404,
    "queue_full": 429,
    "engine_failed": 500,
    "shutting_down": 503,
}

RETRY_AFTER_S = 2  # openai's client waits this long before its first retry of a 429 or 503


# of the 4xx, what another try may cure; of all others clients are told that it will not
_MAY_PASS = frozenset({408, 409, 425, 429})


class ApiError(Exception):
    """An answer other than 200. ``status`` is the HTTP status; the rest goes into the error object.

    tokens: of a prompt that is too long, how long it is and may be, in Anthropic's words. details: what Anthropic's
    clients act on.
    """

    tokens: str | None = None
    details: dict[str, Any] | None = None

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object to send."""
        kind = ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """The same in Anthropic's shape, whose agents know a full context by the words "prompt is too long"."""
        kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        message = self.message
        if self.code == TOO_LONG:
            message = "prompt is too long: " + (self.tokens or message)
        error = {"type": kind, "message": message} | ({"details": self.details} if self.details else {})
        return {"type": "error", "error": error, "request_id": request_id}

    def response(self, path: str = "", request_id: str = "") -> JsonReply:
        """The HTTP response in the shape of the route, with Retry-After where trying again makes sense.

        Where it does not, ``x-should-retry`` says so: Anthropic's and OpenAI's clients obey it, and an agent with a
        wrong key says so at once instead of trying for minutes.
        """
        headers = {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        if 400 <= self.status < 500 and self.status not in _MAY_PASS:
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        body = self.anthropic_body(request_id) if is_anthropic(path) else self.body
        return JsonReply(body, self.status, headers)


def is_anthropic(path: str) -> bool:
    """Whether a route speaks Anthropic's protocol."""
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


class ClientGone(Exception):
    """The client closed its connection: nobody is left to answer."""


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def to_api_error(error: BaseException, request_id: str = "") -> ApiError:
    """The answer to any exception. What we did not foresee is logged with its traceback and told without one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(CODE_STATUS.get(error.code or "", 400), str(error), param=error.param, code=error.code)
    if isinstance(error, FlintError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    if isinstance(error, RecursionError):  # nothing here recurses but into what a request nests
        return ApiError(400, "the request is nested too deeply; need fewer levels of arrays and objects")
    log.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"internal server error; the server's log has it under request id {request_id}")
