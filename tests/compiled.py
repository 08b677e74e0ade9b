"""Programs compiled for a GPU that is not here, in a process of their own: what they print."""

import os
import subprocess
import sys


def printed(program: str, timeout: float = 500) -> str:
    """Standard output of a Python program that calls ``aot.compile_for``; JAX itself runs on the CPU there."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
