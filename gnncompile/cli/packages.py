"""Compares the installed packages with the requirements of gnncompile and torch, without importing either."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import Any

from gnncompile.cli.finding import NOTE, OK, WRONG, Finding

OPTIONAL = {
    "torch-scatter": "only models that call torch_scatter themselves need it",
    "pymetis": 'only gnncompile.transforms.Reorder("metis") needs it',
    "matplotlib": "only pictures need it",
}


def packages() -> Iterator[Finding]:
    """Checks Python and the packages that gnncompile requires, then the optional packages."""
    if installed("packaging") is None:
        yield Finding("packaging", WRONG, "not installed", "pip install packaging")
        return
    try:
        needs, python = requires("gnncompile") or [], metadata("gnncompile")["Requires-Python"]
    except PackageNotFoundError:
        what = "not installed, run from its folder: torch.compile(backend='gnncompile') does not know it"
        yield Finding("gnncompile", NOTE, what, "pip install . in the folder of gnncompile")
    else:
        yield Finding("gnncompile", OK, version("gnncompile"))
        yield _judge("Python", platform.python_version(), python, "use a Python of these versions")
        for need in map(_requirement, needs):
            if _applies(need):
                yield _judge(need.name, installed(need.name), str(need.specifier), f"pip install '{need}'")
    for name, why in OPTIONAL.items():
        found = installed(name)
        yield Finding(name, OK if found else NOTE, found or f"not installed, which is fine: {why}")
    if installed("torch-scatter") and not _loads_torch_scatter():
        remedy = "pip install --no-build-isolation --force-reinstall torch-scatter, or uninstall it"
        yield Finding("torch-scatter", WRONG, "can't be loaded: it was built for another torch", remedy)


def triton(gpu: bool) -> Finding:
    """Checks the version of Triton against the one that torch's CUDA builds require.

    Args:
        gpu: Whether there is a GPU that torch can use.
    """
    found = installed("triton")
    try:
        asked = [need for need in map(_requirement, requires("torch") or []) if need.name == "triton"]
    except PackageNotFoundError:
        asked = []
    needs = [need for need in asked if _applies(need)]
    if needs and gpu:
        return _judge("triton", found, str(needs[0].specifier), f"pip install '{needs[0].name}{needs[0].specifier}'")
    if found is None:
        level = WRONG if gpu else NOTE
        return Finding("triton", level, "not installed" + ("" if gpu else ", which is fine: only GPUs need it"))
    return Finding("triton", OK, found)


def installed(name: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _requirement(text: str) -> Any:
    from packaging.requirements import Requirement

    return Requirement(text)


def _applies(need: Any) -> bool:
    """Whether a requirement applies to this machine, without any extra."""
    return need.marker is None or bool(need.marker.evaluate({"extra": ""}))


def _judge(name: str, found: str | None, wanted: str, remedy: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    if found is None:
        return Finding(name, WRONG, "not installed", remedy)
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return Finding(name, OK, found)
    return Finding(name, WRONG, f"{found}, expected {wanted}", remedy)


def _loads_torch_scatter() -> bool:
    try:
        import torch_scatter  # noqa: F401
    except Exception:  # an OSError for an undefined symbol, an ImportError for an old build
        return False
    return True
