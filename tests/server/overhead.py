"""``python -m tests.server.overhead``: CPU time that the server spends on one streamed token, without any model.

The server is a process of its own with an engine that says one token every ``--pace`` ms, as a GPU would; the client is
a bare socket in this process. What is told is the server process's CPU time a token, less what the pretended engine
itself took: HTTP, JSON, text, the hand-over between threads.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import itertools
import json
import multiprocessing
import pstats
import socket
import threading
import time

from flint_jax.engine import Event
from flint_jax.server.run import address, bind, serve
from flint_jax.server.settings import ServerSettings
from tests.server.harness import served_model, tokenizer

_context = multiprocessing.get_context("spawn")
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}


class PacedEngine:
    """Every running request gets one token every ``pace`` seconds, ``max_tokens`` of them."""

    max_model_len, slots, vocab_size, failed = 1 << 20, 256, 512, None

    def __init__(self, pace: float):
        self._pace = pace
        self._tokens = tokenizer().encode("The quick brown fox jumps over the lazy dog, and then sleeps. ")
        self._running: dict[str, list] = {}
        self._lock = threading.Condition()
        self._names = itertools.count()
        self._stopping = False
        self.own_s = 0.0  # CPU time of the pretended step
        self.said = 0

    def submit(self, prompt_ids, params, *, on_event, request_id=None, **_) -> str:
        name = request_id or str(next(self._names))
        with self._lock:
            self._running[name] = [on_event, params.max_tokens or 100, 0, len(prompt_ids)]
            self._lock.notify()
        return name

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._running.pop(request_id, None)

    def start(self) -> None:
        threading.Thread(target=self._run, name="paced-engine", daemon=True).start()

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            self._lock.notify()

    def stats(self) -> dict[str, int]:
        return {"running": len(self._running), "waiting": 0, "slots": self.slots}

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping:
            began = time.thread_time()
            with self._lock:
                while not (self._running or self._stopping):
                    self._lock.wait()
                running = list(self._running.items())
            due = max(due + self._pace, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            events = [self._event(name, request) for name, request in running]
            self.own_s += time.thread_time() - began
            for (_, request), event in zip(running, events, strict=True):
                request[0](event)
            self.said += len(events)

    def _event(self, name: str, request: list) -> Event:
        _, wanted, said, prompt = request
        request[2] += 1
        last = said + 1 >= wanted
        if last:
            with self._lock:
                self._running.pop(name, None)
        token = self._tokens[said % len(self._tokens)]
        return Event(name, (token,), finish_reason="length" if last else None, prompt_tokens=prompt)


def _server(pipe, pace: float, profile: bool, settings: dict) -> None:
    engine = PacedEngine(pace)

    def load(progress):
        engine.start()
        return served_model(engine)

    def answer():
        while True:
            pipe.recv()
            pipe.send((time.process_time(), engine.own_s, engine.said))

    sock = bind("127.0.0.1", 0)
    pipe.send(address(sock))
    threading.Thread(target=answer, daemon=True).start()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            settings = {"access_log": False, "log_level": "warning"} | settings
            serve(ServerSettings(**settings), sock, load, lambda served: pipe.send("ready"))
    finally:
        profiler.disable()
        if profile:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def _stream(url: str, path: str, tokens: int) -> bytes:
    """A stream of ``tokens`` tokens, read to its end."""
    body = json.dumps(BODIES[path] | {"stream": True, "max_tokens": tokens, "max_output_tokens": tokens}).encode()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as s:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        s.sendall(head.encode() + body)
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            piece = s.recv(1 << 16)
            assert piece, received[-500:]
            received = received[-64:] + piece if len(received) > 1 << 16 else received + piece
    return received


def measure(
    path: str, *, tokens: int, pace: float, batch: int = 1, profile: bool = False, context=_context, **settings
) -> dict:
    """CPU microseconds a token of one route: ``server_us`` without the pretended engine, ``engine_us`` of it."""
    here, there = context.Pipe()
    process = context.Process(target=_server, args=(there, pace, profile, settings))
    process.start()
    there.close()  # so that a server that dies ends the wait for it
    try:
        url = here.recv()
        assert here.recv() == "ready"
        _stream(url, path, 50)

        def counters():
            here.send(None)
            return here.recv()

        before = counters()
        threads = [threading.Thread(target=_stream, args=(url, path, tokens)) for _ in range(batch)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cpu, own, said = (b - a for a, b in zip(before, counters(), strict=True))
    finally:
        process.terminate()
        process.join()
    microseconds = {"server_us": (cpu - own) / said * 1e6, "engine_us": own / said * 1e6}
    return {"path": path, "batch": batch, "tokens": said} | microseconds


def main() -> None:
    """Print a line for each route."""
    parser = argparse.ArgumentParser(prog="python -m tests.server.overhead", description=__doc__)
    parser.add_argument("--path", action="append", choices=list(BODIES), help="default: all")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--pace", type=float, default=2.0, metavar="MS", help="ms between two tokens (default: 2)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where the server's time goes (slows it)")
    args = parser.parse_args()
    for path in args.path or BODIES:
        for _ in range(args.repeat):
            row = measure(path, tokens=args.tokens, pace=args.pace / 1000, batch=args.batch, profile=args.profile)
            own = f"(+ {row['engine_us']:.0f} of the pretended engine)"
            print(f"{path}: batch {row['batch']}, {row['server_us']:.0f} µs of CPU a token {own}")


if __name__ == "__main__":
    main()
