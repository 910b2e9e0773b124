"""Finds objects that the command line names: a model in a script or module, and its inputs."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from gnncompile.exc import UsageError

INPUTS = "inputs"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declares MODEL and ``--inputs``."""
    parser.add_argument("model", metavar="MODEL", help="script.py:name, package.module:name; name() is called first")
    parser.add_argument("--inputs", metavar="INPUTS", help="name or name() beside the model, or script.py:name")


def model_and_inputs(model: str, inputs: str | None) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the model that MODEL names, and its arguments by position and by name.

    Raises:
        UsageError: There is no such model, it can't be called, or it has no inputs.
    """
    place, name = split(model, "MODEL")
    found = find(place, name, "MODEL")
    if not callable(found):
        raise UsageError(f"MODEL: {model} is a {type(found).__name__}, expected a module or a function")
    return found, *inputs_of(place, inputs)


def split(text: str, argument: str) -> tuple[str, str]:
    """Returns the script or module, and the name in it, of ``script.py:name``."""
    place, _, name = text.rpartition(":")
    if not (place and name):
        raise UsageError(f"{argument}: got {text!r}, expected script.py:name or package.module:name")
    return place, name


def inputs_of(place: str, text: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments for the model that was found at `place`."""
    if text is not None and ":" in text:
        value = find(*split(text, "--inputs"), "--inputs")
    else:
        value = find(place, text or INPUTS, "--inputs")
    if isinstance(value, dict):
        return (), value
    return (value if isinstance(value, tuple) and not hasattr(value, "_fields") else (value,)), {}


def find(place: str, name: str, argument: str) -> Any:
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
