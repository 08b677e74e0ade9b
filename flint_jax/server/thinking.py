"""The thinking switch: what a request says about it under any client's name, and a way to enforce it.

Templates differ in what they take, and some take no notice: so when thinking is off and the prompt does not say so
itself, an empty thought is closed at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flint_jax.chat import ChatPrompt
from flint_jax.grammar import State, start_state, thinking_enabled
from flint_jax.server.body import Fields, kind_of

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_END, _EMPTY = "</think>", "<think></think>"
_BUDGETS = {"thinking": "budget_tokens", "reasoning": "max_tokens"}  # objects that may name a budget, and how


def switch(on: bool) -> dict[str, Any]:
    """Template arguments that switch thinking on or off, under both names that templates use."""
    return {"enable_thinking": on, "thinking": on}


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Template arguments from the general to the particular: what a later layer says of thinking replaces all that
    earlier ones do, under whichever name. Once there is a word about it, it is there under both names.
    """
    out: dict[str, Any] = {}
    for layer in layers:
        if any(name in layer for name in switch(True)):
            out = {name: value for name, value in out.items() if name not in switch(True)}
        out |= layer
    return out | switch(thinking_enabled(out)) if any(name in out for name in switch(True)) else out


def effort_kwargs(fields: Fields, name: str) -> dict[str, Any]:
    """Template arguments for an effort; "none" switches thinking off, any other on."""
    effort = fields.string(name)
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise fields.error(name, f"is {effort!r:.40}; need one of {', '.join(EFFORTS)}")
    return {"reasoning_effort": effort} | switch(effort != "none")


def reasoning_kwargs(fields: Fields) -> dict[str, Any]:
    """The same for ``reasoning: {"effort", "enabled"}``."""
    given = fields.object("reasoning")
    if given is None:
        return {}
    options = Fields(given, prefix="reasoning.")
    kwargs = effort_kwargs(options, "effort")
    return kwargs | switch(options.boolean("enabled")) if options.has("enabled") else kwargs


def type_kwargs(fields: Fields) -> dict[str, Any]:
    """The same for ``thinking: {"type": "enabled" | "adaptive" | "disabled"}``, or true and false."""
    given = fields.raw("thinking")
    if given is None:
        return {}
    if isinstance(given, bool):
        return switch(given)
    if not isinstance(given, dict):
        raise fields.error("thinking", f"is {kind_of(given)}; need an object with a type", "invalid_type")
    kind = Fields(given, prefix="thinking.").string("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise fields.error("thinking.type", f"is {kind!r:.40}; need enabled, adaptive or disabled")
    return {} if kind == "adaptive" else switch(kind == "enabled")


def chat_kwargs(fields: Fields) -> dict[str, Any]:
    """Template arguments of a chat completion: from the fields that clients use, and the template's own."""
    own = fields.object("chat_template_kwargs") or {}
    plain = switch(fields.boolean("enable_thinking")) if fields.has("enable_thinking") else {}
    effort = effort_kwargs(fields, "reasoning_effort")
    return layered(reasoning_kwargs(fields), type_kwargs(fields), plain, effort, own)


def read_budget(fields: Fields, *objects: str) -> int | None:
    """Most tokens that the request lets its thoughts have, None for no limit; of several the smallest.

    Read from vLLM's ``thinking_token_budget`` and from ``objects``, of ``thinking`` and ``reasoning`` those that the
    protocol has. Raises ApiError unless it is a whole number from 0 on.
    """
    found = [fields.integer("thinking_token_budget", None, 0)]
    for name in objects:
        given = fields.raw(name)
        if isinstance(given, dict):
            found.append(Fields(given, prefix=f"{name}.").integer(_BUDGETS[name], None, 0))
    return min((n for n in found if n is not None), default=None)


def close_thought(tokenizer: Any, template: Any, prompt: ChatPrompt, *, begins_turn: bool) -> ChatPrompt:
    """The prompt of a request that does not think: with an open thought closed, or an empty one added.

    begins_turn: the prompt ends with the template's generation prompt, so what follows is the beginning of a turn.
    """
    if start_state(prompt.text) is State.REASONING:
        missing = _END
    elif begins_turn and not template.has_thinking_switch and _END in tokenizer.added_tokens:
        missing = _EMPTY
    else:
        return prompt
    return ChatPrompt(prompt.text + missing, prompt.ids + tokenizer.encode(missing))
