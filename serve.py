"""``python serve.py [MODEL]``: an OpenAI-compatible server for Flint. ``--help`` lists the flags."""

import sys

from flint_jax.command_line import missing

if __name__ == "__main__":
    try:
        from flint_jax.server.launch import entry
    except ModuleNotFoundError as error:
        if (cure := missing(error)) is None:
            raise
        print(f"serve.py: error: {cure}", file=sys.stderr)
        raise SystemExit(2) from None
    entry()
