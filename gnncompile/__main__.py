"""``python -m gnncompile support``: writes the table of what of PyG is supported."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path


def main() -> None:
    """Runs a command."""
    parser = argparse.ArgumentParser(prog="python -m gnncompile")
    commands = parser.add_subparsers(required=True, dest="command")
    support = commands.add_parser("support", help="run every layer of PyG and write docs/support.md")
    support.add_argument("--out", type=Path, default=Path("docs/support.md"), help="file to write")
    options = parser.parse_args()
    from gnncompile.support.table import page  # imports all of PyG

    warnings.simplefilter("ignore")
    text = page(progress=lambda line: print(line, file=sys.stderr))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
