"""What is installed: every package directory, the marker of types, the entry point."""

import importlib.metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests import matrix

BESIDE = ("numpy", "networkx", "packaging")

ROOT = Path(__file__).resolve().parents[2]


def project():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_under(folder, name):
    return {".".join((name, *path.parent.relative_to(folder).parts)) for path in folder.rglob("__init__.py")}


def test_every_package_is_listed():
    found = set()
    for folder, name in (
        ("gnncompile", "gnncompile"),
        ("models", "gnncompile.models"),
        ("transforms", "gnncompile.transforms"),
    ):
        found |= packages_under(ROOT / folder, name)
    assert set(project()["tool"]["setuptools"]["packages"]) == found


def test_types_are_shipped():
    assert (ROOT / "gnncompile" / "py.typed").exists()


def test_backend_is_published():
    points = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if "gnncompile" not in points.names:
        pytest.skip("gnncompile is not installed (run from the checkout)")
    assert points["gnncompile"].value == "gnncompile.capture.dynamo_backend:backend"


def test_constraints_pin_everything_once_per_python():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all("==" in line for line in lines)
    assert len(lines) == len(set(lines))
    keys = [(line.split("==")[0], line.partition(";")[2]) for line in lines]
    assert len(keys) == len(set(keys))


def test_every_dependency_states_its_lowest_version():
    assert set(matrix.requirements()) == set(matrix.lowest()) == {"torch", "torch-geometric", *BESIDE}


def test_what_is_installed_is_allowed():
    for name, allowed in matrix.requirements().items():
        assert SpecifierSet(allowed).contains(importlib.metadata.version(name), prereleases=True), name


def test_the_matrix_takes_the_newest_that_is_allowed():
    offered = (
        "torch (9.0.0)\nAvailable versions: 9.0.0, 2.16.0, 2.15.1+cpu, 2.15.0, 2.13.0+cpu, 2.13.0, 2.10.0\nINSTALLED: 1"
    )
    assert matrix.newest(offered) == "2.15.0"
    assert matrix.lowest()["torch"] == "2.11" and matrix.pinned().startswith("2.")


def test_core_tests_are_there():
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (names,) = (line.split(":=")[1].split() for line in text.splitlines() if line.startswith("CORE :="))
    assert len(names) > 20 and all((ROOT / "tests" / f"{name}.py").exists() for name in names)
