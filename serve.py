"""``python serve.py [MODEL]``: an OpenAI-compatible server for Flint. ``--help`` lists the flags."""

from flint_jax.server.launch import entry

if __name__ == "__main__":
    entry()
