"""How commands print: aligned text, or JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declares ``--json``, which every command has."""
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on standard output")


def print_json(value: Any) -> None:
    """Prints what ``--json`` asks for."""
    print(json.dumps(value, indent=1))


def mebibytes(size: int) -> str:
    """A number of bytes as people read it."""
    return f"{size / 2**20:.1f} MiB"
