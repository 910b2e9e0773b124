"""Runs every layer, aggregation, norm, pooling and model of PyG, eager and compiled, and writes the support table.

The exit status is 1 if a compiled result differs from eager's, or if a case fails.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gnncompile.cli.output import add_json, print_json

NAME = "support"
HELP = "run every layer of PyG and write docs/support.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this command."""
    parser.add_argument("--out", type=Path, help="file to write (default: docs/support.md, or docs/support-options.md)")
    parser.add_argument("--options", action="store_true", help="run each layer with one option changed, instead")
    parser.add_argument("--only", default="", metavar="REGEX", help="print the cases of these names, and write nothing")
    parser.add_argument("--inductor", action="store_true", help="let Inductor compile what is no region: takes hours")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cases (default: %(default)s)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Runs all cases and writes the page; returns the exit status."""
    from gnncompile.support import table  # imports all of PyG
    from gnncompile.support.case import Absent

    warnings.simplefilter("ignore")

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if args.options:
        results: Any = table.measure_options(progress, args.only, args.jobs)
    else:
        results = table.measure(progress, args.only, args.inductor, args.jobs)
    if not args.only:
        out = args.out or Path("docs/support-options.md" if args.options else "docs/support.md")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(table.options_page(results) if args.options else table.page(results), encoding="utf-8")
    if args.json:
        print_json({name: [_as_json(result) for result in found] for name, found in results.items()})
    pairs = [pair for found in results.values() for pair in found if not isinstance(pair, Absent)]
    return int(any(result.wrong for pair in pairs for result in pair))


def _as_json(result: Any) -> dict[str, Any]:
    if not isinstance(result, tuple):
        return asdict(result)
    return {**asdict(result[0]), "inference": asdict(result[1])}
