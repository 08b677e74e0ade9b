"""Scoring a file of lines into a file of lines: streamed, in order, resumable.

Output records are in input order, one for each line that is not blank, and carry the line's number and checksum. So
the output itself says how far a killed run came: a torn last line is cut off, and scoring goes on behind the last whole
one.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from flint_jax.errors import FlintError
from flint_jax.scoring import records
from flint_jax.scoring.records import Record
from flint_jax.scoring.scorer import Scorer

LINES, TOKENS = 1024, 1 << 20  # of one batch, at most: what a kill can cost, and what memory holds
LONGEST = 1 << 28  # bytes of a line
BEGINNING = b'{"line": '  # of every record


class ScoringError(FlintError, ValueError):
    """A file cannot be scored; says which line, what is wrong and what to do."""


def score_file(
    scorer: Scorer,
    source: Path,
    target: Path,
    *,
    stop_on_error: bool = True,
    overwrite: bool = False,
    text_prefix: int | None = None,
    long: bool = False,
    brief: bool = False,
    lines: int = LINES,
    progress: bool = True,
) -> list[int]:
    """Score ``source`` into ``target``, going on where ``target`` ends; numbers of the bad lines met.

    stop_on_error: a bad line ends the run, after everything before it was written (mend it and run again: the run goes
    on there); otherwise it becomes a record with "error". overwrite: begin anew. text_prefix, long: see ``records``.

    Raises ScoringError for a bad line, for a target of another source, and when another process writes the target;
    OSError for files that cannot be read or written.
    """
    bad: list[int] = []
    check_files(source, target, overwrite=overwrite)
    with open(source, "rb") as inp, open(target, "ab+") as out:
        _lock(out, target)
        if overwrite:
            out.truncate(0)
        done, crc, end = _done(out, target)
        out.truncate(end)  # a torn last line; only now: somebody else's file stays as it was
        size = os.fstat(inp.fileno()).st_size
        batch: list[Record] = []
        tokens = number = 0
        with tqdm(total=size, unit="B", unit_scale=True, desc="score", disable=not progress) as bar:
            for number, raw in enumerate(iter(lambda: inp.readline(LONGEST), b""), start=1):
                whole = _skip_rest(inp, raw)
                bar.update(inp.tell() - bar.n)
                if number == done and records.checksum(raw) != crc:
                    raise ScoringError(
                        f"{target} was not made from {source}: line {number} differs. Give another output, or "
                        "--overwrite."
                    )
                if number <= done or not raw.strip():
                    continue
                if whole:
                    record = records.parse(raw, number, scorer, text_prefix=text_prefix, long=long)
                else:
                    record = Record(number, records.checksum(raw), error=f"longer than {LONGEST} bytes")
                if record.error is not None:
                    bad.append(number)
                    if stop_on_error:
                        _write(out, scorer, batch, brief)
                        raise ScoringError(
                            f"{source}, line {number}: {record.error} (mend it and run again to go on from here, or "
                            "--on-error skip)"
                        )
                batch.append(record)
                tokens += 0 if record.item is None else len(record.item[0])
                if len(batch) >= lines or tokens >= TOKENS:
                    _write(out, scorer, batch, brief)
                    batch, tokens = [], 0
        if number < done:
            raise ScoringError(
                f"{target} holds line {done}, but {source} has only {number}. Give another output, or --overwrite."
            )
        _write(out, scorer, batch, brief)
    return bad


def _skip_rest(inp: BinaryIO, raw: bytes) -> bool:
    """Whether ``raw`` is a whole line; if not, move to its end."""
    if len(raw) < LONGEST or raw.endswith(b"\n"):
        return True
    while (more := inp.readline(LONGEST)) and not more.endswith(b"\n"):
        pass
    return False


def check_files(source: Path, target: Path, *, overwrite: bool = False) -> None:
    """Raise what ``score_file`` would raise about its two files, for the time before a model is loaded.

    Changes nothing. Not looked at: whether a target that can be continued was made from this source.
    """
    if source.exists() and not source.is_file():
        raise ScoringError(f"{source} is no ordinary file; the input must be one, to be read again after a kill")
    with open(source, "rb") as inp:
        if not target.exists():
            folder = target.resolve().parent
            if not folder.is_dir():
                raise ScoringError(f"{folder}: no such folder for the output {target.name}; make it first")
            if not os.access(folder, os.W_OK | os.X_OK):
                raise ScoringError(f"{folder}: no permission to write the output {target.name} there")
            return
        if not target.is_file():
            raise ScoringError(f"{target} is no ordinary file; the output must be one, so that a run can go on there")
        with open(target, "rb+") as out:
            if os.path.samestat(os.fstat(inp.fileno()), os.fstat(out.fileno())):
                raise ScoringError(f"{source} is the input and the output; give another output")
            _lock(out, target)
            if not overwrite:
                _done(out, target)


def _lock(out: BinaryIO, target: Path) -> None:
    """Until the file is closed."""
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ScoringError(f"another process is writing {target}; wait for it or give another output") from None


def _done(out: BinaryIO, target: Path) -> tuple[int, str | None, int]:
    """Number and checksum of the last whole record (0, None: begin), and where it ends."""
    last, end = _last_line(out)
    try:
        if last is None:  # nothing, or a first record that was torn
            out.seek(0)
            if not BEGINNING.startswith(out.read(len(BEGINNING))):
                raise ValueError
            return 0, None, end
        record = json.loads(last)
        return int(record["line"]), str(record["crc"]), end
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ScoringError(
            f"{target} exists and its last line is no record of a scoring run. Give another output, or --overwrite."
        ) from None


def _last_line(file: BinaryIO, piece: int = 1 << 16) -> tuple[bytes | None, int]:
    """The last line that has an end, and the offset behind it; (None, 0) without one. Reads from the back."""
    file.seek(0, os.SEEK_END)
    begin, tail = file.tell(), b""
    while True:
        end = tail.rfind(b"\n")
        before = tail.rfind(b"\n", 0, max(end, 0))
        if end >= 0 and (before >= 0 or begin == 0):
            return tail[before + 1 : end], begin + end + 1
        if begin == 0:
            return None, 0
        size = min(piece, begin)
        begin -= size
        file.seek(begin)
        tail = file.read(size) + tail
        piece *= 2


def _write(out: BinaryIO, scorer: Scorer, batch: list[Record], brief: bool) -> None:
    """Score a batch and append its records, all the way to the disk."""
    good = [r for r in batch if r.error is None]
    scores = iter(scorer.score_ids([r.item for r in good], long=True))
    for record in batch:
        out.write(records.render(record, None if record.error is not None else next(scores), brief=brief))
    out.flush()
    os.fsync(out.fileno())
