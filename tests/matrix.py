"""Runs the core tests with several releases of torch, each in its own virtual environment, and prints a table.

    python -m tests.matrix                     # the oldest supported release, the pinned one and the newest
    python -m tests.matrix 2.12.1 2.14.1       # these releases
    python -m tests.matrix --list              # prints the releases, and runs nothing
    python -m tests.matrix --lowest            # the lowest version of each dependency, as constraints for pip

The newest is the highest release that pip finds and pyproject.toml allows. Each run is ``make test-core TORCH=...``,
with PIP_ARGS, WORKERS and PYTHON from the environment. With the oldest torch, all other dependencies of gnncompile are
the oldest that pyproject.toml allows too, and nothing else is pinned. The exit status is 1 if any run failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements() -> dict[str, str]:
    """Returns the dependencies of gnncompile, each with its allowed versions."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    found = re.findall(r'^\s*"([\w-]+)([^";]*)', block[1], re.MULTILINE)
    return dict(found)


def lowest() -> dict[str, str]:
    """Returns the oldest allowed version of each dependency."""
    bounds = {name: re.search(r">=([\w.]+)", allowed) for name, allowed in requirements().items()}
    return {name: bound[1] for name, bound in bounds.items() if bound is not None}


def pinned() -> str:
    """Returns the release of torch that constraints.txt pins for development."""
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def newest(offered: str) -> str:
    """Returns the highest allowed release of torch.

    Args:
        offered: The output of ``pip index versions torch``.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    line = next(line for line in offered.splitlines() if line.startswith("Available versions:"))
    versions = [Version(text.strip()) for text in line.removeprefix("Available versions:").split(",")]
    allowed = SpecifierSet(requirements()["torch"])
    return max(version for version in versions if version in allowed and version.local is None).public


def chosen() -> list[str]:
    """Returns the oldest supported, the pinned and the newest release of torch."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    offered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    oldest = lowest()["torch"]
    full = oldest if oldest.count(".") == 2 else f"{oldest}.0"
    return list(dict.fromkeys([full, pinned(), newest(offered)]))


def run(version: str, oldest: bool) -> tuple[int, float, str]:
    """Runs the core tests; returns the exit status, the seconds, and the line with the result."""
    variables = [f"TORCH={version}", *(["LOWEST=1"] if oldest else [])]
    variables += [f"{name}={os.environ[name]}" for name in ("PIP_ARGS", "WORKERS", "PYTHON") if name in os.environ]
    start = time.perf_counter()
    done = subprocess.run(["make", "test-core", *variables], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    print(done.stdout, flush=True)
    lines = [line.strip("= ") for line in done.stdout.splitlines() if " passed" in line or " failed" in line]
    return done.returncode, time.perf_counter() - start, lines[-1] if lines else "did not get to the tests"


def main(argv: list[str]) -> int:
    """Runs the tests with the releases named on the command line, or else with the three of :func:`chosen`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="releases of torch")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--lowest", action="store_true", help="print the lowest versions")
    given = parser.parse_args(argv)
    if given.lowest:
        print("\n".join(f"{name}=={version}" for name, version in lowest().items()))
        return 0
    versions = given.versions or chosen()
    if given.list:
        print("\n".join(versions))
        return 0
    results = {version: run(version, version.startswith(lowest()["torch"])) for version in versions}
    for version, (status, seconds, line) in results.items():
        print(f"torch {version:8} {'ok' if status == 0 else 'FAILED':6} {seconds:5.0f} s  {line}")
    return int(any(status for status, _, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
