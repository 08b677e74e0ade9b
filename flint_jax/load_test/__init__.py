"""``python -m flint_jax bench serve``: bounded load on any OpenAI-compatible server, with a check of every chunk.

Standard library only; runs no model and imports no jax.
"""
