"""Per-head RMSNorm of q and k, RoPE, and the place in the cache where a token's k and v go.

There is no kernel of its own: decode attention does this in its prologue (``warp``), because every block that needs a
row's q can norm it in the shadow of the cache's arrival, and because the block that owns the token's position has k
and v in shared memory anyway. ``reference`` is the same in plain jnp.
"""
