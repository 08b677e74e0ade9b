"""Whole numbers of a command line, checked while it is parsed: before anything is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(low: int, high: int = (1 << 31) - 1, multiple: int = 1) -> Callable[[str], int]:
    """An argparse type: a whole number from ``low`` to ``high``, a multiple of ``multiple``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high or value % multiple:
            what = "a whole number" if multiple == 1 else f"a multiple of {multiple}"
            raise argparse.ArgumentTypeError(f"{text}: need {what} from {low} to {high}")
        return value

    return read


def wholes(low: int) -> Callable[[str], list[int]]:
    """An argparse type: whole numbers with commas between, each at least ``low``."""
    one = whole(low)
    return lambda text: [one(part) for part in text.split(",")]
