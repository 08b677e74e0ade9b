"""The process: how it starts, how it stops, and with which exit code."""

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from flint_jax.server import launch
from tests.server.fake_process import HI, Process, context, last_error
from tests.server.harness import GOLDEN, wait_until
from tests.server.overhead import measure

ROOT = Path(__file__).parents[2]


@pytest.fixture
def process(tmp_path):
    made = []

    def make(**options):
        made.append(Process(tmp_path / f"{len(made)}.err", **options))
        return made[-1]

    yield make
    for p in made:
        p.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_running_stream_is_finished_before_the_end(process, number):
    p = process(text="abcdefghij", token_s=0.05)
    p.wait_ready()
    thread, received = p.stream()
    wait_until(lambda: received)
    p.signal(number)
    thread.join()
    assert "".join(received).endswith("data: [DONE]\n\n")
    code, printed = p.end()
    assert code == 0
    assert "1 requests are running" in printed
    assert "Traceback" not in printed


def test_a_stream_that_takes_too_long_ends_with_an_error_event(process):
    p = process(text="ab " * 80, token_s=0.1, shutdown_timeout_s=0.5)
    p.wait_ready()
    thread, received = p.stream()
    wait_until(lambda: received)
    started = time.monotonic()
    p.signal(signal.SIGTERM)
    thread.join()
    assert last_error(received)["code"] == "shutting_down"
    code, printed = p.end()
    assert code == 0
    assert "Traceback" not in printed
    assert time.monotonic() - started < 10  # its text would take 24 s


def test_new_requests_are_refused_while_it_stops(process):
    p = process(text="ab " * 80, token_s=0.1, shutdown_timeout_s=4)
    p.wait_ready()
    thread, received = p.stream()
    wait_until(lambda: received)

    def served():
        try:
            return httpx.get(f"{p.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    assert served()
    p.signal(signal.SIGTERM)
    wait_until(lambda: not served(), 3)
    assert thread.is_alive()
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(process, number):
    p = process(text="ab " * 80, token_s=0.1, shutdown_timeout_s=60)
    p.wait_ready()
    thread, received = p.stream()
    wait_until(lambda: received)
    p.signal(signal.SIGINT)
    time.sleep(0.3)
    assert p.process.exitcode is None
    p.signal(number)
    assert p.end()[0] == 128 + number
    thread.join()
    assert received[-1] == "cut"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_long_texts_do_not_hold_up_the_end(process, path):
    """A text that would be encoded for a minute: its sender gets a 503 in the route's form, and the process ends."""
    p = process(shutdown_timeout_s=0.5)
    p.wait_ready()
    text = "The harbour was quiet. " * 1_000_000
    got = []

    def ask():
        body = {"prompt": text} if path == "/tokenize" else {"messages": [{"role": "user", "content": text}]}
        got.append(httpx.post(p.url + path, json=body, timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    assert not got
    started = time.monotonic()
    p.signal(signal.SIGTERM)
    code, printed = p.end(10)
    assert time.monotonic() - started < 0.5 + 2 + 1  # one for a busy machine
    assert code == 0
    assert "Traceback" not in printed
    for thread in threads:
        thread.join()
    assert [r.status_code for r in got] == [503] * 3
    for response in got:
        assert "shutting down" in response.json()["error"]["message"]


def test_a_body_that_never_ends_does_not_hold_up_the_end(process):
    p = process(shutdown_timeout_s=0.5)
    p.wait_ready()
    host, port = p.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.3)
        started = time.monotonic()
        p.signal(signal.SIGTERM)
        assert half.recv(65536).startswith(b"HTTP/1.1 503")
        code, printed = p.end(10)
    assert time.monotonic() - started < 0.5 + 2 + 1
    assert code == 0
    assert "Traceback" not in printed


def test_a_step_that_never_returns_does_not_hold_up_the_end(process):
    p = process(text="ab " * 80, token_s=100, stop_s=60, shutdown_timeout_s=0.5)
    p.wait_ready()
    thread, received = p.stream()
    time.sleep(0.5)
    started = time.monotonic()
    p.signal(signal.SIGTERM)
    code, printed = p.end(10)
    assert time.monotonic() - started < 0.5 + 2 + 1
    assert code == 0
    assert "leaving without it" in printed
    thread.join()
    assert last_error(received)["code"] == "shutting_down"


def test_a_signal_counts_when_nobody_reads_the_output(process):
    """As after ``serve.py | head``, or when the process that started it is gone."""
    p = process(deaf=True, text="ab " * 80, token_s=0.1, shutdown_timeout_s=60)
    p.wait_ready()
    thread, received = p.stream()
    wait_until(lambda: received)
    p.signal(signal.SIGTERM)
    wait_until(lambda: _refused(p), 3)
    p.signal(signal.SIGTERM)
    assert p.end()[0] == 128 + signal.SIGTERM
    thread.join()


def _refused(p):
    try:
        return not httpx.get(f"{p.url}/health").is_success
    except httpx.TransportError:
        return True


def test_signal_while_loading(process):
    p = process(load_s=30)
    wait_until(lambda: httpx.get(f"{p.url}/health").json().get("detail") == "pretending")
    response = httpx.post(f"{p.url}/v1/chat/completions", json=HI)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "model_loading")
    p.signal(signal.SIGTERM)
    assert p.end()[0] == 0


@pytest.mark.parametrize(("kind", "code"), [("checkpoint", 2), ("bug", 1)])
def test_loading_fails(process, kind, code):
    got, printed = process(load_s=0.2, load_error=kind).end()
    assert got == code
    if kind == "checkpoint":
        assert [line for line in printed.splitlines() if "error" in line] == [
            "serve.py: error: weights.gguf is cut short: 3 bytes are missing"
        ]
        assert "Traceback" not in printed


def test_access_log_without_some_paths(process):
    p = process(log_level="info", unlogged_paths=("/health",))
    p.wait_ready()
    for path in ("/health", "/health?x=1", "/version"):
        assert httpx.get(p.url + path).is_success
    p.signal(signal.SIGTERM)
    printed = p.end()[1]
    assert "GET /version" in printed
    assert "GET /health" not in printed


def test_the_bench_of_overhead_runs():
    row = measure("/v1/completions", tokens=20, pace=0.001, context=context)
    assert row["tokens"] == 20
    assert row["server_us"] > 0


# -- the command line --------------------------------------------------------------------------------------------------


def refusal(capsys, *argv):
    """The one line on standard error of a command that ends with code 2."""
    try:
        code = launch.main(argv)
    except SystemExit as e:
        code = e.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("serve.py: error: ")
    return line


def test_port_in_use_is_one_line_and_code_2(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refusal(capsys, "--port", port)
    assert port in line
    assert "in use" in line


@pytest.mark.parametrize("path", ["no/such/model.gguf", "/no/such", "./nothing", "~/nothing", "nothing"])
def test_bad_path_is_one_line_and_code_2(capsys, path):
    assert path in refusal(capsys, path)
    assert path in refusal(capsys, "--model", path)


@pytest.mark.parametrize("path", ["no/such.gguf", "tests/nothing", "no/model.safetensors"])
def test_a_wrong_path_is_told_before_a_busy_port(capsys, path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = refusal(capsys, path, "--port", str(taken.getsockname()[1]))
    assert f"{path}: no such file or folder" in line


def test_a_hub_id_without_the_hub_is_told_before_a_busy_port(capsys, monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = refusal(capsys, "owner/name", "--port", str(taken.getsockname()[1]))
    assert "pip install 'flint-jax[hub]'" in line


def test_more_context_than_the_model_has_is_refused(capsys):
    line = refusal(capsys, "--max-model-len", "4097")
    assert "--max-model-len 4097: the model's own context is 4096 tokens" in line


def test_a_foreign_address_is_one_line_and_code_2(capsys):
    assert "203.0.113.1" in refusal(capsys, "--host", "203.0.113.1", "--port", "0")


def test_damaged_checkpoint_never_opens_the_port(capsys, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((GOLDEN.parent / "T2-nvfp4" / "T2-nvfp4.gguf").read_bytes()[:-1])
    with socket.create_server(("127.0.0.1", 0)) as taken:  # had it come as far as the port, it would complain of that
        assert "cut.gguf" in refusal(capsys, str(cut), "--port", str(taken.getsockname()[1]))


def test_a_broken_template_never_opens_the_port(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = refusal(capsys, "--chat-template", "{% if x %}", "--port", str(taken.getsockname()[1]))
    assert "the chat template does not compile: line 1: " in line


def test_serve_py_leaves_with_the_code():
    for argv, words in (
        (["--max-model-length", "5"], "unknown flag --max-model-length; did you mean --max-model-len?"),
        (["no/such.gguf"], "no/such.gguf"),
    ):
        command = [sys.executable, "serve.py", *argv]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("serve.py: error: ")
        assert words in line


def test_help_groups_flags_and_shows_defaults(capsys):
    with pytest.raises(SystemExit) as left:
        launch.main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    groups = ("model:", "capacity:", "replies:", "HTTP:", "logs and metrics:")
    for words in (*groups, "--max-num-seqs", "(default: 8000)", "(default: 0.9)", "--[no-]enable-prefix-caching"):
        assert words in text, words
