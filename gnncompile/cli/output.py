"""How commands print: aligned text, or JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declares ``--json``, which every command has."""
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on standard output")


def print_json(value: Any) -> None:
    """Prints a value as JSON, for ``--json``."""
    print(json.dumps(value, indent=1))


def mebibytes(size: int) -> str:
    """Returns a number of bytes as text in MiB."""
    return f"{size / 2**20:.1f} MiB"
