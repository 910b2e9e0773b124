"""The benchmark of PyG's compile guide: GCN, GraphSAGE, GIN and GAT, 3 layers, default options, forward + backward.

The features do not require a gradient, as in training. With --input-grad they do, as in PyG's own benchmark helper.
"""

import argparse

import torch

from benchmarks.cases.graphs import GRAPHS
from benchmarks.cases.names import chosen
from benchmarks.cases.registry import GUIDE_MODELS, select
from benchmarks.commands import driver
from benchmarks.measuring import measure
from benchmarks.rows.variants import for_device

NAME = "guide"
HELP = "PyG's compile guide: four models, forward + backward, every way to run them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=4.0, rounds=10)
    driver.add_sync_check(parser)
    parser.add_argument("--graph", default="guide", choices=list(GRAPHS), help="(default: %(default)s)")
    parser.add_argument("--models", default=",".join(GUIDE_MODELS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--input-grad", action="store_true", help="also compute the gradient of the features")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    device = torch.device(args.device)
    cases = select("guide", args.graph, args.models.split(","))
    variants = chosen(for_device(device), args.rows)
    more = {
        "peak MiB": measure.peak_memory_definition(device),
        "features": "require a gradient" if args.input_grad else "require no gradient",
    }
    how = driver.options(args, input_grad=args.input_grad, sync_check=args.sync_check)
    steps = driver.measure_steps(variants, device, how)
    return driver.run(args, f"guide-{args.graph}-{device.type}", cases, steps, more=more)
