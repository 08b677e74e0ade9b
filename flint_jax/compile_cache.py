"""XLA's persistent compilation cache: the second start on a machine skips most of the compiling.

Cached programs are code that this process will run, so the folder must belong to the user alone.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax

log = logging.getLogger("flint_jax")

VARIABLE = "FLINT_JAX_COMPILE_CACHE"


def folder() -> Path | None:
    """Where compiled programs are kept now; None for nowhere."""
    set_to = jax.config.jax_compilation_cache_dir
    return Path(set_to) if set_to else None


def enable(*, unless_set: bool = False) -> Path | None:
    """Turn the cache on; returns its folder. FLINT_JAX_COMPILE_CACHE names another folder, or is "off".

    unless_set: leave a folder that JAX's own configuration names as it is (for a library inside somebody's program).
    """
    if unless_set and folder() is not None:
        return folder()
    wanted = os.environ.get(VARIABLE, "")
    if wanted.lower() in ("off", "0", "none"):
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    where = Path(wanted) if wanted else base / "flint_jax" / "xla"
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        log.warning("no compilation cache: cannot make %s (%s); set %s to another folder", where, error, VARIABLE)
        return None
    jax.config.update("jax_compilation_cache_dir", str(where))
    # Every program, also those that take a tenth of a second: a start has dozens of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return where
