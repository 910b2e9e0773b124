"""Reads stored results, case by case."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Record = dict[str, Any]

CASE = ("suite", "graph", "model", "case", "shape", "product", "order", "dtype", "width", "clients")
"""Columns that name a case; each benchmark has some of them."""


class Stored:
    """One JSON file that a benchmark wrote.

    Args:
        path: the path of the file.

    Attributes:
        environment: the facts of the environment, by name.
        rows: all rows, in their stored order.

    Raises:
        ValueError: the file was not written by a benchmark.
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
        """The columns that name a case in this file, except `suite`: a file has a single suite."""
        return [name for name in CASE[1:] if any(row.get(name) is not None for row in self.rows)]

    def cases(self, by: Sequence[str] | None = None) -> dict[tuple[Any, ...], dict[str, Record]]:
        """Returns the rows of each case by their names. The key of a case is its values in the columns `by`, or in all
        `columns`.
        """
        found: dict[tuple[Any, ...], dict[str, Record]] = {}
        for row in self.rows:
            found.setdefault(tuple(row.get(name) for name in by or self.columns), {})[row["row"]] = row
        return found

    def by(self, column: str) -> dict[str, dict[str, Record]]:
        """Returns the rows of each case, as `cases` does, if a single column tells the cases apart."""
        return {str(case): rows for (case,), rows in self.cases([column]).items()}


class Named(Protocol):
    """A row of a benchmark before it is measured."""

    @property
    def name(self) -> str:
        """The name of the row, the same in all cases."""

    @property
    def is_ours(self) -> bool:
        """Whether the row measures gnncompile."""


class Outcome(Protocol):
    """The outcome of a row: it has a message unless its status is `ok`."""

    status: str
    message: str


def labelled(row: Named, outcome: Outcome, **case: Any) -> Record:
    """Returns the first columns of a stored row: those that name its case, its own name, and its outcome."""
    return {**case, "row": row.name, "ours": row.is_ours, "status": outcome.status, "message": outcome.message}


def best(rows: Mapping[str, Record], names: Sequence[str], column: str) -> float | None:
    """Returns the least value of a column over the named rows; None if no row has one."""
    values = [rows[name][column] for name in names if name in rows and rows[name].get(column) is not None]
    return min(values) if values else None
