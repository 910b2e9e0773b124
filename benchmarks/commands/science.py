"""Models of meshes, molecules and materials: states and layers on edges, forward + backward, in two precisions.

All parameters and all inputs with floating-point values get gradients.
"""

import argparse

import torch

from benchmarks.cases.layers import DTYPES, USUAL
from benchmarks.cases.names import chosen
from benchmarks.cases.registry import Case, science_cases
from benchmarks.cases.science import SCIENCE
from benchmarks.commands import driver
from benchmarks.commands.layers import add_isolate, add_row_limit, measure_cases
from benchmarks.rows.variants import for_device

NAME = "science"
HELP = "models with states and layers on edges, in two precisions, with targets and limits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=1.0, rounds=5)
    driver.add_sync_check(parser)
    driver.add_budget(parser)
    parser.add_argument("--models", default=",".join(SCIENCE), help="comma-separated (default: %(default)s)")
    parser.add_argument(
        "--precisions", default=",".join(USUAL), help=f"comma-separated, of {', '.join(DTYPES)} (default: %(default)s)"
    )
    driver.add_scale(parser)
    add_row_limit(parser)
    add_isolate(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    budget, device = driver.Budget(args.budget), torch.device(args.device)
    return measure_cases(args, f"science-{device.type}", cases_of, chosen(for_device(device), args.rows), budget)


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Returns the cases that the command line names, in the size that it asks for."""
    names = [f"{model} {precision}" for model in args.models.split(",") for precision in args.precisions.split(",")]
    return science_cases(names, args.scale)
