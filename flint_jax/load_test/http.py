"""A client of HTTP/1.1 that tells when each server-sent event arrived: one connection, one request at a time."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any


class Failed(Exception):
    """A request that got no proper answer; ``status`` is 0 when there was none."""

    def __init__(self, status: int, message: str):
        super().__init__(f"HTTP {status}: {message}" if status else message)
        self.status = status


class Connection:
    """One connection to ``url`` (its /v1 is dropped), opened at the first request and again after it broke."""

    def __init__(self, url: str, api_key: str | None = None):
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        self._host, self._secure = parts.hostname or "127.0.0.1", parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, path: str) -> Any:
        """The JSON answer to a GET. Raises Failed."""
        return json.loads(await self.text(path))

    async def text(self, path: str) -> str:
        """The answer to a GET as it is. Raises Failed."""
        return await self._text("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a POST. Raises Failed."""
        return json.loads(await self._text("POST", path, body))

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[tuple[float, str]]:
        """(time.perf_counter of arrival, block) for each block of a stream of server-sent events. Raises Failed."""
        status, headers, reader = await self._send("POST", path, body)
        kind = headers.get("content-type", "")
        if status != 200 or not kind.startswith("text/event-stream"):
            raise Failed(status, (b"".join([p async for p in _body(reader, headers)])).decode(errors="replace")[:500])
        rest = b""
        async for piece in _body(reader, headers):
            now = time.perf_counter()
            *blocks, rest = (rest + piece).split(b"\n\n")
            for block in blocks:
                yield now, block.decode()
        if rest:
            raise Failed(0, f"the stream ends inside an event: {rest[:200]!r}")

    async def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _text(self, method: str, path: str, body: dict[str, Any] | None) -> str:
        status, headers, reader = await self._send(method, path, body)
        text = b"".join([piece async for piece in _body(reader, headers)])
        if status != 200:
            raise Failed(status, text.decode(errors="replace")[:500])
        return text.decode()

    async def _send(self, method: str, path: str, body: dict[str, Any] | None):
        if self._streams is None:
            context = ssl.create_default_context() if self._secure else None
            self._streams = await asyncio.open_connection(self._host, self._port, ssl=context, limit=1 << 24)
        reader, writer = self._streams
        raw = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"host: {self._host}:{self._port}",
            "content-type: application/json",
            f"content-length: {len(raw)}",
            *([f"authorization: Bearer {self._key}"] if self._key else []),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + raw)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as e:
            await self.close()
            raise Failed(0, f"the server closed the connection: {e}") from None
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        return int(head[0].split()[1]), headers, reader


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        length = int(headers.get("content-length", "0"))
        yield await reader.readexactly(length)
        return
    try:
        while size := int((await reader.readline()).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    except (asyncio.IncompleteReadError, ConnectionError, ValueError) as e:
        raise Failed(0, f"the stream breaks off: {e}") from None
