"""One server process: open the port, load in the background, serve, stop in good order.

Exit codes: 0 after SIGTERM or SIGINT, 1 when something broke, 2 when the command line asked for something impossible
(bad path, damaged checkpoint, port in use). A second signal ends the process at once, with 130 (SIGINT) or 143
(SIGTERM), as if it had not been caught.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

import uvicorn

from flint_jax.errors import FlintError
from flint_jax.server import words
from flint_jax.server.app import create_app
from flint_jax.server.running import threads_busy
from flint_jax.server.settings import ServerSettings
from flint_jax.server.state import ServedModel, ServerState

log = logging.getLogger("flint_jax.server")

_LAST_WORDS_S = 1.0  # for clients to read the error that ends their stream
_STOP_S = 0.5  # for the engine to come to the end of its step
_IDLE_CONNECTION_S = 75  # longer than the 60 s after which most clients and proxies drop an idle connection themselves


class StartError(Exception):
    """The server cannot start; the message is one line for the user."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartError when the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except (OSError, OverflowError) as e:
        sock.close()
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise StartError(f"cannot listen on {host}:{port}: {reason}; choose another with --host or --port") from None
    sock.setblocking(False)
    return sock


def address(sock: socket.socket) -> str:
    """The URL of a listening socket, as a client on this machine would write it."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers: it would raise the signal again at the end, and the exit code is ours."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


class _Unlogged(logging.Filter):
    """Keeps exchanges about some paths out of uvicorn's access log."""

    def __init__(self, paths: tuple[str, ...]):
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        # uvicorn's arguments: client, method, path with query, HTTP version, status
        args = record.args
        return not (isinstance(args, tuple) and len(args) == 5 and str(args[2]).partition("?")[0] in self._paths)


def make_server(settings: ServerSettings, state: ServerState) -> uvicorn.Server:
    """The HTTP server for ``state``; run it with ``serve(sockets=[...])``."""
    config = uvicorn.Config(
        create_app(state),
        http="h11",
        ws="none",
        lifespan="on",
        log_level=settings.log_level,
        access_log=settings.access_log,
        server_header=False,
        root_path=settings.root_path,
        timeout_keep_alive=_IDLE_CONNECTION_S,
        timeout_graceful_shutdown=settings.shutdown_timeout_s + _LAST_WORDS_S,
    )
    access = logging.getLogger("uvicorn.access")
    for old in [f for f in access.filters if isinstance(f, _Unlogged)]:
        access.removeFilter(old)
    access.addFilter(_Unlogged(settings.unlogged_paths))
    if settings.log_level == "info":  # its news of starting and stopping repeat what we print
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return _Uvicorn(config)


def serve(
    settings: ServerSettings,
    sock: socket.socket,
    load: Callable[[Callable[[str], None]], ServedModel],
    on_ready: Callable[[ServedModel], None] = lambda served: None,
) -> int:
    """Serve until a signal; returns the exit code.

    load: called on another thread with a function that takes progress messages; its engine is started already.
    on_ready: called on the event loop once requests are answered.
    """
    process = _Process(settings, load, on_ready)
    code = asyncio.run(process.main(sock), loop_factory=process.server.config.get_loop_factory())
    # A compilation, an encoding and a step of the model cannot be interrupted, and may take longer than anybody waits.
    if process.loader.is_alive() or threads_busy():
        _leave_now(code)
    if process.state.served is not None:
        stop = threading.Thread(target=process.state.served.engine.stop, name="stop", daemon=True)
        stop.start()
        stop.join(_STOP_S)
        if stop.is_alive():
            log.warning("the engine is inside a step that does not end; leaving without it")
            _leave_now(code)
    return code


class _Process:
    def __init__(self, settings: ServerSettings, load: Callable, on_ready: Callable):
        self.settings, self._load, self._on_ready = settings, load, on_ready
        self.state = ServerState(settings)
        self.server = make_server(settings, self.state)
        self._code = 0
        self._signals = 0

    async def main(self, sock: socket.socket) -> int:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self.loader = threading.Thread(target=self._load_on_thread, name="load", daemon=True)
        self.loader.start()
        await self.server.serve(sockets=[sock])
        return self._code

    def _load_on_thread(self) -> None:
        try:
            served = self._load(self.state.progress)
        except BaseException as e:
            self._tell_loop(self._loading_failed, e)
        else:
            self._tell_loop(self._loaded, served)

    def _tell_loop(self, function: Callable, *args) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: there is nobody to tell
            self._loop.call_soon_threadsafe(function, *args)

    def _loaded(self, served: ServedModel) -> None:
        self.state.served = served
        if not self.server.should_exit:
            # what loading made stays: the collector need not walk it, which takes a tenth of a second with jax
            gc.collect()
            gc.freeze()
            self.state.set_ready(served)
            self._on_ready(served)

    def _loading_failed(self, error: BaseException) -> None:
        if isinstance(error, StartError | FlintError):
            print(f"{words.program}: error: {one_line(error)}", file=sys.stderr)
            self._code = 2
        else:
            log.error("loading failed", exc_info=error)
            print(f"{words.program}: error: loading failed: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
            self._code = 1
        self.state.set_failed(error)
        self.server.should_exit = True

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            _leave_now(128 + number)
        if self.server.should_exit:
            return
        running = len(self.state.jobs) + len(self.state.preparing)
        seconds = self.settings.shutdown_timeout_s
        self.state.set_stopping()
        self.server.should_exit = True
        self._loop.call_later(seconds, self.state.close_jobs)
        last = threading.Timer(seconds + _LAST_WORDS_S + _STOP_S, _leave_now, (self._code,))  # whatever the loop does
        last.daemon = True
        last.start()
        with contextlib.suppress(OSError):  # whoever read it may be gone
            print(f"Stopping; {running} requests are running and get up to {seconds:g} s to finish.", flush=True)


def one_line(error: BaseException) -> str:
    """The message on one line."""
    return " ".join(str(error).split())


def _leave_now(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
