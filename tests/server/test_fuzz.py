"""A part of tests/server/fuzz.py's requests in every run; ``python -m tests.server.fuzz`` tries more."""

import httpx
import pytest

from flint_jax.server.openapi_schemas import COMPONENTS
from tests.server.fuzz import check, fits, fuzz


def test_made_up_requests_never_get_a_500(server):
    statuses = fuzz(server, 250)
    assert statuses.total() >= 250
    assert min(statuses[200], statuses[400]) > 40


def test_the_judge_is_strict():
    operation = {"responses": {"200": {"content": {"application/json": {"schema": COMPONENTS["Error"]}}}}}
    good = {"error": {"message": "m", "type": "t", "param": None, "code": None}}
    check(httpx.Response(200, json=good), operation)
    for response in (
        httpx.Response(500, json=good),
        httpx.Response(201, json=good),
        httpx.Response(200, text="x"),
        httpx.Response(200, json={"error": {}}),
        httpx.Response(200, json={"error": good["error"] | {"message": 3}}),
    ):
        with pytest.raises(AssertionError):
            check(response, operation)
    for value, schema in ((3, {"type": "string"}), ("x", {"enum": ["y"]}), ([1, "a"], {"items": {"type": "integer"}})):
        with pytest.raises(AssertionError):
            fits(value, schema)
