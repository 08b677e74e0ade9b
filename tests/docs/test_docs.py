"""The documents' code, run as a reader would: in order, in an empty folder that holds a small ``flint.gguf``.

Blocks of a document share their names. ``python`` blocks run as they are; in ``sh`` blocks, lines that begin with
``python -m flint_jax`` run through the command line's own entry, ``#`` lines are comments, and nothing else is allowed:
commands that CI cannot run belong into blocks of another name (``text``).
"""

import re
import shlex
from pathlib import Path

import pytest

from flint_jax.__main__ import main
from loaders.synthetic import preset, write_gguf

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [name for name in ("library.md", "scoring.md", "research.md") if (DOCS / name).exists()]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text):
    """(kind, first line's number, code) of each fenced block."""
    return [(m[1], text.count("\n", 0, m.start(2)) + 1, m[2]) for m in BLOCK.finditer(text)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A four-layer Flint with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("model") / "flint.gguf"
    write_gguf(path, preset("tiny", 4))
    return path


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    (tmp_path / "flint.gguf").symlink_to(checkpoint)
    names = {"__name__": "__main__"}
    ran = 0
    for kind, line, code in blocks((DOCS / page).read_text()):
        if kind == "python":
            # Padding makes a traceback point at the document's own line.
            exec(compile("\n" * (line - 1) + code, str(DOCS / page), "exec"), names)
            ran += 1
        elif kind == "sh":
            for command in code.replace("\\\n", " ").splitlines():
                words = shlex.split(command, comments=True)
                if words:
                    assert words[:3] == ["python", "-m", "flint_jax"], command
                    assert main(words[3:]) == 0, command
                    ran += 1
    assert ran >= 3


def test_blocks_are_found():
    text = "a\n```python\nx = 1\n```\n\n```text\nno\n```\n"
    assert blocks(text) == [("python", 3, "x = 1\n"), ("text", 7, "no\n")]
