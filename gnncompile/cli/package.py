"""Writes a trained model and its kernels as one file, which a server loads without Python. Or says what made a file.

MODEL is `script.py:name` or `package.module:name`, in evaluation mode, as for `explain`; the name ends with () if it
must be called to get the model. --inputs names the inputs of one call in the same way; the default is the name `inputs`
beside the model. They tell dtypes and widths: one file serves any number of nodes, edges and graphs. A MODEL that ends
with .pt2 is a file that was written before; nothing is written then. The exit status is 1 if the model can't be
packaged.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext, redirect_stdout

from gnncompile.cli.named import add_model, model_and_inputs
from gnncompile.cli.output import add_json, print_json
from gnncompile.exc import UsageError

NAME = "package"
HELP = "write a model as one file for servers without Python"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this command."""
    add_model(parser)
    parser.add_argument("--out", metavar="PATH", default="model.pt2", help="the file to write (default: %(default)s)")
    parser.add_argument("--keep-layout", action="store_true", help="hold models that sort the edges of a graph once")
    parser.add_argument("--cpu", metavar="CPU", default="native", help="native, x86-64-v3 or x86-64-v4")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Writes or describes a package; returns the exit status."""
    if not args.model.endswith(".pt2"):
        with redirect_stdout(sys.stderr) if args.json else nullcontext():
            status = _write(args)
        if status:
            return status
    from gnncompile.serving.package import package_info

    path = args.model if args.model.endswith(".pt2") else args.out
    try:
        found = {"file": path, **package_info(path)}
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json(found)
    else:
        print("\n".join(f"{name:<20} {value}" for name, value in found.items()))
    return 0


def _write(args: argparse.Namespace) -> int:
    model, arguments, keywords = model_and_inputs(args.model, args.inputs)

    from gnncompile.exc import GnncompileError
    from gnncompile.serving.package import package

    try:
        package(model, arguments, args.out, example_kwargs=keywords, keep_layout=args.keep_layout, cpu=args.cpu)
    except GnncompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
