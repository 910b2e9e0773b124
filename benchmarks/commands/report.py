"""Makes the tables and figures of README and docs again, from the results that are stored in benchmarks/results.

In the pages of `WITH_TABLES`, a table is between `<!-- benchmarks: NAME -->` and `<!-- end -->`. docs/benchmarks.md and
the figures in docs/figures are written completely.
With --check nothing is written, and the exit status is 1 if a file would change.
"""

import argparse
import re
from pathlib import Path

from benchmarks.measuring.environment import ROOT
from benchmarks.reporting.figures import FIGURES
from benchmarks.reporting.readme_tables import TABLES
from benchmarks.reporting.result_pages import page

NAME = "report"
HELP = "makes the tables and figures of README and docs from stored results"

WITH_TABLES = ("README.md", "docs/speed.md", "docs/how/serving.md")
"""Pages that are written by hand and contain tables."""

MARKED = re.compile(r"(<!-- benchmarks: (\S+) -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository (default: this one)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if something would change")


def run(args: argparse.Namespace) -> int:
    """Writes or compares the files; returns the exit status."""
    status = 0
    for path, text in made(args.root).items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        print(f"{'would change' if args.check else 'written'}: {path.relative_to(args.root)}")
        status |= args.check
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(status)


def made(root: Path) -> dict[Path, str]:
    """Returns the text that each file should have."""
    results, docs = root / "benchmarks" / "results", root / "docs"
    texts = [path for path in (root / name for name in WITH_TABLES) if path.exists()]
    return {
        **{path: with_tables(path.read_text(encoding="utf-8"), results) for path in texts},
        docs / "benchmarks.md": page(results),
        **{docs / "figures" / name: make(results) for name, make in FIGURES.items()},
    }


def with_tables(text: str, results: Path) -> str:
    """Returns a text with its marked tables made again from results.

    Raises:
        ValueError: a marker names no table, or has no end.
    """
    found = [match.group(2) for match in MARKED.finditer(text)]
    unknown = [name for name in found if name not in TABLES]
    if unknown:
        raise ValueError(f"marker: got {', '.join(unknown)}, expected some of {', '.join(TABLES)}")
    if text.count("<!-- benchmarks: ") != len(found):
        raise ValueError("marker: a table has no `<!-- end -->`; put one under it")
    return MARKED.sub(lambda match: f"{match.group(1)}{TABLES[match.group(2)](results)}{match.group(4)}", text)
