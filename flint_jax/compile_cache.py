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


def enable() -> Path | None:
    """Turn the cache on; returns its folder. FLINT_JAX_COMPILE_CACHE names another folder, or is "off"."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted.lower() in ("off", "0", "none"):
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = Path(wanted) if wanted else base / "flint_jax" / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        log.warning("no compilation cache: cannot make %s (%s); set %s to another folder", folder, error, VARIABLE)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Every program, also those that take a tenth of a second: a start has dozens of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder
