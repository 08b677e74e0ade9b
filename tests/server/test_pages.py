"""The chat page, the OpenAPI description, and the small routes beside the API."""

import re
import shutil
import subprocess

import pytest

from flint_jax.server import page
from flint_jax.server.app import ROUTES
from flint_jax.server.openapi import document
from flint_jax.server.openapi_schemas import ROUTES as DESCRIBED
from tests.server.harness import running, tokenizer

HTML = page.PAGE.decode()


# -- the chat page -----------------------------------------------------------------------------------------------------


def test_the_page_is_served_with_a_strict_policy(server):
    response = server.http.get("/")
    assert response.text == HTML
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[kind])


def test_the_page_needs_nothing_from_outside_and_parses_nothing_as_html():
    assert not re.findall(r"https?:|//[a-z0-9]+\.|src=|href=|@import|url\(", HTML)
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        " on",
        "style=",
    ):
        found = re.findall(r'<[^>]* on\w+="', HTML) if word == " on" else word in HTML
        assert not found, word
    assert HTML.count("<script>") == HTML.count("<style>") == 1
    script = HTML.split("<script>")[1].split("</script>")[0]
    for name in re.findall(r'get\("(\w+)"\)', script):
        assert f'id="{name}"' in HTML, name


@pytest.mark.skipif(not shutil.which("node"), reason="needs node to parse the page's script")
def test_the_script_parses(tmp_path):
    file = tmp_path / "page.js"
    file.write_text(HTML.split("<script>")[1].split("</script>")[0])
    done = subprocess.run(["node", "--check", file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_browser_gets_the_page_without_a_key_and_nothing_else():
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    with running(api_keys=("k",), loaded=False) as server:
        assert server.http.get("/", headers=browser).text == HTML  # while loading, too
        assert server.http.get("/").status_code == 401
        for path in ("/v1/models", "/metrics", "/openapi.json", "/load", "/x"):
            assert server.http.get(path, headers=browser).status_code == 401, path
        assert server.http.get("/", headers={"x-api-key": "k"}).text == HTML


# -- openapi -----------------------------------------------------------------------------------------------------------


def test_every_route_is_described(server):
    described = server.http.get("/openapi.json").json()
    assert described == document(ROUTES)
    for route in ROUTES:
        path = route.path.replace("{name:path}", "{name}")
        for method in route.methods - {"HEAD"}:
            operation = described["paths"][path][method.lower()]
            assert (method.lower(), path) in DESCRIBED, "a route without a description in openapi_schemas.py"
            assert operation["summary"]
            assert {"200", "401", "500"} <= set(operation["responses"])
    used = set(re.findall(r"#/components/schemas/(\w+)", server.http.get("/openapi.json").text))
    assert used == set(described["components"]["schemas"])
    ids = [operation["operationId"] for methods in described["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


# -- small routes ------------------------------------------------------------------------------------------------------


def test_ping_is_health():
    with running(loaded=False) as server:
        assert server.http.get("/ping").status_code == 503
        server.state.set_ready(server.served)
        assert server.http.post("/ping").json()["status"] == "ready"


def test_tokenizer_info_is_what_an_evaluation_harness_reads(server):
    info = server.http.get("/tokenizer_info").json()
    assert info["tokenizer_class"]
    assert (info["eos_token"], info["bos_token"]) == (tokenizer().eos_token, tokenizer().bos_token)
    assert info["chat_template"] == server.served.template.source
    assert info["model_max_length"] == server.engine.max_model_len
    for token_id, token in info["added_tokens_decoder"].items():
        assert tokenizer().added_tokens[token["content"]] == int(token_id)
        assert token["special"] == (int(token_id) in tokenizer().special_ids)


def test_tokenizer_info_can_be_switched_off():
    with running(tokenizer_info=False) as server:
        assert server.http.get("/tokenizer_info").status_code == 404


def test_tokenize_takes_what_chat_takes(server):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template_kwargs": {"enable_thinking": True},
        "return_token_strs": True,
    }
    reply = server.post("/tokenize", body).json()
    server.post("/v1/chat/completions", body)
    assert reply["tokens"] == list(server.engine.submitted[0].prompt)
    assert reply["token_strs"] == [tokenizer().token_string(i) for i in reply["tokens"]]
    assert tokenizer().added_tokens["<think>"] == reply["tokens"][-1]
    assert server.post("/tokenize", body | {"add_generation_prompt": False}).json()["count"] < reply["count"]


def test_tokenizing_names_the_model_as_strictly_as_other_routes():
    with running(strict_model=True) as server:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [65]})):
            assert server.post(path, body | {"model": "nope"}).json()["error"]["code"] == "model_not_found"
            assert server.post(path, body | {"model": "flint-test"}).is_success
