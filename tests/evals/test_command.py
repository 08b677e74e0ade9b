"""python -m flint_jax eval: wrong arguments and servers that fail end before the work, or cost one reply."""

import http.server
import json
import threading

import pytest

from flint_jax.__main__ import main
from flint_jax.errors import FlintError
from flint_jax.evals.replies import HttpModel


@pytest.fixture
def server():
    """Names a model; hangs up on every question."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"data": [{"id": "m"}]} if self.path == "/v1/models" else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))

        def log_message(self, *args):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--families", "poetry,talk"], "need some of arithmetic"),
        (["--families", ","], "need some of arithmetic"),
        (["--distances", "12,far"], "--distances 12,far: need whole numbers"),
        (["--distances", "0"], "--distances 0: need whole numbers"),
        (["--items", "0"], "--items 0: need 1 or more"),
        (["--max-tokens", "0"], "--max-tokens 0: need 1 or more"),
        (["--slots", "-1"], "--slots -1: need 1 or more"),
        (["--output", "no/such/folder/out.json"], "no such folder"),
        (["--url", "localhost"], "need an address such as http"),
        (["--url", "http://127.0.0.1:9", "--model", "x"], "name two models"),
        (["--url", "http://127.0.0.1:1/v1"], "is a server running there?"),
    ],
)
def test_wrong_arguments_end_before_a_model_is_loaded(words, what, capsys, monkeypatch):
    monkeypatch.setattr("flint_jax.__main__._load", lambda args: pytest.fail("loaded"))
    assert main(["eval", *words]) == 2
    assert what in capsys.readouterr().err


def test_a_server_that_hangs_up_costs_replies_not_the_run(server, tmp_path, capsys):
    output = tmp_path / "out.json"
    words = ["--families", "talk", "--items", "2", "--output", str(output)]
    assert main(["eval", "--url", server, *words]) == 0
    found = json.loads(output.read_text())
    assert found["settings"]["model"] == server
    wrong = found["greedy"]["wrong"]
    assert ["no answer" in reply["error"] for reply in wrong] == [True, True]


def test_a_server_without_models(server):
    with pytest.raises(FlintError, match="names no model"):
        HttpModel(f"{server}/other")
