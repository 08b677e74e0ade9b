"""What a request wants its output held to: tools, a forced call, a response format.

This is only the wish, checked and in one form for all protocols. ``ServedModel.constrain`` turns it into the object
that the engine takes as ``submit(..., constraint=)``; a model that is served without it refuses what would need one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flint_jax.budget import Budget
from flint_jax.grammar import State, Tags
from flint_jax.grammar.tags import END_THINK
from flint_jax.server.body import Fields
from flint_jax.server.errors import bad_request
from flint_jax.server.state import ServedModel

# vLLM's fields for other formats, and the older names of its kinds
FIELDS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")

AUTO, NONE, REQUIRED, NAMED = "auto", "none", "required", "named"


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """Whether the model may or must call.

    mode: AUTO, NONE, REQUIRED or NAMED. name: of the function, when NAMED. allowed: names of the functions that may be
        called; None for all.
    """

    mode: str = NONE
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    def callable(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Those of the tools, in OpenAI's chat form, that may be called."""
        if self.mode == NONE:
            return ()
        names = (self.name,) if self.mode == NAMED else self.allowed
        return tuple(t for t in tools if names is None or t["function"]["name"] in names)

    @property
    def forces(self) -> bool:
        """Whether the reply must hold a call."""
        return self.mode in (REQUIRED, NAMED)


@dataclasses.dataclass(frozen=True)
class Structured:
    """vLLM's ``structured_outputs``. kind: one of KINDS; value: as it came; param: the field that had it."""

    kind: str
    value: Any
    param: str


@dataclasses.dataclass(frozen=True)
class Forced:
    """What the output of one request is held to.

    tools: definitions of the functions that may be called, ``{"function": {"name", "description", "parameters",
        "strict"}}`` each, as the request had them; () when none may be.
    choice: whether one of them must be called.
    parallel: whether more than one call may come.
    format: ``response_format`` other than text: ``{"type": "json_object"}`` or ``{"type": "json_schema",
        "json_schema": {"name", "schema", "strict"}}``; under "param" the caller's name of the field.
    structured: another format, under vLLM's fields.
    start: where the output begins; in REASONING the rules wait for the end of the thought.
    thinking: whether the model may think at all; if so a thought may also begin in CONTENT.
    budget: most tokens of the thoughts; None for no limit.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    format: Mapping[str, Any] | None = None
    structured: Structured | None = None
    start: State = State.CONTENT
    thinking: bool = True
    budget: int | None = None

    @property
    def must(self) -> str | None:
        """The request's field that cannot be served without a constraint, or None."""
        if self.choice.forces:
            return "tool_choice"
        if self.format is not None:
            return self.format.get("param", "response_format")
        return None if self.structured is None else self.structured.param


def read_format(fields: Fields) -> dict[str, Any] | None:
    """``response_format``, None for plain text. Raises ApiError for a kind that does not exist."""
    given = fields.object("response_format")
    kind = given.get("type") if given else "text"
    if kind == "text":
        return None
    if kind == "json_object" and not isinstance(given.get("schema"), dict):
        return {"type": kind}
    if kind == "json_object":  # llama.cpp's way to give a schema
        return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}
    if kind != "json_schema":
        raise fields.error("response_format", f"has the type {kind!r:.40}; need text, json_object or json_schema")
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict | bool):
        raise fields.error("response_format", "of type json_schema needs json_schema.schema, an object")
    return {"type": kind, "json_schema": inner}


def read_structured(fields: Fields) -> Structured | None:
    """``structured_outputs``, or the same under ``guided_json`` and its like. Raises ApiError for more than one."""
    given = fields.object("structured_outputs") or {}
    found = [Structured(k, given[k], FIELDS[0]) for k in KINDS if given.get(k) not in (None, False)]
    found += [
        Structured(name.removeprefix("guided_"), fields.raw(name), name) for name in FIELDS[1:] if fields.has(name)
    ]
    if len(found) > 1:
        raise fields.error(found[1].param, f"asks for {found[1].kind} besides {found[0].kind}; need one of them")
    return found[0] if found else None


def constraint(served: ServedModel, forced: Forced) -> Any:
    """What to give to the engine: None when the output is free.

    A budget has no effect on a vocabulary without a token for ``</think>``.

    Raises ApiError when it must not be free and this server cannot hold it; RequestError for a schema or pattern that
    does not compile.
    """
    held = _grammar(served, forced)
    if forced.budget is None or not forced.thinking:
        return held
    tags = {i: tag for i, tag in Tags.of(served.tokenizer.added_tokens).block.items() if i < served.vocab_size}
    return Budget(forced.budget, tags, forced.start, held) if END_THINK in tags.values() else held


def check_end_of_thought(held: Any, params: Any) -> None:
    """Raise ApiError when a budget may have to draw what the request forbids: ``</think>`` as a stop id, before
    ``min_tokens``. Nothing could be drawn then.

    held: what ``constraint`` made. params: SamplingParams.
    """
    if not isinstance(held, Budget) or held.ends or held.end_id not in params.stop_token_ids:
        return
    if params.min_tokens > held.limit:
        raise bad_request(
            f"stop_token_ids has {held.end_id}, the token of </think>, and min_tokens {params.min_tokens} forbids it "
            f"for longer than the thinking budget of {held.limit} tokens, after which nothing else may come; "
            f"need min_tokens of at most {held.limit}, or {held.end_id} left out of stop_token_ids",
            "stop_token_ids",
        )


def _grammar(served: ServedModel, forced: Forced) -> Any:
    if served.constrain is not None:
        return served.constrain(forced)
    if forced.must is not None:
        raise bad_request(
            f"{forced.must} asks for forced output, which this server cannot give; "
            "install llguidance (pip install 'flint-jax[serve]') and start it again",
            forced.must,
            "unsupported_parameter",
        )
    return None
