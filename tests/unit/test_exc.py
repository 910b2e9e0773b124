"""Errors are of a class for each thing that goes wrong, and of the built-in class that a caller may expect."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch_geometric.nn import GCNConv

import gnncompile
from gnncompile import exc
from gnncompile.transforms import AddSelfLoops

ROOT = Path(__file__).resolve().parents[2]

BUILT_IN = {"Exception", "ValueError", "TypeError", "RuntimeError", "IndexError", "ImportError", "MemoryError"}


def test_every_error_is_ours_and_says_what_it_is_for():
    for name in exc.__all__:
        error = getattr(exc, name)
        assert issubclass(error, exc.GnncompileError) and error.__doc__


def test_errors_are_the_built_in_ones_too():
    for error, built_in in (
        (exc.ArgumentError, ValueError),
        (exc.ArgumentTypeError, TypeError),
        (exc.IndexOutOfRangeError, IndexError),
        (exc.MissingLibraryError, ImportError),
        (exc.SecondDerivativeError, RuntimeError),
        (exc.KernelMemoryError, MemoryError),
    ):
        assert issubclass(error, built_in)


def test_no_built_in_error_is_raised():
    found = []
    for folder in ("gnncompile", "transforms", "models"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                name = getattr(getattr(node.exc, "func", node.exc), "id", "") if isinstance(node, ast.Raise) else ""
                found += [f"{file.relative_to(ROOT)}:{node.lineno}: {name}"] if name in BUILT_IN else []
    # Python asks for this one where a package lacks a name that it would have if its libraries could be imported.
    assert [one for one in found if not one.startswith("gnncompile/__init__.py")] == []


def test_what_users_meet():
    x, edge_index = torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(exc.ArgumentError, match="mode: found 'fast', expected one of"):
        gnncompile.compile(GCNConv(4, 2), mode="fast")
    with pytest.raises(exc.ArgumentTypeError, match="edge_index: found dtype"):
        gnncompile.compile(GCNConv(4, 2))(x, edge_index.float())
    with pytest.raises(exc.IndexOutOfRangeError, match="outside the graph"):
        gnncompile.compile(GCNConv(4, 2))(x, edge_index + 1)
    with pytest.raises(exc.ArgumentError, match="existing: got 'drop'"):
        AddSelfLoops(existing="drop")
