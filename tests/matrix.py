"""Runs the core tests under several releases of torch, each in a virtual environment of its own; prints a table.

    python -m tests.matrix                     # the oldest supported release, the pinned one and the newest
    python -m tests.matrix 2.12.1 2.14.1       # these
    python -m tests.matrix --list              # says which, and runs nothing
    python -m tests.matrix --lowest            # the lowest version of each dependency, as constraints for pip

The newest is the highest release that pip finds and pyproject.toml allows. Each run is ``make test-core TORCH=...``,
with PIP_ARGS, WORKERS and PYTHON from the environment. With the oldest torch, everything else that gnncompile needs is
the oldest that pyproject.toml allows as well, nothing is pinned beside that. The exit status is 1 if any run failed.
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
    """What gnncompile depends on, with the versions that it allows."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    found = re.findall(r'^\s*"([\w-]+)([^";]*)', block[1], re.MULTILINE)
    return dict(found)


def lowest() -> dict[str, str]:
    """The oldest version that is allowed of each dependency."""
    bounds = {name: re.search(r">=([\w.]+)", allowed) for name, allowed in requirements().items()}
    return {name: bound[1] for name, bound in bounds.items() if bound is not None}


def pinned() -> str:
    """The torch of the development set."""
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def newest(offered: str) -> str:
    """The highest release that is allowed.

    Args:
        offered: What ``pip index versions torch`` says.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    line = next(line for line in offered.splitlines() if line.startswith("Available versions:"))
    versions = [Version(text.strip()) for text in line.removeprefix("Available versions:").split(",")]
    allowed = SpecifierSet(requirements()["torch"])
    return max(version for version in versions if version in allowed and version.local is None).public


def chosen() -> list[str]:
    """Oldest, pinned, newest."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    offered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    oldest = lowest()["torch"]
    full = oldest if oldest.count(".") == 2 else f"{oldest}.0"
    return list(dict.fromkeys([full, pinned(), newest(offered)]))


def run(version: str, oldest: bool) -> tuple[int, float, str]:
    """Exit status, seconds, and the last line of a run."""
    variables = [f"TORCH={version}", *(["LOWEST=1"] if oldest else [])]
    variables += [f"{name}={os.environ[name]}" for name in ("PIP_ARGS", "WORKERS", "PYTHON") if name in os.environ]
    start = time.perf_counter()
    done = subprocess.run(["make", "test-core", *variables], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    print(done.stdout, flush=True)
    lines = [line.strip("= ") for line in done.stdout.splitlines() if " passed" in line or " failed" in line]
    return done.returncode, time.perf_counter() - start, lines[-1] if lines else "did not get to the tests"


def main(argv: list[str]) -> int:
    """Runs all, or those that are named."""
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
