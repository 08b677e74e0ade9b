"""Files and folders that take their name when they are whole, and are called NAME.partial until then.

What a killed or failed attempt has left is known by its first bytes (a file) or by a mark inside (a folder), and the
next attempt writes over it. Anything else of that name is left alone and refused, and so is what another process is
writing at the moment: it holds a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flint_jax.errors import CheckpointError

log = logging.getLogger("flint_jax")

SUFFIX = ".partial"
BEGINNING = b"flint_jax partial"  # of a file, until its header takes the place
MARK = ".flint_jax.partial"  # in a folder


@contextlib.contextmanager
def new_file(path: Path, *, replace: bool) -> Iterator[BinaryIO]:
    """A file to write, which takes the name ``path`` at the end of the block; its first bytes are to be written last.

    replace: whether ``path`` may exist then. Raises CheckpointError for a .partial that is not ours, or in use.
    """
    part = path.with_name(path.name + SUFFIX)
    refuse_foreign(path, folder=False)
    with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        _lock(file, part)
        if file.read(1):
            log.info("%s: left by an interrupted save, written anew", part)
        file.seek(0)
        file.truncate(0)
        file.write(BEGINNING)
        file.flush()
        yield file
        file.flush()
        if not replace:
            refuse_existing(path, part)
        part.replace(path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which takes the name ``path`` at the end of the block and not before.

    Raises CheckpointError for a .partial that is not ours, or in use, and when ``path`` has appeared meanwhile.
    """
    part = path.with_name(path.name + SUFFIX)
    refuse_foreign(path, folder=True)
    part.mkdir(parents=True, exist_ok=True)
    with open(part / MARK, "ab") as mark:
        _lock(mark, part)
        for left in [child for child in part.iterdir() if child.name != MARK]:
            log.info("%s: left by an interrupted save, removed", left)
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield part
        refuse_existing(path, part)
        part.rename(path)
        (path / MARK).unlink()


def refuse_existing(path: Path, part: Path | None = None) -> None:
    """Raise CheckpointError when ``path`` exists. part: what has been written meanwhile and stays."""
    if os.path.lexists(path):
        kept = f" What has been written is in {part}." if part is not None else ""
        raise CheckpointError(f"{path}: exists already; remove it, or give another path.{kept}")


def refuse_foreign(path: Path, *, folder: bool) -> None:
    """Raise CheckpointError when the .partial of ``path`` is nothing that a save of such a file or folder has left.

    An empty one is taken for ours: nothing is lost with it.
    """
    part = path.with_name(path.name + SUFFIX)
    if not os.path.lexists(part):
        return
    if folder:
        ours = part.is_dir() and not part.is_symlink() and ((part / MARK).is_file() or not any(part.iterdir()))
    else:
        ours = part.is_file() and BEGINNING.startswith(_first(part))
    if not ours:
        raise CheckpointError(
            f"{part} is in the way: it exists, and is not what an interrupted save of this kind leaves. It was left as "
            "it is; move it, or give another path"
        )


def _first(part: Path) -> bytes:
    with open(part, "rb") as file:
        return file.read(len(BEGINNING))


def _lock(file: BinaryIO, part: Path) -> None:
    """Until the file is closed, or the process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(f"another process is writing {part}; wait for it, or give another path") from None
    except OSError:
        pass  # a file system without locks
