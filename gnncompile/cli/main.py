"""A compiler for PyTorch Geometric models, on the command line.

The exit status is 0 if all is well, 1 if a problem was found, and 2 if the command line itself is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gnncompile.cli import cache, doctor, explain, package, support
from gnncompile.exc import UsageError

# Each module has `NAME`, `HELP`, `add_arguments(parser)` and `run(args) -> exit status`. It imports torch only when it
# runs: `doctor` must work even if torch or PyG can't be imported.
COMMANDS = (doctor, explain, package, support, cache)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The arguments; None for those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m gnncompile", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    for module in COMMANDS:
        command = commands.add_parser(module.NAME, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status
