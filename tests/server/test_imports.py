"""The HTTP layer never touches an array: it runs without jax being imported."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROBE = """
import sys
import flint_jax.server.launch
print(sorted(m for m in ("jax", "jaxlib", "flax", "numpy") if m in sys.modules))
"""


def test_the_server_starts_without_jax():
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_module_of_the_server_names_jax():
    for file in (ROOT / "flint_jax" / "server").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.partition(".")[0] in ("jax", "jaxlib", "flax", "numpy")], file.name
