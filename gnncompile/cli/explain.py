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
import importlib
import importlib.util
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from gnncompile.cli.output import add_json, print_json
from gnncompile.exc import UsageError

NAME = "explain"
HELP = "tell what the compiler makes of a model in a script or module"

INPUTS = "inputs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this command."""
    parser.add_argument("model", metavar="MODEL", help="script.py:name, package.module:name; name() is called first")
    parser.add_argument("--inputs", metavar="INPUTS", help="name or name() beside the model, or script.py:name")
    parser.add_argument("--measure", action="store_true", help="time the regions' kernels")
    parser.add_argument("--html", metavar="PATH", help="write a page with the graph, the kernels and what they move")
    parser.add_argument("--draw", metavar="PATH", help="draw the graph, as .png or .svg")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Explains the model; returns the exit status."""
    # The script's own output must not mix with the JSON.
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        place, name = _split(args.model, "MODEL")
        model = _find(place, name, "MODEL")
        if not callable(model):
            raise UsageError(f"MODEL: {args.model} is a {type(model).__name__}, expected a module or a function")
        arguments, keywords = _inputs(place, args.inputs)

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


def _split(text: str, argument: str) -> tuple[str, str]:
    place, _, name = text.rpartition(":")
    if not (place and name):
        raise UsageError(f"{argument}: got {text!r}, expected script.py:name or package.module:name")
    return place, name


def _inputs(place: str, text: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments for the model that was found at `place`."""
    if text is not None and ":" in text:
        value = _find(*_split(text, "--inputs"), "--inputs")
    else:
        value = _find(place, text or INPUTS, "--inputs")
    if isinstance(value, dict):
        return (), value
    return (value if isinstance(value, tuple) and not hasattr(value, "_fields") else (value,)), {}


def _find(place: str, name: str, argument: str) -> Any:
    """Returns the object with a name in a script or module; calls it if the name ends with ().

    Raises:
        UsageError: The script, module or name does not exist, or the object can't be called.
    """
    value: Any = _load(place, argument)
    called = name.endswith("()")
    for part in name.removesuffix("()").split("."):
        if not hasattr(value, part):
            hint = "; define it there, or name the model's inputs with --inputs" if argument == "--inputs" else ""
            raise UsageError(f"{argument}: {place} has no {name.removesuffix('()')!r}{hint}")
        value = getattr(value, part)
    if called and not callable(value):
        raise UsageError(f"{argument}: {name} can't be called, it is a {type(value).__name__}; leave out the ()")
    return value() if called else value


def _load(place: str, argument: str) -> ModuleType:
    """Imports a script or a module, once; errors that it raises are not caught."""
    if not place.endswith(".py"):
        sys.path.insert(0, "")  # as python -m and -c have it
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module exists, but imports a missing module
            raise UsageError(f"{argument}: no module {place!r}; a script is named with its .py") from error
        finally:
            sys.path.remove("")
    path = Path(place).absolute()
    if not path.is_file():
        raise UsageError(f"{argument}: no file {place}")
    return _run_script(path)


@lru_cache
def _run_script(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as python itself does for a script
    sys.modules[name] = module  # dataclasses and pickles look it up
    spec.loader.exec_module(module)
    return module
