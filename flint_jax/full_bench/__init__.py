"""``python -m flint_jax bench full``: the full-size model served by a process of its own, measured over HTTP.

The bench itself touches no device: the server has it.
"""
