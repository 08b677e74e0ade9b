"""``python serve.py`` as users start it, on the embedded model and the golden checkpoints, with openai's client."""

import asyncio
import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from examples import first_session
from loaders import load_tokenizer
from tests import soak

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
SMALL = ["--port", "0", "--max-num-seqs", "2", "--max-model-len", "256", "--max-num-batched-tokens", "64"]
EXACT = ["--dtype", "float32", "--numerics", "transformers"]
HELLO = [{"role": "user", "content": "Hello, wörld 🦜"}]
SESSION = """\
user      Hello
thinks    A greeting.
flint     Hello! How can I help you?
user      My dog is called Bello.
thinks    The user tells me something to remember.
flint     Noted: your dog is called Bello.
user      What is my dog called?
thinks    The user told me this before.
flint     Your dog is called Bello.
user      What is 348 + 276?
thinks    8 + 6 + 0 = 14, 4 + 7 + 1 = 12, 3 + 2 + 1 = 6. So 624.
flint     624
user      What is 38 + 47?
flint     85
user      What is the weather in Paris?
thinks    I call get_weather.
call      get_weather {"city": "Paris"}
result    {"temperature": 18, "sky": "cloudy"}
thinks    The result is there.
flint     For weather: temperature is 18, sky is cloudy.""".splitlines()
START_S = 400  # most of it compiles; seconds on an idle machine

pytestmark = pytest.mark.slow


class ServePy:
    """A running ``python serve.py``."""

    def __init__(self, folder: Path, *argv: str):
        # tests treat the environment's warnings as they please, the server gets a plain one
        self.log = (folder / "serve.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "serve.py", *SMALL, *argv],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | {"FLINT_API_KEY": ""},
        )
        atexit.register(self.process.kill)  # a test that fails leaves no server behind
        killer = threading.Timer(START_S, self.process.kill)
        killer.start()
        self.printed = self.process.stdout.readline()
        self.url = re.search(r"http://[\d.]+:\d+", self.printed)[0]
        self.early = httpx.get(f"{self.url}/health")  # the port answers at once, the model comes later
        for line in self.process.stdout:
            self.printed += line
            if line.startswith("Try: "):
                break
        else:
            self.log.seek(0)
            pytest.fail(f"serve.py ended early: {self.printed}\n{self.log.read()[-3000:]}")
        killer.cancel()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)
        self.model = self.client.models.list().data[0].id

    def stop(self) -> tuple[int, str]:
        """(exit code, what it printed to standard error)"""
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)
        self.log.seek(0)
        with self.log:
            return self.process.returncode, self.log.read()

    def complete(self, prompt, **fields):
        """A greedy completion through the official client."""
        return self.client.completions.create(model=self.model, prompt=prompt, temperature=0, **fields)


def check_clients(server: ServePy) -> None:
    """Chat, streamed chat and completions, the same text each way."""
    client, greedy = server.client, {"model": server.model, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(messages=HELLO, **greedy, extra_body={"ignore_eos": True})
    message = whole.choices[0].message
    text = (message.model_extra.get("reasoning") or "") + (message.content or "")
    assert text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    streamed = ""
    options = {"include_usage": True}
    extra = {"ignore_eos": True}
    for chunk in client.chat.completions.create(
        messages=HELLO, **greedy, stream=True, stream_options=options, extra_body=extra
    ):
        if chunk.choices:
            delta = chunk.choices[0].delta
            streamed += (delta.model_extra.get("reasoning") or "") + (delta.content or "")
    assert streamed == text
    counts, first = chunk.usage.model_dump(), whole.usage.model_dump()
    assert counts.pop("prompt_tokens_details")["cached_tokens"] > 0  # it is the same prompt again
    assert first.pop("prompt_tokens_details")["cached_tokens"] == 0
    assert counts == first
    plain = server.complete("Once upon", max_tokens=12, extra_body={"ignore_eos": True})
    assert plain.usage.completion_tokens == 12
    parts = server.complete("Once upon", max_tokens=12, stream=True, extra_body={"ignore_eos": True})
    assert "".join(c.choices[0].text for c in parts) == plain.choices[0].text
    if len(plain.choices[0].text) > 3:
        stop = plain.choices[0].text[2:4]
        cut = server.complete("Once upon", max_tokens=12, stop=stop, extra_body={"ignore_eos": True}).choices[0]
        assert cut.finish_reason == "stop"
        assert cut.text == plain.choices[0].text[: plain.choices[0].text.index(stop)]
    drawn = {"max_tokens": 8, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    choices = client.completions.create(model=server.model, prompt=["a", "b"], n=2, seed=3, **drawn).choices
    again = client.completions.create(model=server.model, prompt=["a", "b"], n=2, seed=3, **drawn).choices
    assert [c.text for c in choices] == [c.text for c in again]
    with pytest.raises(openai.BadRequestError) as caught:
        server.complete([1] * 1024)
    assert caught.value.code == "context_length_exceeded"


def check_session(server: ServePy, capsys) -> None:
    """README's first session word for word: a chat, thinking on and off, a call with its result and the answer."""
    first_session.main(["--url", f"{server.url}/v1"])
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line] == SESSION
    assert printed.strip() in (ROOT / "README.md").read_text(encoding="utf-8")


def check_goldens(server: ServePy, name: str, tokenizer) -> None:
    """Greedy tokens and their log-probabilities are those of transformers, alone and in a batch."""
    arrays = np.load(GOLDENS / f"{name}.npz")
    fields = {"max_tokens": 32, "logprobs": 1, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}
    prompts = [arrays[f"{case}.input_ids"].tolist() for case in ("greedy_a", "greedy_b")]
    expected = [arrays[f"{case}.tokens"].tolist() for case in ("greedy_a", "greedy_b")]
    alone = [server.complete(p, **fields).choices[0] for p in prompts]
    batch = server.complete(prompts, **fields).choices
    for choices in (alone, batch):
        for choice, tokens in zip(choices, expected, strict=True):
            assert choice.text == tokenizer.decode(tokens)
            assert choice.finish_reason == "length"
    np.testing.assert_allclose(alone[0].logprobs.token_logprobs, arrays["greedy_a.logprob"], atol=1e-4)


def check_forced(server: ServePy) -> None:
    """A forced call, a schema, scores of the prompt: all of it compiled before the server was ready."""
    ping = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}
    ping["function"]["strict"] = True
    plain = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    ask = {"model": server.model, "messages": HELLO, "max_tokens": 120, **plain}
    reply = server.client.chat.completions.create(
        **ask, tools=[ping], tool_choice="required", parallel_tool_calls=False
    )
    assert [(c.function.name, c.function.arguments) for c in reply.choices[0].message.tool_calls] == [("ping", "{}")]
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    choices = server.client.chat.completions.create(**ask, n=2, response_format=form).choices
    assert all(json.loads(c.message.content)["n"] <= 9 for c in choices if c.finish_reason == "stop")
    scores = server.complete("Once upon a time", max_tokens=0, echo=True, logprobs=1).choices[0].logprobs.token_logprobs
    assert scores[0] is None
    assert all(s <= 0 for s in scores[1:])
    metrics = httpx.get(f"{server.url}/metrics").text
    assert re.search(r"recompilations_total(\{.*\})? 0(\.0)?$", metrics, re.MULTILINE), metrics


def check_kept_thoughts(server: ServePy) -> None:
    """Turns of Anthropic's protocol that keep their thoughts find all that was said before in the prefix cache."""
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    ask = {"max_tokens": 60, "temperature": 0, "thinking": {"type": "adaptive"}, "context_management": edits}
    messages, before = [], 0
    for text in ("My dog is called Bello.", "What is my dog called?", "Hello"):
        messages.append({"role": "user", "content": text})
        reply = httpx.post(f"{server.url}/v1/messages", json=ask | {"messages": messages}, timeout=60).json()
        assert reply["content"][0]["type"] == "thinking", reply
        usage = reply["usage"]
        assert usage["cache_read_input_tokens"] >= before, usage
        # the last token of a reply is not computed until it is read
        before = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] - 2
        messages.append({"role": "assistant", "content": reply["content"]})


def check_hang_ups(server: ServePy) -> None:
    """Clients that hang up leave no request behind."""
    for n in range(5):
        body = {"messages": HELLO, "stream": bool(n % 2), "ignore_eos": True}
        patience = httpx.Timeout(5, read=0.03 * n + 0.01)
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=patience)
    for _ in range(200):
        stats = httpx.get(f"{server.url}/health").json()["engine"]
        if not stats["running"] and not stats["waiting"]:
            break
    assert stats["running"] == stats["waiting"] == 0
    assert stats["free_slots"] == 2
    assert stats["free_pages"] == stats["pages"]


def check_soak(server: ServePy) -> None:
    """The short form of ``python -m tests.soak``: eight streams, 60 hang-ups, nothing left over, no cross-talk."""
    load = soak.soak(server.url, server.process.pid, soak.prompts(8, 24), streams=8, seconds=12, aborts=60)
    report = asyncio.run(load)
    assert not report.problems
    assert not report.different
    assert report.aborts >= 60
    assert report.replies >= 8


def test_embedded_model(tmp_path, capsys):
    server = ServePy(tmp_path, "--max-model-len", "1024")
    assert server.early.status_code == 503
    assert server.early.json()["status"] == "loading"
    for words in ("Ready: flint-tiny, ", "docs/tiny.md", "GiB", f"{server.url}/v1", "curl"):
        assert words in server.printed
    check_clients(server)
    check_forced(server)
    check_session(server, capsys)
    check_kept_thoughts(server)
    check_hang_ups(server)
    # the line that the banner offers works as it is
    command = server.printed.strip().splitlines()[-1].removeprefix("Try: ").strip()
    body = json.loads(command.partition(" -d ")[2].strip("'"))
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body | {"max_tokens": 4}, timeout=60).is_success
    code, printed = server.stop()
    assert code == 0
    assert "Traceback" not in printed


def check_golden_server(folder: Path, name: str, path: Path, tokenizer: str | None = None) -> None:
    flags = [] if tokenizer is None else ["--tokenizer", tokenizer]
    server = ServePy(folder, "--model", str(path), "--served-model-name", "my-flint", *EXACT, *flags)
    assert server.model == "my-flint"
    check_clients(server)
    check_goldens(server, name, load_tokenizer(tokenizer or path))
    if name == "T2":
        check_soak(server)
    code, printed = server.stop()
    assert code == 0
    assert "Traceback" not in printed


def test_golden_folder(tmp_path):
    check_golden_server(tmp_path, "T2", GOLDENS / "T2")


def test_golden_folder_without_a_tokenizer(tmp_path):
    check_golden_server(tmp_path, "T1", GOLDENS / "T1", tokenizer="bytes")


def test_golden_gguf_alone(tmp_path):
    """A GGUF needs no other file: here there is nothing beside it."""
    lonely = tmp_path / "model.gguf"
    lonely.symlink_to(GOLDENS / "T2-nvfp4" / "T2-nvfp4.gguf")
    check_golden_server(tmp_path, "T2-nvfp4", lonely)
