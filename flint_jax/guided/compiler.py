"""From what a request wants its output held to, to a compiled grammar."""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from flint_jax.errors import RequestError
from flint_jax.grammar import State
from flint_jax.grammar.tags import CALL, END_THINK, THINK
from flint_jax.guided.calls import calls, one_call
from flint_jax.guided.constraint import Constraint
from flint_jax.guided.keywords import whole
from flint_jax.guided.terms import ANY, Rules, json_rule, one_of, reason
from flint_jax.guided.vocabulary import Vocabulary

MAX_GRAMMAR = 1 << 20  # characters of a compiled request; 3,000 alternatives of a schema are 200,000 and take 0.2 s
_KEPT = 64  # compiled grammars: an agent sends the same tools every turn
_ANY_OBJECT = {"type": "object"}


class Wish(Protocol):
    """What ``Compiler`` reads of a request; flint_jax.server.forced.Forced says what each field means."""

    tools: Any
    choice: Any
    parallel: bool
    format: Mapping[str, Any] | None
    structured: Any
    start: State
    thinking: bool


class Compiler:
    """Makes constraints for one vocabulary. Thread-safe; call it off the event loop."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._kept: collections.OrderedDict[str, Constraint] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, wish: Wish) -> Constraint | None:
        """What to hold the output to; None when it is free.

        Raises RequestError, naming the field, for a schema, pattern or grammar that does not compile or that cannot be
        enforced.
        """
        made = self.grammar(wish)
        if made is None:
            return None
        text, param = made
        if len(text) > MAX_GRAMMAR:
            raise RequestError(
                f"{param} makes a grammar of {len(text)} characters; at most {MAX_GRAMMAR} are compiled. Shorten it.",
                param=param,
                code="invalid_value",
            )
        with self._lock:
            found = self._kept.get(text)
            if found is not None:
                self._kept.move_to_end(text)
                return found
        made = Constraint(self._compile(text, param))
        with self._lock:
            self._kept[text] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made

    def grammar(self, wish: Wish) -> tuple[str, str] | None:
        """The grammar's text and the request's field it is for; None when the output is free."""
        rules = Rules(self._vocabulary.added)
        tools = [dict(t) for t in wish.choice.callable(wish.tools)]
        shape, side, param = _format(wish)
        if wish.choice.forces:
            return rules.text(
                _after_thought(rules, wish, _calls_alone(rules, tools, wish), implied=True)
            ), "tool_choice"
        if shape is not None:
            body = f"({_calls_alone(rules, tools, wish)}) | ({shape})" if tools else shape
            return _with_side(rules.text(_after_thought(rules, wish, body, implied=bool(tools))), side), param
        if any(t["function"].get("strict") is True for t in tools):
            return rules.text(_after_thought(rules, wish, _calls_in_text(rules, tools, wish), implied=True)), "tools"
        return None

    def _compile(self, text: str, param: str) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary.tokens, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # copies share what the first mask builds, up to 90 ms of work
        if matcher.is_error():
            raise RequestError(
                f"{param} cannot be compiled: {reason(matcher.get_error())}", param=param, code="invalid_value"
            )
        return matcher


def _calls_alone(rules: Rules, tools: list, wish: Wish) -> str:
    parallel = wish.parallel and wish.choice.name is None  # a named function is called once
    return rf"{rules.terminal(r'/\n{0,2}/')} {calls(rules, tools, parallel=parallel)}"


def _calls_in_text(rules: Rules, tools: list, wish: Wish) -> str:
    """Text with calls in it, of these tools only."""
    lead = f"{rules.until(CALL)} {one_call(rules, tools)}"
    body = ANY if rules.is_token(CALL) else rf"{ANY} & ~/(?s:.*){CALL}(?s:.*)/"
    text = rules.terminal(body)
    return f"({lead})* {text}" if wish.parallel else f"{text} | {lead}"


def _after_thought(rules: Rules, wish: Wish, body: str, *, implied: bool) -> str:
    """The rules wait for the end of a thought.

    implied: a call may end the thought, too. It is the same call as after the tag.
    """
    body = rules.rule(body)
    if not wish.thinking:
        return body
    rest = f"{rules.until(END_THINK)} {body}"
    if implied and rules.is_token(CALL) and rules.is_token(END_THINK):
        rest = f"{rules.terminal(ANY)} ({rules.tag(END_THINK)} {body} | {body})"
    if wish.start is State.REASONING:
        return rest
    return f"{rules.tag(THINK)} {rest} | {body}"


def _format(wish: Wish) -> tuple[str | None, str | None, str]:
    """(rule of the answer, grammar it refers to as @given, field); the rule is None when the answer is free."""
    if wish.format is not None and wish.structured is not None:
        raise RequestError(
            f"{wish.structured.param} and response_format are both there; need one of them",
            param=wish.structured.param,
            code="invalid_value",
        )
    if wish.format is not None:
        inner, param = wish.format.get("json_schema"), wish.format.get("param", "response_format")
        if inner is None:
            return json_rule(_ANY_OBJECT), None, param
        strict = inner.get("strict") is True
        try:
            return json_rule(whole(inner["schema"], "schema", strict=strict), lenient=not strict), None, param
        except RequestError as error:
            raise RequestError(f"{param}: {error}", param=param, code="invalid_value") from None
    if wish.structured is None:
        return None, None, ""
    given = wish.structured
    try:
        rule, side = _structured(given.kind, given.value)
    except RequestError as error:
        raise RequestError(f"{given.param}: {error}", param=given.param, code=error.code or "invalid_value") from None
    return rule, side, given.param


def _structured(kind: str, value: Any) -> tuple[str, str | None]:
    match kind:
        case "json":
            return json_rule(whole(_schema(value), "schema", strict=True)), None
        case "json_object":
            return json_rule(_ANY_OBJECT), None
        case "regex":
            if not isinstance(value, str):
                raise RequestError(f"the regex must be a string, got {value!r:.80}")
            return f"/{llguidance.regex_to_lark(value, 'd')}/", None
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
                raise RequestError("the choices must be a list of non-empty strings")
            return one_of(value), None
        case "grammar":
            if not isinstance(value, str) or not value.strip():
                raise RequestError(f"the grammar must be a string, got {value!r:.80}")
            try:
                return "@given", any_to_lark(value)
            except Exception as error:  # of a converter that promises no kind of error
                raise RequestError(f"the grammar is neither Lark nor GBNF: {error}") from None
    raise RequestError(f"{kind} is not supported; need json, json_object, regex, choice or grammar")


def _schema(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the schema is not JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise RequestError(f"the schema must be an object, got {value!r:.80}")
    return value


def _with_side(text: str, side: str | None) -> str:
    if side is None:
        return text
    return json.dumps({"grammars": [{"lark_grammar": text}, {"name": "given", "lark_grammar": side}]})
