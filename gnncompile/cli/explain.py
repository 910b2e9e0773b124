"""Compiles a model, runs it, and reports its regions, their kernels, and what was not fused and why.

MODEL is `script.py:name` or `package.module:name`. The name may have dots. It ends with () if it must be called to get
the model, as in `train.py:make_model()`. The model is a module or a function, compiled already or not. --inputs names
the model's inputs in the same way; the default is the name `inputs` beside the model. Inputs are a tuple of arguments,
a dict of keyword arguments, or a single argument of another type. A script is imported as a module, so code under
`if __name__ == "__main__":` does not run. The exit status is 1 if the model is not captured as one graph, or if a
region has no compiled kernel.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace

from gnncompile.cli.named import add_model, model_and_inputs
from gnncompile.cli.output import add_json, print_json

NAME = "explain"
HELP = "tell what the compiler makes of a model in a script or module"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this command."""
    add_model(parser)
    parser.add_argument("--measure", action="store_true", help="time the regions' kernels")
    parser.add_argument("--html", metavar="PATH", help="write a page with the graph, the kernels and what they move")
    parser.add_argument("--draw", metavar="PATH", help="draw the graph, as .png or .svg")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Explains the model; returns the exit status."""
    # The script's own output must not mix with the JSON.
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        model, arguments, keywords = model_and_inputs(args.model, args.inputs)

        from gnncompile.report.explain import explain
        from gnncompile.runtime import launch

        report = explain(model, *arguments, measure=args.measure, **keywords)
    if args.html is not None:
        report.to_html(args.html)
    if args.draw is not None:
        report.draw(args.draw)
    if args.json:
        found = asdict(replace(report, graphs=()))  # only the page and the picture show the graphs
        del found["graphs"]
        print_json(found)
    else:
        print(report)
    return int(report.graph_breaks > 0 or report.captured_graphs > 1 or bool(launch.fallbacks))
