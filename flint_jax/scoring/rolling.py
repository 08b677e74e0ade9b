"""The rule for sequences longer than the model may read at once."""

from __future__ import annotations

from typing import NamedTuple

from flint_jax.errors import RequestError


class Window(NamedTuple):
    """Tokens begin .. end - 1 are read together; those from ``first`` on (index in the whole sequence) are scored."""

    begin: int
    first: int
    end: int


def windows(length: int, first: int, most: int, overlap: int = 1) -> list[Window]:
    """Windows that score tokens first .. length - 1 of a sequence, each once.

    most: tokens the model reads at once; as nothing is predicted from a window's last token, a window has up to
    ``most`` + 1. overlap: at least so many tokens of context for the first token that a later window scores. The rule:
    the first window begins at the beginning (or, when the context alone is too long, as late as ``overlap`` allows);
    every later one scores the next ``most`` - ``overlap`` + 1 tokens, and reads as many before them as fit. So the
    last window, which has fewer tokens to score, is moved back to be full.

    Raises RequestError for numbers out of range.
    """
    check_overlap(overlap, most)
    if not 1 <= first <= length:
        raise RequestError(f"first = {first!r:.60}: need 1 to {length}, the number of tokens", param="first")
    out: list[Window] = []
    at = first
    while at < length:
        reach = most + 1 if not out and first <= most else at + most - overlap + 1
        end = min(length, reach)
        out.append(Window(max(0, end - most - 1), at, end))
        at = end
    return out


def check_overlap(overlap: int, most: int) -> None:
    """Raise RequestError for an overlap that a window of ``most`` tokens cannot have."""
    if isinstance(overlap, bool) or not isinstance(overlap, int) or not 1 <= overlap <= most:
        raise RequestError(
            f"overlap = {overlap!r:.60}: need a whole number from 1 to {most}, the tokens read at once", param="overlap"
        )
