"""From the bytes of a request to a checked JSON object whose fields are read by type."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request

from flint_jax.server.errors import ApiError, ClientGone, bad_request
from flint_jax.server.records import timings

if TYPE_CHECKING:
    from flint_jax.server.state import ServerState

log = logging.getLogger("flint_jax.server")

_DRAIN_S = 5.0  # how long an oversized upload is read and dropped, so that its sender gets to read the 413
_LARGEST_INT = 2**64
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # "deflate" means zlib's form of it


async def read_object(request: Request, state: ServerState) -> Fields:
    """The request's body as a JSON object of at most ``--max-request-bytes``.

    Raises ApiError (400, 413, 415; 503 when the server has stopped meanwhile) and ClientGone.
    """
    limit = state.settings.max_request_bytes
    raw = _unpacked(
        await state.preparing.run(_read(request, limit)), request.headers.get("content-encoding", ""), limit
    )
    if not raw.strip():
        raise bad_request("the body is empty; need a JSON object", code="invalid_json")
    try:
        value = json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError as e:
        raise bad_request(f"the body is not UTF-8: {e.reason} at byte {e.start}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is not valid JSON: nested too deeply", code="invalid_json") from None
    except ValueError as e:
        raise bad_request(f"the body is not valid JSON: {e}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body is a JSON {kind_of(value)}; need an object", code="invalid_json")
    if b"\\u" in raw:
        value = _without_lone_surrogates(value)
    return Fields(value)


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    size, chunks = 0, []
    too_large = declared.isdigit() and int(declared) > limit
    if too_large and "100-continue" in request.headers.get("expect", "").lower():
        raise _too_large(limit)  # it waits for our word before it sends anything: nothing needs to be read
    try:
        async with asyncio.timeout(None) as deadline:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    too_large = True
                if too_large and deadline.when() is None:
                    chunks.clear()
                    deadline.reschedule(asyncio.get_running_loop().time() + _DRAIN_S)
                if not too_large:
                    chunks.append(chunk)
    except TimeoutError:
        pass
    except ClientDisconnect:
        raise ClientGone from None
    if too_large:
        raise _too_large(limit)
    return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes, the limit of this server (--max-request-bytes)")


def _unpacked(raw: bytes, encoding: str, limit: int) -> bytes:
    """The body without its ``Content-Encoding``; at most ``limit`` bytes, however small it came."""
    kind = encoding.strip().lower()
    if kind in ("", "identity"):
        return raw
    if kind not in ("gzip", "x-gzip", "deflate"):
        raise ApiError(
            415,
            f"a body of the encoding {encoding!r:.64} cannot be read here; send it plain or with gzip",
            code="unsupported_encoding",
        )
    unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        text = unpacker.decompress(raw, limit + 1)
    except zlib.error as e:
        raise bad_request(f"the body is not {kind}, as its Content-Encoding says: {e}", code="invalid_json") from None
    if len(text) > limit:
        raise _too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        what = "goes on after its end" if unpacker.eof else "is cut short"
        raise bad_request(f"the {kind} data of the body {what}", code="invalid_json")
    return text


def _no_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    """1e999 would be read as infinity, which no reply that repeats it could hold."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


def _without_lone_surrogates(value: Any) -> Any:
    """JavaScript clients that cut text inside a pair send half a character; it becomes U+FFFD, as in a browser."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value
    if isinstance(value, list):
        return [_without_lone_surrogates(v) for v in value]
    if isinstance(value, dict):
        return {_without_lone_surrogates(k): _without_lone_surrogates(v) for k, v in value.items()}
    return value


def kind_of(value: Any) -> str:
    """JSON's word for the type of ``value``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


class Fields:
    """The fields of a request, read one by one; a wrong type is a 400 that names the field.

    An absent field and ``null`` are the same: the default. What no one asked for is collected by ``unknown``.
    """

    def __init__(self, values: dict[str, Any], prefix: str = ""):
        self.values, self.prefix = values, prefix
        self.asked: set[str] = set()

    def raw(self, name: str) -> Any:
        """The value as it came, None when absent."""
        self.asked.add(name)
        return self.values.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.raw(name) is not None

    def string(self, name: str, default: str | None = None) -> str | None:
        """A string."""
        return self._typed(name, default, str, "a string")

    def boolean(self, name: str, default: bool = False) -> bool:
        """true or false, nothing else."""
        return self._typed(name, default, bool, "true or false")

    def array(self, name: str) -> list | None:
        """An array."""
        return self._typed(name, None, list, "an array")

    def object(self, name: str) -> dict | None:
        """An object."""
        return self._typed(name, None, dict, "an object")

    def integer(
        self, name: str, default: int | None = None, low: int | None = None, high: int | None = None
    ) -> int | None:
        """A whole number in [low, high]; 3.0 counts as 3."""
        value = self.number(name, None, low, high)
        if value is None:
            return default
        if isinstance(value, float):
            if not value.is_integer():
                raise self.error(name, f"is {value}; need a whole number")
            value = int(value)
        return value

    def number(
        self, name: str, default: float | None = None, low: float | None = None, high: float | None = None
    ) -> int | float | None:
        """A finite number in [low, high]."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"is {kind_of(value)}; need a number", "invalid_type")
        if not abs(value) <= _LARGEST_INT:
            raise self.error(name, "is beyond 64 bits")
        if (low is not None and value < low) or (high is not None and value > high):
            need = f"at least {low}" if high is None else f"{low} to {high}"
            raise self.error(name, f"is {value}; need {need}")
        return value

    def strings(self, name: str) -> list[str]:
        """A string or an array of strings; [] when absent."""
        value = self.raw(name)
        if value is None:
            return []
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(s, str) for s in items):
            raise self.error(name, "must be a string or an array of strings", "invalid_type")
        return items

    def unsupported(self, name: str, allowed: Sequence[Any] = (), hint: str = "") -> None:
        """Raise 400 when the field asks for something this server does not do; None, false and [] ask for nothing."""
        value = self.raw(name)
        empty = value is None or value is False or value in ([], {}, "")
        if empty or value in allowed:
            return
        raise self.error(name, f"is not supported{': ' if hint else ''}{hint}", "unsupported_parameter")

    def error(self, name: str, problem: str, code: str = "invalid_value") -> ApiError:
        """A 400 about one field."""
        return bad_request(f"{self.prefix}{name} {problem}", f"{self.prefix}{name}", code)

    def unknown(self, ignored: frozenset[str]) -> list[str]:
        """Names of the fields that nobody read and that are not knowingly ignored."""
        return [name for name in self.values if name not in self.asked and name not in ignored]

    def _typed(self, name: str, default: Any, kind: type, need: str) -> Any:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.error(name, f"is {kind_of(value)}; need {need}", "invalid_type")
        return value


_logged: set[str] = set()


def log_once(message: str) -> None:
    """Log a message the first time; at most 100 different ones, so that no client can flood the log."""
    if message not in _logged and len(_logged) < 100:
        _logged.add(message)
        log.info("%s", message)


def log_unknown(fields: Fields, ignored: frozenset[str]) -> None:
    """Count the fields that were ignored, and say so once for each name."""
    for name in fields.unknown(ignored):
        timings.get().unknown_fields += 1
        log_once(f"ignoring the unknown request field {name!r:.64}")
