"""What a request wants its output held to: tools, a forced call, a response format.

This is only the wish, checked and in one form for all protocols. ``ServedModel.constrain`` turns it into the object
that the engine takes as ``submit(..., constraint=)``; a model that is served without it refuses what would need one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flint_jax.grammar import State
from flint_jax.server.errors import bad_request
from flint_jax.server.state import ServedModel

AUTO, NONE, REQUIRED, NAMED = "auto", "none", "required", "named"


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """Whether the model may or must call. mode: AUTO, NONE, REQUIRED or NAMED; name: of the function, when NAMED."""

    mode: str = NONE
    name: str | None = None

    @property
    def forces(self) -> bool:
        """Whether the reply must hold a call."""
        return self.mode in (REQUIRED, NAMED)


@dataclasses.dataclass(frozen=True)
class Forced:
    """What the output of one request is held to.

    tools: definitions of the functions that may be called, ``{"name", "description", "parameters", "strict"}`` each,
        as the request had them; () when none may be.
    choice: whether one of them must be called.
    parallel: whether more than one call may come.
    format: ``response_format`` other than text: ``{"type": "json_object"}`` or ``{"type": "json_schema",
        "json_schema": {"name", "schema", "strict"}}``.
    structured: vLLM's ``structured_outputs``: one of ``json``, ``json_object``, ``regex``, ``choice``, ``grammar``,
        ``structural_tag`` with its value.
    start: where the output begins; in REASONING the rules wait for the end of the thought.
    thinking: whether the model may think at all; if so a thought may also begin in CONTENT.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    format: Mapping[str, Any] | None = None
    structured: Mapping[str, Any] | None = None
    start: State = State.CONTENT
    thinking: bool = True

    @property
    def must(self) -> str | None:
        """The request's field that cannot be served without a constraint, or None."""
        if self.choice.forces:
            return "tool_choice"
        if self.format is not None:
            return "response_format"
        return "structured_outputs" if self.structured is not None else None


def constraint(served: ServedModel, forced: Forced) -> Any:
    """What to give to the engine: None when the output is free.

    Raises ApiError when it must not be free and this server cannot hold it; RequestError for a schema or pattern that
    does not compile.
    """
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
