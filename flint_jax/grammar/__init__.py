"""Thinking and tool calls in the output: from tokens to reasoning, content and typed calls, one token at a time."""

from flint_jax.grammar.deltas import (
    Call,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Delta,
    Message,
    Problem,
    Reasoning,
    collect,
    finish_reason,
    merged,
)
from flint_jax.grammar.lexer import Calls, Lexer, State
from flint_jax.grammar.start import start_state, thinking_enabled
from flint_jax.grammar.tags import Tags
from flint_jax.grammar.tools import Tool

__all__ = [
    "Call",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Calls",
    "Content",
    "Delta",
    "Lexer",
    "Message",
    "Problem",
    "Reasoning",
    "State",
    "Tags",
    "Tool",
    "collect",
    "finish_reason",
    "merged",
    "start_state",
    "thinking_enabled",
]
