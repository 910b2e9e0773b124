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


def write_results(folder: Path, name: str, facts: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Writes `<name>.json` (environment and rows) and `<name>.csv` (rows) and returns the two paths."""
    folder.mkdir(parents=True, exist_ok=True)
    json_path, csv_path = folder / f"{name}.json", folder / f"{name}.csv"
    json_path.write_text(json.dumps({"environment": dict(facts), "rows": [dict(row) for row in rows]}, indent=1) + "\n")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with csv_path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return [json_path, csv_path]
