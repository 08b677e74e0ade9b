"""The lines of ``python -m flint_jax score``: from JSON to items, from scores to JSON."""

from __future__ import annotations

import json
import zlib
from typing import Any, NamedTuple

import numpy as np

from flint_jax.errors import FlintError, RequestError
from flint_jax.scoring.command import FORMS
from flint_jax.scoring.scorer import Item, Score, Scorer


class Record(NamedTuple):
    """One input line. id: the line's own "id", or None. item: what to score; error: why it cannot be."""

    line: int
    crc: str
    id: Any = None
    item: Item | None = None
    error: str | None = None


def checksum(raw: bytes) -> str:
    """CRC-32 of an input line without its end, 8 hex digits: ties an output record to its input."""
    return f"{zlib.crc32(raw.rstrip(b'\r\n')):08x}"


def parse(raw: bytes, line: int, scorer: Scorer, *, text_prefix: int | None = None, long: bool = False) -> Record:
    """An input line as a record; whatever is wrong with it is the record's ``error``."""
    crc, name = checksum(raw), None
    try:
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise RequestError(f"need an object, {FORMS}; got {type(fields).__name__}")
        name = fields.get("id")
        if name is not None and not isinstance(name, str | int):
            raise RequestError(f"id must be a string or a whole number, got {type(name).__name__}")
        return Record(line, crc, name, _item(fields, scorer, text_prefix, long))
    except FlintError as error:
        return Record(line, crc, name if isinstance(name, str | int) else None, error=str(error))


def _item(fields: dict, scorer: Scorer, text_prefix: int | None, long: bool) -> Item:
    has = {key for key in ("context", "continuation", "text") if key in fields}
    if has not in ({"context", "continuation"}, {"text"}):
        raise RequestError(f"need {FORMS}; got the keys {sorted(fields)!r:.100}")
    for key in has:
        if not isinstance(fields[key], str | list):
            raise RequestError(f"{key} must be a string or a list of token ids, got {type(fields[key]).__name__}")
    if "text" in has:
        return scorer.text_item(fields["text"], text_prefix, "the text")
    item = scorer.pair_item(fields["context"], fields["continuation"], "the pair")
    if not long and (error := scorer.too_long(item, "the pair")) is not None:
        raise error
    return item


def render(record: Record, score: Score | None, *, brief: bool = False) -> bytes:
    """One output line. A record with an error, or scores that are not numbers, becomes ``{"line", "error"}``."""
    out: dict[str, Any] = {"line": record.line}
    if record.id is not None:
        out["id"] = record.id
    error = record.error
    if error is None and not np.isfinite(score.logprobs).all():
        error = "the model gave scores that are not numbers; are its weights whole?"
    if error is not None:
        out["error"] = error
    else:
        tokens, first = record.item
        out |= {"sum": score.total, "greedy": score.is_greedy, "count": len(score.logprobs) - score.first}
        if not brief:
            logprobs = _short(score.logprobs)
            logprobs[: score.first] = [None] * score.first
            out |= {"tokens": tokens[first:].tolist(), "logprobs": logprobs, "greedy_tokens": score.greedy.tolist()}
            if score.top_ids.shape[1]:
                rows = zip(score.top_ids.tolist(), map(_short, score.top_logprobs), strict=True)
                out["top"] = [list(map(list, zip(*row, strict=True))) for row in rows]
                out["top"][: score.first] = [None] * score.first
    out["crc"] = record.crc
    return json.dumps(out, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _short(values: np.ndarray) -> list:
    """Nine digits name a float32 exactly."""
    return [float(f"{x:.9g}") for x in values.tolist()]
