"""`python -m benchmarks <subcommand>`: each subcommand is a file in commands/ and stands in `SUBCOMMANDS`."""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.cases.names import UnknownNameError
from benchmarks.commands import (
    compare,
    compile_time,
    guide,
    kernels,
    layers,
    memory,
    minibatch,
    partitioned,
    products,
    report,
    sampled,
    science,
    serving,
    tiles,
    training,
)

# Each module offers `NAME`, `HELP`, `add_arguments(parser)` and `run(args) -> exit status`.
SUBCOMMANDS = (
    guide,
    training,
    minibatch,
    sampled,
    serving,
    layers,
    science,
    kernels,
    tiles,
    products,
    partitioned,
    memory,
    compile_time,
    report,
    compare,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses `argv` (default: the command line), runs the subcommand and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=sys.modules[__package__].__doc__)
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="subcommand")
    for module in SUBCOMMANDS:
        subparser = subparsers.add_parser(module.NAME, help=module.HELP, description=module.__doc__)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        status: int = args.run(args)
    except UnknownNameError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
