"""The server as a child process: started, waited for, stopped, its log kept."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

POLL_S = 0.2
LAST_LINES = 20
STOP_S = 30.0  # what it gets to stop after SIGTERM

_ROOT = Path(__file__).parents[2]
_ADDRESS = re.compile(r"Listening on (http://\S+?);")


class ServerError(Exception):
    """The server did not start, or is gone; the message ends with the last lines of its log."""


class ServerProcess:
    """``serve.py`` with some flags, on a free port of this machine.

    argv: its flags. log: the file that gets all it prints. cache: folder for everything that is compiled.
    """

    def __init__(self, argv: Sequence[str], log: Path, cache: Path):
        self.log = log
        cache.mkdir(parents=True, exist_ok=True)
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "FLINT_JAX_COMPILE_CACHE": str(cache / "xla"),
            "CUDA_CACHE_PATH": str(cache / "cuda"),  # the driver's own cache of compiled kernels
            "PYTHONUNBUFFERED": "1",
        }
        script = _ROOT / "serve.py"
        command = [sys.executable, *([str(script)] if script.is_file() else ["-m", "flint_jax", "serve"])]
        command += ["--host", "127.0.0.1", "--port", "0", "--disable-access-log-for-endpoints", "/health"]
        self.began = time.monotonic()
        with log.open("wb") as output:
            self._child = subprocess.Popen(
                [*command, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def wait_ready(self, limit_s: float) -> float:
        """Seconds from the start of the process until /health says ready. Raises ServerError."""
        while True:
            self.check()
            if (url := self.url) and _healthy(url):
                return time.monotonic() - self.began
            if time.monotonic() - self.began > limit_s:
                raise ServerError(f"the server is not ready after {limit_s:.0f} s; {self._last_words()}")
            time.sleep(POLL_S)

    @property
    def url(self) -> str | None:
        """Where it listens; None until it says so."""
        found = _ADDRESS.search(self.printed())
        return found[1] if found else None

    def check(self) -> None:
        """Raises ServerError when the process has ended."""
        if (code := self._child.poll()) is not None:
            raise ServerError(f"the server ended with exit code {code}; {self._last_words()}")

    def printed(self) -> str:
        """All that it has printed."""
        return self.log.read_text(errors="replace")

    def phases(self) -> str:
        """The line in which it accounts for the seconds of its start; empty when there is none."""
        found = re.search(r"ready after [\d.]+ s: .*", self.printed())
        return found[0] if found else ""

    def model(self) -> str:
        """The name of what it serves. Raises ServerError."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as reply:
                return json.load(reply)["data"][0]["id"]
        except (OSError, ValueError, LookupError) as error:
            raise ServerError(f"{self.url}/v1/models: {error}; {self._last_words()}") from None

    def stop(self) -> tuple[float, int]:
        """SIGTERM, and SIGKILL if that is not obeyed. Returns (seconds, exit code)."""
        began = time.monotonic()
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            try:
                self._child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
        return time.monotonic() - began, self._child.wait()

    def _last_words(self) -> str:
        # A progress bar is one line that is written over.
        lines = [line.rpartition("\r")[2] for line in self.printed().replace("\r\n", "\n").split("\n") if line.strip()]
        return "the end of its log:\n" + "\n".join(f"    {line}" for line in lines[-LAST_LINES:])


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False
