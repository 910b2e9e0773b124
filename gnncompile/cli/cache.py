"""Shows or empties the folder in which gnncompile keeps its kernels between processes.

The folder is ~/.cache/gnncompile, or the one that GNNCOMPILE_CACHE_DIR names. `clear` removes only files that
gnncompile has written; running processes keep the kernels that they have loaded. Inductor and Triton have their own
cache folders, which TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR name. The exit status is 1 if the folder can't be
used, or if a file could not be removed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnncompile.cli.output import add_json, mebibytes, print_json
from gnncompile.codegen.cache_dir import VARIABLE, chosen, why_unusable

NAME = "cache"
HELP = "show or empty the cache of compiled kernels"

KINDS = {
    "C++ kernels": (r"[0-9a-f]{64}\.so", r"[0-9a-f]{64}\.sha256"),
    "Triton sources": (r"triton/region_[0-9a-f]{32}\.py", r"triton/__pycache__/region_[0-9a-f]{32}\.[\w.-]+\.pyc"),
    "leftovers": (r"(build-\w+/kernel\.(o|so|sha256)|triton/region_[0-9a-f]{32}\w+\.tmp)",),
}
"""The files that gnncompile writes, as patterns of their paths: first kernels, then the files beside each kernel.
Leftovers come from processes that ended while they built a kernel, or that are building one now."""

PLACES = ("*", "triton/*", "triton/__pycache__/*", "build-*/*")
"""The only places to look at, because a folder that others use too may be large."""


@dataclass
class Kind:
    """Files of one kind.

    Attributes:
        count: The number of kernels.
        size: Bytes of all files, those beside the kernels included.
        files: The paths of all files.
    """

    count: int = 0
    size: int = 0
    files: list[Path] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions of this command."""
    actions = parser.add_subparsers(required=True, dest="action", metavar="action")
    for name, text in (("info", "folder, numbers and sizes"), ("clear", "remove all kernels")):
        add_json(actions.add_parser(name, help=text, description=__doc__))


def run(args: argparse.Namespace) -> int:
    """Shows or empties the folder; returns the exit status."""
    folder = chosen()
    there = folder.exists()
    problem = why_unusable(folder) if there else ""
    kinds, others = contents(folder)
    failed = list(clear(folder, kinds)) if args.action == "clear" else []
    if args.json:
        facts: dict[str, Any] = {"folder": str(folder), "exists": there, "problem": problem}
        facts["kinds"] = {name: {"count": kind.count, "bytes": kind.size} for name, kind in kinds.items()}
        facts["other_files"] = others
        print_json(facts | ({"not_removed": failed} if args.action == "clear" else {}))
    else:
        done = "removed" if args.action == "clear" else "holds"
        print(f"{folder} {done}:" if there else f"{folder} is not there yet")
        for name, kind in kinds.items():
            print(f"  {name.ljust(14)}  {kind.count:6d}  {mebibytes(kind.size):>12}")
        for line in failed:
            print(f"not removed: {line}")
        if others:
            print(f"entries that are not of gnncompile: {others}, left alone")
        if problem:
            print(f"not used: {problem}; each process makes a folder of its own; set {VARIABLE} to another folder")
    return int(bool(problem or failed))


def contents(folder: Path) -> tuple[dict[str, Kind], int]:
    """Lists a cache folder, which need not exist.

    Returns:
        The files that gnncompile wrote, by the names of :data:`KINDS`, and the number of all other files and folders.
    """
    kinds, others = {name: Kind() for name in KINDS}, 0
    for path in sorted(path for place in PLACES for path in folder.glob(place)):
        name = path.relative_to(folder).as_posix()
        found = [
            (kind, at) for kind, forms in KINDS.items() for at, form in enumerate(forms) if re.fullmatch(form, name)
        ]
        if found and not path.is_dir():
            kind, at = kinds[found[0][0]], found[0][1]
            kind.files.append(path)
            kind.size += _size(path)
            kind.count += at == 0
        elif not _ours(path, folder):
            others += 1
    return kinds, others


def clear(folder: Path, kinds: dict[str, Kind]) -> Iterator[str]:
    """Removes the files, and then gnncompile's empty folders; yields each file that could not be removed, and why."""
    for file in [file for kind in kinds.values() for file in kind.files]:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            yield f"{file}: {error.strerror or error}"
    for path in [folder / "triton" / "__pycache__", folder / "triton", *folder.glob("build-*")]:
        if _ours(path, folder) and not any(path.iterdir()):
            path.rmdir()


def _ours(path: Path, folder: Path) -> bool:
    """Whether a path is a folder that gnncompile makes."""
    name = path.relative_to(folder).as_posix()
    return path.is_dir() and re.fullmatch(r"triton(/__pycache__)?|build-\w+", name) is not None


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0  # another process has just removed it
