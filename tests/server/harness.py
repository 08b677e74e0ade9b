"""A real server on a real socket in this process, with the fake engine behind it."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import httpx
import openai

from flint_jax import sampling_params
from flint_jax.chat import ChatTemplate
from flint_jax.server.run import address, bind, make_server
from flint_jax.server.settings import ServerSettings
from flint_jax.server.state import ServedModel, ServerState
from loaders import load_tokenizer
from tests.server.fake_engine import FakeEngine, Script

GOLDEN = Path(__file__).parent.parent / "goldens" / "T2"

# Simple turns, and a generation prompt that opens no thought, as Flint's own does.
PLAIN_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'observation' }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
)

# Prints a conversation, so that a test can see what the model would.
SHOW = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.reasoning_content %}(thought {{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}(call {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% if m.role == 'assistant' %};{% endif %}"
    "{% endfor %}{% for t in tools or [] %}{tool {{ t.function | tojson }}}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def tokenizer():
    """The tokenizer of the T2 checkpoint: 512 byte-level tokens."""
    return load_tokenizer(GOLDEN)


def served_model(engine: FakeEngine, *, template: str | None = PLAIN_TEMPLATE, generation: dict | None = None):
    """What the loader would hand to the server."""
    return ServedModel(
        names=("flint-test", "alias/two"),
        engine=engine,
        tokenizer=tokenizer(),
        template=ChatTemplate.from_tokenizer(tokenizer(), template) if template else None,
        generation=generation or {},
        params=sampling_params.SamplingParams,
        resolve=sampling_params.resolve,
        vocab_size=512,
        max_num_seqs=engine.slots,
    )


class Server:
    """A running server. ``url`` has no /v1."""

    def __init__(self, settings: ServerSettings, engine: FakeEngine, served: ServedModel | None):
        self.settings, self.engine = settings, engine
        self._clients: list[openai.OpenAI | anthropic.Anthropic] = []
        self.state = ServerState(settings)
        self.state.served = served
        if served is not None:
            self.state.set_ready(served)
        sock = bind("127.0.0.1", 0)
        self.url = address(sock)
        self.uvicorn = make_server(settings, self.state)
        self._thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [sock]}, daemon=True)

    def start(self) -> None:
        self.engine.start()
        self._thread.start()
        wait_until(lambda: self.uvicorn.started)
        self.http = httpx.Client(base_url=self.url, timeout=10)

    def stop(self) -> None:
        self.http.close()
        self._close_clients()
        self.uvicorn.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()
        if not self.engine.failed:
            self.engine.stop()

    def client(self, **options) -> openai.OpenAI:
        """The official client, without retries."""
        defaults = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 10}
        client = openai.OpenAI(**(defaults | options))
        self._clients.append(client)
        return client

    def anthropic(self, **options) -> anthropic.Anthropic:
        """The other official client, without retries."""
        defaults = {"base_url": self.url, "api_key": "none", "max_retries": 0, "timeout": 10}
        client = anthropic.Anthropic(**(defaults | options))
        self._clients.append(client)
        return client

    def _close_clients(self) -> None:
        while self._clients:
            self._clients.pop().close()

    def post(self, path: str, body=None, **options) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def chat(self, **fields) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]} | fields)

    def says(self, text: str | list[int], **how) -> None:
        """Every reply from now on is ``text``, token by token."""
        tokens = tokenizer().encode(text) if isinstance(text, str) else list(text)
        self.engine.script = lambda prompt, params: Script(tokens, **how)

    def reset(self) -> None:
        """Back to how it was before a test; every slot must be free."""
        self._close_clients()
        wait_until(self.engine.idle)
        wait_until(lambda: not self.state.jobs)
        self.engine.submitted.clear()
        self.engine.aborted = self.engine.cached_tokens = 0
        self.says("abc")


@contextlib.contextmanager
def running(*, loaded: bool = True, template: str | None = PLAIN_TEMPLATE, generation=None, engine=None, **settings):
    """A server for one test. Settings are ServerSettings' fields."""
    engine = engine or FakeEngine()
    served = served_model(engine, template=template, generation=generation)
    server = Server(
        ServerSettings(**({"access_log": False, "log_level": "warning"} | settings)), engine, served if loaded else None
    )
    server.served = served
    server.start()
    try:
        yield server
    finally:
        server.stop()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Fail unless ``condition`` holds soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def prompt_of(server: Server) -> str:
    """What the last request became."""
    return tokenizer().decode(server.engine.submitted[-1].prompt)


def sse_events(text: str) -> list[dict]:
    """The events of a stream whose events are named after the type of their data, framing checked, comments dropped."""
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert (name, data[:6]) == (f"event: {value['type']}", "data: ")
        events.append(value)
    return events


def call(name: str, **arguments: str) -> str:
    """A tool call as the model writes it."""
    pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{pairs}</tool_call>"


def sse_data(text: str) -> Iterator[str]:
    """The ``data:`` payloads of a stream, whose framing must be exact."""
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        assert "\n" not in block, block
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        yield block.removeprefix("data: ")
