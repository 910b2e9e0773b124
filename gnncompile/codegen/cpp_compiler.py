"""Compiles C++ source to a shared object that is kept on disk, and loads it.

OpenMP code is compiled but no OpenMP runtime is linked: torch loads its own libgomp into the global namespace, and a
second one in the process would start a second team of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from gnncompile.codegen.cache_dir import cache_dir
from gnncompile.errors import Unsupported

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
"""None of these changes what NaN, infinities, signed zeros or the order of sums mean."""

MESSAGE_LINES = 12
"""How much of a compiler's message an error repeats."""


def compiler() -> tuple[str, ...]:
    """The C++ compiler's command: ``$CXX``, else g++, else clang++.

    Raises:
        Unsupported: None of them can be run.
    """
    named = os.environ.get("CXX", "")
    for command in (shlex.split(named), ["g++"], ["clang++"]):
        if command and shutil.which(command[0]):
            return tuple(command)
    tried = f"$CXX={named!r}, g++, clang++"
    raise Unsupported(f"no C++ compiler found: tried {tried}; install g++ or set CXX to a C++17 compiler")


def load(source: str, contract: bool) -> ctypes.CDLL:
    """The shared object of `source`, from the cache or compiled now.

    Args:
        source: One C++17 translation unit.
        contract: Whether a product and a sum may be fused into one rounding.

    Raises:
        Unsupported: There is no compiler, or it rejects the source.
    """
    command = compiler()
    flags = (*FLAGS, *_vectors(), f"-ffp-contract={'fast' if contract else 'off'}")
    key = "\0".join([source, _version(command), *flags, _cpu()])
    path = cache_dir() / f"{hashlib.sha256(key.encode()).hexdigest()}.so"
    if not _intact(path):
        _build(command, flags, (), source, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # No OpenMP runtime in the global namespace (a torch built otherwise): link one.
        _build(command, flags, ("-fopenmp",), source, path)
        return ctypes.CDLL(str(path))


def _vectors() -> tuple[str, ...]:
    """Rows of features fill 512-bit registers, which gcc does not use by itself."""
    return ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()


@lru_cache(maxsize=8)
def _version(command: tuple[str, ...]) -> str:
    return subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout


@lru_cache(maxsize=1)
def _cpu() -> str:
    """What ``-march=native`` depends on; a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip(": ") in wanted}))


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _intact(path: Path) -> bool:
    """Whether the shared object is there and is what was written."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == _checksum_file(path).read_text()
    except OSError:
        return False


def _build(command: tuple[str, ...], flags: tuple[str, ...], link: tuple[str, ...], source: str, path: Path) -> None:
    """Compiles `source` to `path`; other processes see nothing, or a whole file."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as name:
        folder = Path(name)
        # The source comes from stdin and the names are fixed, so that equal source gives equal bytes.
        _run([*command, *flags, "-x", "c++", "-c", "-", "-o", "kernel.o"], folder, source)
        _run([*command, "-shared", *link, "kernel.o", "-o", "kernel.so"], folder, "")
        digest = hashlib.sha256((folder / "kernel.so").read_bytes()).hexdigest()
        (folder / "kernel.sha256").write_text(digest)
        os.replace(folder / "kernel.so", path)
        os.replace(folder / "kernel.sha256", _checksum_file(path))


def _run(command: list[str], folder: Path, text: str) -> None:
    done = subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        message = "\n".join(done.stderr.splitlines()[:MESSAGE_LINES])
        raise Unsupported(f"C++ kernel: {shlex.join(command)} failed; check the compiler or set CXX:\n{message}")
