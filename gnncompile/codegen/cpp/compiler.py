"""Compiles C++ source to a shared object that is kept on disk, and loads it: a kernel, or a module of Python.

OpenMP code is compiled but no OpenMP runtime is linked: torch loads its own libgomp into the global namespace, and a
second one in the process would start a second team of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from gnncompile.codegen.cache_dir import cache_dir, give_up, temporary_dir, who_writes
from gnncompile.exc import UnsupportedRegion

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
"""None of these changes what NaN, infinities, signed zeros or the order of sums mean."""

MESSAGE_LINES = 12
"""How much of a compiler's message an error repeats."""


NO_ROOM = ("No space left on device", "Disk quota exceeded", "Read-only file system")
"""What compilers say where it is not the source that is wrong."""

logger = logging.getLogger(__name__)


def compiler() -> tuple[str, ...]:
    """The C++ compiler's command: ``$CXX``, else g++, else clang++.

    Raises:
        UnsupportedRegion: None of them can be run.
    """
    named = os.environ.get("CXX", "")
    for command in (shlex.split(named), ["g++"], ["clang++"]):
        if command and shutil.which(command[0]):
            return tuple(command)
    tried = f"$CXX={named!r}, g++, clang++"
    raise UnsupportedRegion(f"no C++ compiler found: tried {tried}; install g++ or set CXX to a C++17 compiler")


def load(source: str, contract: bool) -> ctypes.CDLL:
    """The shared object of a kernel, from the cache or compiled now.

    Where the cache folder can't be written to, its disk is full, or nothing there may be executed, a warning says so
    and a folder of this process serves instead.

    Args:
        source: One C++17 translation unit.
        contract: Whether a product and a sum may be fused into one rounding.

    Raises:
        UnsupportedRegion: There is no compiler, it rejects the source, or no folder takes what it makes.
    """
    command = compiler()
    flags = (*FLAGS, *_vectors(), f"-ffp-contract={'fast' if contract else 'off'}")

    def opened(path: Path) -> ctypes.CDLL:
        if not _intact(path):
            _build(command, flags, (), source, path)
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            # No OpenMP runtime in the global namespace (a torch built otherwise): link one.
            _build(command, flags, ("-fopenmp",), source, path)
            return ctypes.CDLL(str(path))

    return _kept([source, _version(command), *flags, _cpu()], opened)


def load_module(name: str, source: str, flags: tuple[str, ...], link: tuple[str, ...]) -> ModuleType:
    """A module of Python in C++, from the cache or compiled now.

    Args:
        name: As its source calls it.
        source: One translation unit.
        flags: Of the compiler.
        link: Of the linker.

    Raises:
        ImportError: It can't be loaded.
        UnsupportedRegion: As :func:`load` raises it.
    """
    command = compiler()

    def opened(path: Path) -> ModuleType:
        if not _intact(path):
            _build(command, flags, link, source, path)
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        made = importlib.util.module_from_spec(spec)
        loader.exec_module(made)
        return made

    return _kept([source, _version(command), *flags, *link], opened)


T = TypeVar("T")


def _kept(key: list[str], opened: Callable[[Path], T]) -> T:
    """What is made in the cache folder, or where that can't be had in one of this process.

    Args:
        key: All that it depends on.
        opened: Makes it, if it is not there, and opens it.
    """
    name = f"{hashlib.sha256(chr(0).join(key).encode()).hexdigest()}.so"
    try:
        folder = cache_dir()
        try:
            return opened(folder / name)
        except OSError as error:
            if folder == temporary_dir():
                raise
            give_up(folder, error.strerror or str(error))
        return opened(temporary_dir() / name)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnsupportedRegion(
            f"C++ code: it can't be kept in any folder ({reason}); free some space, or set CXX"
        ) from error


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
    """Whether the shared object is there, is what was written for this key, and nobody else may have written it."""
    try:
        with open(path, "rb") as file, open(_checksum_file(path), encoding="ascii") as checksum:
            problem = who_writes(file.fileno()) or who_writes(checksum.fileno())
            if not problem and _checksum(path.stem, file.read()) == checksum.read():
                return True
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        problem = str(error)
    logger.warning("%s is compiled again: %s", path, problem or "it is not what was written there")
    return False


def _checksum(key: str, content: bytes) -> str:
    """Of a file and the key that it was made for: that of another key is as bad as one of other bytes."""
    return hashlib.sha256(key.encode() + b"\0" + content).hexdigest()


def _build(command: tuple[str, ...], flags: tuple[str, ...], link: tuple[str, ...], source: str, path: Path) -> None:
    """Compiles `source` to `path`; other processes see nothing, or a whole file.

    Raises:
        OSError: It can't be written.
        UnsupportedRegion: The compiler rejects it.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # The source comes from stdin and the names are fixed, so that equal source gives equal bytes.
        _run([*command, *flags, "-x", "c++", "-c", "-", "-o", "kernel.o"], folder, source)
        _run([*command, "-shared", "kernel.o", *link, "-o", "kernel.so"], folder, "")
        made, checksum = folder / "kernel.so", folder / "kernel.sha256"
        checksum.write_text(_checksum(path.stem, made.read_bytes()), encoding="ascii")
        for file in (made, checksum):
            file.chmod(0o600)  # whatever the user's umask is
        os.replace(made, path)
        os.replace(checksum, _checksum_file(path))


def _run(command: list[str], folder: Path, text: str) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, check=False, env=environment)
    if not done.returncode:
        return
    full = next((text for text in NO_ROOM if text in done.stderr), None)
    if full is not None:
        raise OSError(f"{full} (said {command[0]})")
    message = "\n".join(done.stderr.splitlines()[:MESSAGE_LINES])
    raise UnsupportedRegion(f"C++ code: {shlex.join(command)} failed; check the compiler or set CXX:\n{message}")
