"""What the command lines share: a parser that says what may have been meant, and a word for extras that are missing."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

# Modules of the optional extras. module -> extra
_EXTRAS = {
    "huggingface_hub": "hub",
    "llguidance": "serve",
    "matplotlib": "research",
    "optax": "research",
    "orbax": "research",
    "prometheus_client": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "uvloop": "serve",
}


def missing(error: ModuleNotFoundError) -> str | None:
    """One line on how to install what an extra of this package would have brought; None for any other module."""
    module = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(module)
    return None if extra is None else f"{module} is not installed: pip install 'flint-jax[{extra}]'"


def near(given: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant: a near spelling, else the only one that it begins or that has its end."""
    known = sorted(set(known))
    found = difflib.get_close_matches(given, known, n=1, cutoff=0.7)
    if found:
        return found[0]
    bare = given.lstrip("-")
    ends = [k for k in known if len(bare) > 2 and (k.startswith(given) or k.lstrip("-").endswith(f"-{bare}"))]
    return ends[0] if len(ends) == 1 else None


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that asks back: did you mean ...?"""

    def parse_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        """As ever; an unknown flag is an error that names the one that was probably meant."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            flag = next((word for word in rest if word.startswith("-")), None)
            if flag is None:
                self.error(f"unexpected argument {rest[0]!r}; quote what contains spaces")
            name = flag.partition("=")[0]
            meant = near(name, self._flags(found))
            self.error(f"unknown flag {name}; " + (f"did you mean {meant}?" if meant else "see --help"))
        return found

    def _flags(self, found: argparse.Namespace) -> set[str]:
        """Flags of this parser, and of the command that was chosen."""
        known = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(getattr(found, action.dest, None))
                known |= chosen._flags(found) if isinstance(chosen, Parser) else set()
        return known

    def _check_value(self, action: argparse.Action, value) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            meant = near(str(value), action.choices)
            hint = f"did you mean {meant}?" if meant else f"need one of {', '.join(action.choices)}"
            self.error(f"there is no {value!r}; {hint}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """One line, and exit code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")
