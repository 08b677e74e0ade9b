"""Compiled programs kept as they are, for the next start: no tracing, no lowering, no compiling.

JAX's own cache finds a program by its lowered text, and lowering the programs of a full-size model is a minute of
Python. Here a set of programs is found by what went into it: the sources of this package and its kernels, versions,
device, and what the caller names. Loading runs code of these files, so the folder must belong to the user alone (it
lies in the compile cache's). Whatever cannot be read is compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import jax
import jaxlib
from jax.experimental import serialize_executable

from pallas_kernels import device, selfcheck

log = logging.getLogger("flint_jax")

MOST = 6  # sets that are kept, the last ones used
_FORM = 1


class Kept:
    """One set of programs. identity: all that they depend on beside sources, versions and device, as text."""

    def __init__(self, folder: Path, identity: str):
        facts = (_FORM, _sources(), jax.__version__, jaxlib.__version__, *_device(), os.environ.get("XLA_FLAGS", ""))
        name = hashlib.sha256(repr((facts, identity)).encode()).hexdigest()[:32]
        self.folder = folder / name

    def load(self, name: str) -> jax.stages.Compiled | None:
        """A program, or None when it is not there or cannot be used."""
        path = self.folder / name
        try:
            payload, takes, gives = pickle.loads(path.read_bytes())
            trees = (jax.tree.structure(skeleton) for skeleton in (takes, gives))
            return serialize_executable.deserialize_and_load(payload, *trees)
        except FileNotFoundError:
            return None
        except Exception as error:
            log.warning("kept program %s cannot be used (%s); compiling it", path, str(error).split("\n")[0][:200])
            return None

    def save(self, name: str, program: jax.stages.Compiled) -> None:
        """Keep a program; a word in the log when that cannot be done."""
        try:
            payload, takes, gives = serialize_executable.serialize(program)
            # A tree's structure cannot be pickled, a tree can.
            skeletons = (tree.unflatten(range(tree.num_leaves)) for tree in (takes, gives))
            data = pickle.dumps((payload, *skeletons))
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                file.write(data)
            os.replace(file.name, self.folder / name)
        except Exception as error:
            log.info("program %s is not kept for the next start: %s", name, str(error).split("\n")[0][:200])

    def used(self) -> None:
        """This set was used; the oldest of too many go."""
        with contextlib.suppress(OSError):
            os.utime(self.folder)
            sets = sorted((f for f in self.folder.parent.iterdir() if f.is_dir()), key=lambda f: -f.stat().st_mtime)
            for old in sets[MOST:]:
                shutil.rmtree(old, ignore_errors=True)


def kept(identity: str) -> Kept | None:
    """The set of programs in JAX's compile cache folder; None where there is no such folder."""
    folder = jax.config.jax_compilation_cache_dir
    return Kept(Path(folder) / "programs", identity) if folder else None


def check_kernels() -> dict[str, str]:
    """On a kind of device that no kernel was measured on, compare each with its reference and switch off what is wrong
    (once; the outcome is kept beside the programs). Reasons by op."""
    if not selfcheck.needed():
        return {}
    log.info("no kernel was measured on %s: comparing each with its reference", device.current().kind)
    place = kept("kernel check")
    return selfcheck.run(None if place is None else place.folder.with_suffix(".json"))


def _device() -> tuple[str, ...]:
    first = jax.devices()[0]
    return first.platform, first.device_kind, first.client.platform_version, str(jax.device_count())


@functools.cache
def _sources() -> str:
    """A hash of every source file that a program can come from."""
    total = hashlib.sha256()
    for package in (Path(__file__).parent, Path(device.__file__).parent):
        for path in sorted(package.rglob("*")):
            if path.suffix in (".py", ".json"):
                total.update(str(path.name).encode() + path.read_bytes())
    return total.hexdigest()
