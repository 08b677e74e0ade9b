"""``python -m tests.server.fuzz --cases 2000``: requests made up from /openapi.json, right and wrong ones, fake engine.

No answer may be a 500, every answer must be one that the description names, in the shape that it gives; afterwards the
engine is idle and answers as before. Failing requests are shrunk to the smallest of their kind.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.server.harness import Server, running, wait_until

_SPELLINGS = [
    "",
    " ",
    "hi",
    "auto",
    "<think>",
    "</think>",
    "<tool_call>f",
    "<|user|>",
    "é🦜\u0000",
    "\ud83e",
    "x" * 5000,
]
_TEXT = st.one_of(st.sampled_from(_SPELLINGS), st.text(max_size=8))
_NUMBERS = st.one_of(
    st.integers(-3, 600), st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, 1e-320])
)
_ATOMS = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXT)
_ANYTHING = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXT, inner, max_size=3)),
    max_leaves=6,
)
_RAW = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(
        [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a":NaN}', b"[" * 5000, b'{"prompt":"\\ud800"}']
    ),
)
# sizes that only take time, and are tested elsewhere
_SMALL = {"n": st.integers(1, 4), "max_tokens": st.integers(0, 40), "max_output_tokens": st.integers(1, 40)}


class Shapes:
    """Strategies for the schemas of one description."""

    def __init__(self, document: dict[str, Any]):
        self._components = document["components"]["schemas"]

    def of(self, schema: dict[str, Any]) -> st.SearchStrategy:
        """Values that fit ``schema``."""
        if "$ref" in schema:
            return st.deferred(lambda: self.of(self._components[schema["$ref"].rpartition("/")[2]]))
        if "anyOf" in schema:
            return st.one_of([self.of(s) for s in schema["anyOf"]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "const" in schema:
            return st.just(schema["const"])
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return st.one_of([self.of({**schema, "type": kind}) for kind in kinds])
        return getattr(self, f"_{kinds}", lambda s: _ANYTHING)(schema)

    def _null(self, schema) -> st.SearchStrategy:
        return st.none()

    def _boolean(self, schema) -> st.SearchStrategy:
        return st.booleans()

    def _integer(self, schema) -> st.SearchStrategy:
        low, high = schema.get("minimum", -5), schema.get("maximum", 600)
        return st.integers(int(low), int(max(low, min(high, 600))))

    def _number(self, schema) -> st.SearchStrategy:
        return st.floats(schema.get("minimum", -5), schema.get("maximum", 5), allow_nan=False)

    def _string(self, schema) -> st.SearchStrategy:
        return _TEXT.filter(lambda text: len(text) >= schema.get("minLength", 0))

    def _array(self, schema) -> st.SearchStrategy:
        return st.lists(self.of(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=3)

    def _object(self, schema) -> st.SearchStrategy:
        fields = {name: _SMALL.get(name, self.of(s)) for name, s in schema.get("properties", {}).items()}
        if not fields:
            extra = schema.get("additionalProperties")
            return st.dictionaries(_TEXT, self.of(extra) if isinstance(extra, dict) else _ANYTHING, max_size=3)
        required = set(schema.get("required", []))
        must = {name: s for name, s in fields.items() if name in required}

        @st.composite
        def some(draw):
            # few of the optional fields at a time: most errors hide the fields behind them
            rest = sorted(set(fields) - required)
            chosen = draw(st.lists(st.sampled_from(rest), max_size=4, unique=True)) if rest else []
            return draw(st.fixed_dictionaries(must | {name: fields[name] for name in chosen}))

        return some()


@st.composite
def spoilt(draw, good: st.SearchStrategy) -> Any:
    """A value of ``good`` with something in it replaced or taken away."""
    value = draw(good)
    at = value
    for _ in range(draw(st.integers(0, 3))):
        inside = at if isinstance(at, dict) else dict(enumerate(at)) if isinstance(at, list) else {}
        inner = [k for k, v in inside.items() if isinstance(v, dict | list) and v]
        if not inner:
            break
        at = at[draw(st.sampled_from(inner))]
    if not isinstance(at, dict | list) or not at:
        return draw(_ANYTHING)
    key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else list(range(len(at)))))
    if draw(st.booleans()) and isinstance(at, dict):
        del at[key]
    else:
        at[key] = draw(_ANYTHING)
    return value


@st.composite
def cases(draw, document: dict[str, Any]) -> dict[str, Any]:
    """A request: method, path, content, and the operation that describes it (None for none)."""
    shapes = Shapes(document)
    paths = document["paths"]
    posts = [(path, "post") for path in paths if "requestBody" in paths[path].get("post", {})]
    every = [(path, method) for path in paths for method in paths[path]]
    path, method = draw(st.one_of(st.sampled_from(posts), st.sampled_from(posts), st.sampled_from(every)))
    operation = paths[path][method]
    url = re.sub(
        r"\{\w+\}", lambda _: draw(st.sampled_from(["flint-test", "alias/two", "nope", "%00", "a/../b"])), path
    )
    content = None
    if "requestBody" in operation:
        good = shapes.of(operation["requestBody"]["content"]["application/json"]["schema"])
        kind = draw(st.sampled_from(["good", "good", "spoilt", "spoilt", "raw", "anything"]))
        if kind == "raw":
            content = draw(_RAW)
        else:
            value = draw({"good": good, "spoilt": spoilt(good), "anything": _ANYTHING}[kind])
            content = json.dumps(value).encode()
    headers = draw(st.sampled_from([{}, {"content-type": "application/json"}, {"content-type": "text/plain"}]))
    return {"method": method.upper(), "url": url, "content": content, "headers": headers, "operation": operation}


def check(response: httpx.Response, operation: dict[str, Any]) -> None:
    """Whether the answer is one that the description knows."""
    status = str(response.status_code)
    assert status != "500", response.text
    assert status in operation["responses"], f"{status} is not described: {response.text[:300]}"
    kind = response.headers["content-type"].partition(";")[0]
    described = operation["responses"][status]["content"]
    assert kind in described, f"{status} came as {kind}"
    if kind == "application/json":
        fits(response.json(), described[kind]["schema"])
    if kind == "text/event-stream":
        for block in response.text.rstrip("\n").split("\n\n"):
            data = block.partition("data: ")[2]
            if data.startswith('{"error"') or '"type":"error"' in data[:40]:
                raise AssertionError(f"the stream ends with {data}")


def fits(value: Any, schema: dict[str, Any], components: dict[str, Any] | None = None) -> None:
    """The part of JSON schema that our descriptions of answers use."""
    from flint_jax.server.openapi_schemas import COMPONENTS

    if "$ref" in schema:
        return fits(value, COMPONENTS[schema["$ref"].rpartition("/")[2]])
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": int | float, "null": type(None)}
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    assert not wanted or any(isinstance(value, kinds[k]) for k in wanted), f"{value!r:.200} is no {wanted}"
    assert "enum" not in schema or value in schema["enum"], f"{value!r:.200} is none of {schema['enum']}"
    assert "const" not in schema or value == schema["const"], f"{value!r:.200} is not {schema['const']!r}"
    if isinstance(value, dict):
        assert set(schema.get("required", [])) <= set(value), f"{sorted(value)} lacks some of {schema['required']}"
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                fits(value[name], inner)
    if isinstance(value, list) and "items" in schema:
        for item in value:
            fits(item, schema["items"])
    return None


def fuzz(server: Server, count: int, number: int = 0) -> collections.Counter[int]:
    """Try ``count`` requests; returns how many got which status. The same ``number`` gives the same requests."""
    document = server.http.get("/openapi.json").json()
    statuses: collections.Counter[int] = collections.Counter()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(cases(document))
    def one(case):
        response = server.http.request(case["method"], case["url"], content=case["content"], headers=case["headers"])
        statuses[response.status_code] += 1
        check(response, case["operation"])

    one()
    wait_until(server.engine.idle)
    wait_until(lambda: not server.state.jobs)
    assert server.chat().is_success
    return statuses


def main() -> None:
    """Fuzz a server of our own."""
    parser = argparse.ArgumentParser(prog="python -m tests.server.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with running() as server:
        server.http.timeout = httpx.Timeout(60)
        statuses = fuzz(server, args.cases, args.seed)
    print(f"{statuses.total()} requests, no 500 and nothing that /openapi.json does not describe: {dict(statuses)}")


if __name__ == "__main__":
    main()
