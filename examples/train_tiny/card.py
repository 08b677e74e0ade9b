"""The tables of docs/tiny.md, from the evaluations that are kept beside this file.

    python -m flint_jax eval --sampling both --items 100 --output examples/train_tiny/scores/bf16.json
    python -m examples.train_tiny.card

writes them. Scores without a file are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flint_jax.evals.suite import Row

CARD = Path(__file__).parents[2] / "docs" / "tiny.md"
SCORES = Path(__file__).parent / "scores"
COLUMNS = {"bf16": "BF16", "nvfp4": "NVFP4", "bf16-transformers": "BF16, transformers numerics"}
WINDOW = 129  # look-ups from further away go through the full layers
_PLACE = re.compile(r"(<!-- scores: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Tables = Mapping[str, Mapping[tuple[str, str], Row]]  # column -> (family, detail) -> row


def read(mode: str, folder: Path = SCORES) -> Tables:
    """The tables of one way of sampling, of every column that has a file.

    Rows of ``arithmetic-NAME.json``, where a family is asked more often, take the place of those in ``NAME.json``.
    """
    found = {name: _rows(mode, folder / f"{name}.json") for name in COLUMNS}
    return {name: rows | _rows(mode, folder / f"arithmetic-{name}.json") for name, rows in found.items() if rows}


def _rows(mode: str, path: Path) -> dict[tuple[str, str], Row]:
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8")).get(mode, {"rows": []})["rows"]
    return {(row["family"], row["detail"]): _row(row) for row in rows}


def _row(data: Mapping[str, Any]) -> Row:
    return Row(*(data[field.name] for field in dataclasses.fields(Row)))


def details(tables: Tables) -> str:
    """Every row: exact replies of each column, and the share that is well formed as the last line."""
    rows = list(dict.fromkeys(key for table in tables.values() for key in table))
    lines = [_cells("family", "detail", "items", *map(COLUMNS.get, tables)), "| --- " * (3 + len(tables)) + "|"]
    for key in rows:
        items = next(table[key].items for table in tables.values() if key in table)
        shares = (f"{100 * table[key].accuracy:.1f} %" if key in table else "" for table in tables.values())
        lines.append(_cells(*key, items, *shares))
    total = sum(row.items for row in _single(next(iter(tables.values()))))
    lines.append(_cells("format", "all", total, *(f"{100 * formed(table):.1f} %" for table in tables.values())))
    wanted = sum(row.asked_to_think for row in _single(next(iter(tables.values()))))
    if wanted:
        lines.append(
            _cells("thoughts", "of those asked for", wanted, *(f"{100 * thought(t):.1f} %" for t in tables.values()))
        )
    return "\n".join(lines)


def bars(greedy: Tables, default: Tables) -> str:
    """What was asked of the model, and what came out: greedy, then at the checkpoint's own sampling."""
    asked = {
        "tool calls exact, at least 95 %": lambda t: share(t, "tools"),
        "look-up beyond the window, at least 95 %": lambda t: share(t, "look-up", beyond=WINDOW),
        "arithmetic, at least 95 %": lambda t: share(t, "arithmetic"),
        "format, at least 99 %": formed,
    }
    tables = [*greedy.values(), *default.values()]
    titles = [*map(COLUMNS.get, greedy), *(f"{COLUMNS[name]}, default sampling" for name in default)]
    lines = [_cells("bar", *titles), "| --- " * (1 + len(tables)) + "|"]
    for bar, value in asked.items():
        lines.append(_cells(bar, *(f"{100 * value(table):.1f} %" for table in tables)))
    return "\n".join(lines)


def share(table: Mapping[tuple[str, str], Row], family: str, beyond: int = 0) -> float:
    """Exact replies of a family; of look-ups only those from more than ``beyond`` tokens back."""
    rows = [r for r in _single(table) if r.family == family]
    rows = [r for r in rows if not beyond or int(r.detail.split()[0]) > beyond]
    return sum(r.right for r in rows) / sum(r.items for r in rows)


def formed(table: Mapping[tuple[str, str], Row]) -> float:
    """Well-formed replies of all."""
    rows = _single(table)
    return sum(r.well_formed for r in rows) / sum(r.items for r in rows)


def thought(table: Mapping[tuple[str, str], Row]) -> float:
    """Replies with a thought, of those that were asked for one."""
    rows = _single(table)
    return sum(r.thought for r in rows) / max(sum(r.asked_to_think for r in rows), 1)


def _single(table: Mapping[tuple[str, str], Row]) -> list[Row]:
    return [row for row in table.values() if row.detail != "all"]


def _cells(*values: Any) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def filled(text: str, folder: Path = SCORES) -> str:
    """The card with its tables as the evaluations have them; places without evaluations stay as they are."""

    def fill(place: re.Match) -> str:
        what = place[2]
        tables = read("greedy" if what == "bars" else what, folder)
        if not tables:
            return place[0]
        made = bars(tables, read("default", folder)) if what == "bars" else details(tables)
        return f"{place[1]}\n{made}\n\n{place[3]}"

    return _PLACE.sub(fill, text)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    CARD.write_text(filled(CARD.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
