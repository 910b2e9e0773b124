"""Checks what is installed, what works and what is slow, and says how to mend each problem.

Compiles and runs a small kernel with each generator, and a model with the whole compiler, Inductor included (--quick
leaves out the model). Levels: ok; note (nothing to do); slow; wrong. The exit status is 1 if something is slow or
wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict

from gnncompile.cli import machine, packages, trials
from gnncompile.cli.finding import OK, WRONG, Finding
from gnncompile.cli.output import add_json, print_json

NAME = "doctor"
HELP = "what is installed, what works, what is slow and how to mend it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this command."""
    parser.add_argument("--quick", action="store_true", help="leave out the model that Inductor compiles")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Runs all checks, prints each finding as soon as it is made, and returns the exit status."""
    findings = []
    for finding in examine(model=not args.quick):
        findings.append(finding)
        if not args.json:
            print(_line(finding), flush=True)
    bad = [finding for finding in findings if finding.is_bad]
    if args.json:
        print_json({"ok": not bad, "findings": [asdict(finding) for finding in findings]})
    else:
        print(f"\n{len(bad)} to mend" if bad else "\nall is well")
    return int(bool(bad))


def examine(model: bool) -> Iterator[Finding]:
    """Runs all checks and yields their findings.

    Args:
        model: Whether to compile a whole model.
    """
    yield from packages.packages()
    yield machine.cpp_compiler()
    yield machine.cache_folder()
    problem = why_not_imported()
    if problem:
        yield Finding("import gnncompile", WRONG, problem, "mend the packages above, or install them anew")
        return  # torch itself may be missing, and nothing can be tried
    yield machine.threads()
    found = machine.gpu()
    yield found
    gpu = found.name == "GPU" and found.level == OK
    yield packages.triton(gpu)
    yield from machine.environment(gpu)
    print("compiling and running small things ...", file=sys.stderr, flush=True)
    yield from trials.run(trials.trials(gpu, model))


def why_not_imported() -> str:
    """Returns the error with which importing gnncompile failed; "" if it was imported."""
    import gnncompile

    error = gnncompile.import_error
    return f"{type(error).__name__}: {error}" if error is not None else ""


def _line(finding: Finding) -> str:
    lines = [f"{finding.level.ljust(5)}  {finding.name}: {finding.found}"]
    if finding.remedy:
        lines.append(f"       -> {finding.remedy}")
    return "\n".join(lines)
