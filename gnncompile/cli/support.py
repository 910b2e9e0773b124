"""Runs every layer, aggregation, norm, pooling and model of PyG, eager and compiled, and writes the table of support.

The exit status is 1 if one of them gives other numbers than eager, or fails.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

from gnncompile.cli.output import add_json, print_json

NAME = "support"
HELP = "run every layer of PyG and write docs/support.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this command."""
    parser.add_argument(
        "--out", type=Path, default=Path("docs/support.md"), help="file to write (default: %(default)s)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Runs all cases and writes the page."""
    from gnncompile.support.check import Result  # imports all of PyG
    from gnncompile.support.table import measure, page, row

    warnings.simplefilter("ignore")
    results = measure(progress=lambda result: print(row(result), file=sys.stderr, flush=True))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page(results), encoding="utf-8")
    if args.json:
        print_json({name: [asdict(result) for result in found] for name, found in results.items()})
    ran = [result for found in results.values() for result in found if isinstance(result, Result)]
    return int(any(result.wrong for result in ran))
