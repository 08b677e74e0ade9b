"""Token counts of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flint_jax.server.choices import Choice


def usage(
    prompt_lengths: Sequence[int], choices: Sequence[Choice], per_prompt: int, *, thoughts: bool
) -> dict[str, Any]:
    """``usage``: each prompt counts once, however many choices it has.

    choices: prompt by prompt, ``per_prompt`` each. thoughts: report reasoning tokens (chat).
    """
    prompt = sum(prompt_lengths)
    completion = sum(c.completion_tokens for c in choices)
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in choices[::per_prompt])},
    }
    if thoughts:
        counts["completion_tokens_details"] = {"reasoning_tokens": sum(c.reasoning_tokens for c in choices)}
    return counts


def prompt_progress(progress: Any) -> dict[str, int]:
    """How far a prompt is, in llama.cpp's shape: ``processed`` of ``total`` tokens, of which ``cache`` were there
    already; milliseconds since the request left the queue."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(1e3 * progress.seconds),
    }
