"""serve.py's process with the fake engine, as a process of its own.

``multiprocessing``'s fork server imports everything once, so that a process costs 0.1 s instead of the seconds that
importing jax takes.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import httpx

from flint_jax.errors import CheckpointError
from flint_jax.server.run import address, bind, serve
from flint_jax.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine, Script
from tests.server.harness import served_model, tokenizer

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__])

HI = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


class Process:
    """A server process. load_s: seconds of loading; load_error: "checkpoint" or "bug"; the rest as in ServerSettings.

    stop_s: seconds that the engine takes to come to the end of its step. err: file that gets what it prints.
    deaf: nobody reads its standard output any more.
    """

    def __init__(
        self, err: Path, *, load_s=0.0, load_error=None, text="abc", token_s=0.0, deaf=False, stop_s=0.0, **settings
    ):
        self._news, far_end = context.Pipe(duplex=False)
        self._err = err
        args = (far_end, str(err), load_s, load_error, text, token_s, deaf, stop_s, settings)
        self.process = context.Process(target=_run, args=args)
        self.process.start()
        far_end.close()
        self.url = self._news.recv()

    def wait_ready(self) -> None:
        assert self._news.poll(60)
        assert self._news.recv() == "ready"

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, seconds: float = 10) -> tuple[int, str]:
        """(exit code, what it printed), once it has ended."""
        self.process.join(seconds)
        assert self.process.exitcode is not None
        return self.process.exitcode, self._err.read_text()

    def kill(self) -> None:
        if self.process.exitcode is None:
            self.signal(signal.SIGKILL)
        self.process.join()
        self._news.close()

    def stream(self) -> tuple[threading.Thread, list[str]]:
        """Read a chat stream on another thread; (thread, the text so far, "cut" at the end if it broke off)."""
        received: list[str] = []

        def read():
            try:
                with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=HI, timeout=20) as response:
                    received.extend(response.iter_text())
            except httpx.TransportError:
                received.append("cut")

        thread = threading.Thread(target=read)
        thread.start()
        return thread, received


def _run(news, err, load_s, load_error, text, token_s, deaf, stop_s, settings) -> None:
    file = os.open(err, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if deaf:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)

    def load(progress):
        progress("pretending")
        time.sleep(load_s)
        if load_error == "checkpoint":
            raise CheckpointError("weights.gguf is cut short:\n 3 bytes are missing")
        if load_error:
            raise ZeroDivisionError("oops")
        engine = FakeEngine()
        engine.script = lambda prompt, params: Script(tokenizer().encode(text), token_s=token_s)
        engine.start()
        stop, engine.stop = engine.stop, lambda: (time.sleep(stop_s), stop())
        return served_model(engine)

    sock = bind("127.0.0.1", 0)
    news.send(address(sock))
    raise SystemExit(serve(ServerSettings(**settings), sock, load, lambda served: news.send("ready")))


def last_error(received: list[str]) -> dict:
    """The error object that ends a stream."""
    last = "".join(received).strip().rpartition("\n\n")[2]
    return json.loads(last.removeprefix("data: "))["error"]
