"""Results as they were stored: read again, case by case."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Record = dict[str, Any]

CASE = ("suite", "graph", "model", "case", "order", "dtype", "width")
"""Columns that name a case, of which each benchmark has some."""


class Stored:
    """One JSON file that a benchmark wrote.

    Args:
        path: the file.

    Attributes:
        environment: names and values.
        rows: all rows, in their order.

    Raises:
        ValueError: the file is not one of a benchmark.
    """

    def __init__(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self.environment: dict[str, str] = found["environment"]
            self.rows: list[Record] = found["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path}: {what}; expected the JSON that a benchmark writes") from error
        self.path = path

    @property
    def columns(self) -> list[str]:
        """Those that name a case in this file, `suite` left out: a file has one."""
        return [name for name in CASE[1:] if any(row.get(name) is not None for row in self.rows)]

    def cases(self, by: Sequence[str] | None = None) -> dict[tuple[Any, ...], dict[str, Record]]:
        """The rows of each case by their names; cases by the given columns, or by all that name one."""
        found: dict[tuple[Any, ...], dict[str, Record]] = {}
        for row in self.rows:
            found.setdefault(tuple(row.get(name) for name in by or self.columns), {})[row["row"]] = row
        return found

    def by(self, column: str) -> dict[str, dict[str, Record]]:
        """The same by one column that tells the cases apart."""
        return {str(case): rows for (case,), rows in self.cases([column]).items()}


class Named(Protocol):
    """A row of a benchmark before it is measured."""

    @property
    def name(self) -> str:
        """Of the row, the same in all cases."""

    @property
    def is_ours(self) -> bool:
        """Whether gnncompile is measured."""


class Outcome(Protocol):
    """How a row went: a message unless its status is `ok`."""

    status: str
    message: str


def labelled(row: Named, outcome: Outcome, **case: Any) -> Record:
    """What each stored row begins with: the columns that name its case, its own name, how it went."""
    return {**case, "row": row.name, "ours": row.is_ours, "status": outcome.status, "message": outcome.message}


def best(rows: Mapping[str, Record], names: Sequence[str], column: str) -> float | None:
    """The least of a column over some rows; None if none has it."""
    values = [rows[name][column] for name in names if name in rows and rows[name].get(column) is not None]
    return min(values) if values else None
