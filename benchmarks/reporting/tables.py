"""Plain-text tables, and results as CSV and JSON."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligns rows under a header: the first `left` columns to the left, the others to the right."""
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"rows: got a row of {len(row)} cells, expected {len(header)} as in the header: {row}")
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


def header_lines(facts: Mapping[str, str]) -> str:
    """Returns the environment as lines of `name: value`."""
    width = max(len(name) for name in facts)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in facts.items())


class Results:
    """One JSON file (environment and rows) and one CSV file (rows), written again whenever there are more rows.

    Args:
        folder: the folder of the files; it is made if it does not exist.
        name: the name of both files, without extension.
        facts: the environment.
        key: columns that name a case. Cases of an earlier run on the same machine with the same versions stay in the
            files until they are measured again, so that a long list can be measured in several runs. Without a key
            the files hold a single run.
    """

    def __init__(self, folder: Path, name: str, facts: Mapping[str, str], key: Sequence[str] = ()) -> None:
        self.json_path, self.csv_path = folder / f"{name}.json", folder / f"{name}.csv"
        self.facts, self.key = dict(facts), tuple(key)
        self.earlier = self._earlier() if key else []

    @property
    def paths(self) -> list[Path]:
        """The paths of the JSON and the CSV file."""
        return [self.json_path, self.csv_path]

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes both files: first the rows of earlier runs, then the given rows."""
        measured = {self._case(row) for row in rows}
        everything = [row for row in self.earlier if self._case(row) not in measured] + [dict(row) for row in rows]
        self.json_path.parent.mkdir(parents=True, exist_ok=True)
        self.json_path.write_text(json.dumps({"environment": self.facts, "rows": everything}, indent=1) + "\n")
        columns = list(dict.fromkeys(column for row in everything for column in row))
        with self.csv_path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(everything)

    def _case(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(column) for column in self.key)

    def _earlier(self) -> list[dict[str, Any]]:
        if not self.json_path.exists():
            return []
        stored = json.loads(self.json_path.read_text())
        environment: dict[str, str] = stored["environment"]
        same = all(environment.get(name) == value for name, value in self.facts.items() if name not in OF_ONE_RUN)
        return list(stored["rows"]) if same else []


# Facts that may differ between the runs of one file; each row stores its own.
OF_ONE_RUN = ("date", "command", "commit")
