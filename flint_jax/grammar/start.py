"""In which state the output begins: read from the rendered prompt, never assumed from the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flint_jax.grammar.lexer import State
from flint_jax.grammar.tags import CALL, END_THINK, THINK

_OTHERS = ("<|system|>", "<|user|>", "<|observation|>")
TURN_MARKS = ("<|assistant|>", *_OTHERS)


def start_state(prompt: str, turn_marks: Sequence[str] = TURN_MARKS) -> State:
    """REASONING when the prompt's last assistant turn ends inside an open ``<think>``, else CONTENT.

    turn_marks: what a turn begins with. Earlier turns and what users wrote do not count. In a prompt that has none of
    the marks turns cannot be told apart; there only a ``<think>`` at the very end can be trusted.
    """
    at, mark = max((prompt.rfind(mark), mark) for mark in turn_marks)
    if at < 0:
        opens = prompt.rstrip().endswith(THINK)
    else:
        turn = prompt[at + len(mark) :]
        opens = mark not in _OTHERS and turn.rfind(THINK) > max(turn.rfind(END_THINK), turn.rfind(CALL))
    return State.REASONING if opens else State.CONTENT


def thinking_enabled(template_kwargs: Mapping[str, Any]) -> bool:
    """Whether a request thinks: off when ``enable_thinking`` or ``thinking`` is false and neither is true."""
    given = [template_kwargs[name] for name in ("enable_thinking", "thinking") if name in template_kwargs]
    return True in given or False not in given
