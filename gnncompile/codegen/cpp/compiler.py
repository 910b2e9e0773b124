"""Compiles C++ source to a shared object, caches it on disk and loads it: a kernel, or a Python extension module.

OpenMP code is compiled, but no OpenMP runtime is linked. torch loads its own libgomp into the global namespace, and a
second runtime in the process would start a second team of threads.
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
"""Compiler flags of a kernel. No flag changes the handling of NaN, infinities or signed zeros, or the order of sums."""

WIDE_MOVES = ("-mmove-max=512", "-mstore-max=512")
"""Flags of gcc 12 and newer on x86-64: arrays are cleared and copied by 512 bits at a time, if the CPU can."""

MESSAGE_LINES = 12
"""Number of lines of a compiler's message that an error repeats."""


NO_ROOM = ("No space left on device", "Disk quota exceeded", "Read-only file system")
"""Messages of compilers that fail because of the disk, not because of the source."""

logger = logging.getLogger(__name__)


def compiler() -> tuple[str, ...]:
    """Returns the C++ compiler's command: ``$CXX``, else g++, else clang++.

    Raises:
        UnsupportedRegion: None of the three was found.
    """
    named = os.environ.get("CXX", "")
    for command in (shlex.split(named), ["g++"], ["clang++"]):
        if command and shutil.which(command[0]):
            return tuple(command)
    tried = f"$CXX={named!r}, g++, clang++"
    raise UnsupportedRegion(f"no C++ compiler found: tried {tried}; install g++ or set CXX to a C++17 compiler")


def load(source: str, contract: bool) -> ctypes.CDLL:
    """Returns the shared object of a kernel, from the cache or compiled now.

    If the cache folder can't be written to, its disk is full, or its files may not be executed, a warning says so. A
    temporary folder of this process is used instead.

    Args:
        source: One C++17 translation unit.
        contract: Whether the compiler may fuse a product and a sum into one rounding.

    Raises:
        UnsupportedRegion: There is no compiler, it rejects the source, or no folder can hold the shared object.
    """
    command = compiler()
    flags = kernel_flags(contract)

    def opened(path: Path) -> ctypes.CDLL:
        if not _intact(path):
            _build(command, flags, (), source, path)
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            # This torch has put no OpenMP runtime into the global namespace: link a runtime.
            _build(command, flags, ("-fopenmp",), source, path)
            return ctypes.CDLL(str(path))

    return _kept([source, _version(command), *flags, _cpu()], opened)


def load_module(name: str, source: str, flags: tuple[str, ...], link: tuple[str, ...]) -> ModuleType:
    """Returns a Python extension module written in C++, from the cache or compiled now.

    Args:
        name: The module's name in its source.
        source: One translation unit.
        flags: Flags of the compiler.
        link: Flags of the linker.

    Raises:
        ImportError: The module can't be loaded.
        UnsupportedRegion: For the same reasons as in :func:`load`.
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
    """Opens a shared object in the cache folder, or in this process's temporary folder if the cache can't be used.

    Args:
        key: All strings that the shared object depends on.
        opened: Returns the loaded object at a path; builds the file first if it does not exist.
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


def kernel_flags(contract: bool) -> tuple[str, ...]:
    """Returns the flags of a kernel; `contract` lets the compiler fuse a product and a sum into one rounding."""
    return (*FLAGS, *wide_vectors(), f"-ffp-contract={'fast' if contract else 'off'}")


def wide_vectors() -> tuple[str, ...]:
    """Returns flags for 512-bit registers on x86-64. Feature rows fill them, but gcc does not use them by default.

    Without :data:`WIDE_MOVES`, gcc clears and copies arrays by 256 bits for many CPUs. A load of 512 bits that follows
    must wait until both halves are in the cache, since a CPU forwards only what one store wrote.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    return ("-mprefer-vector-width=512", *(WIDE_MOVES if _takes(compiler(), WIDE_MOVES) else ()))


@lru_cache(maxsize=8)
def _takes(command: tuple[str, ...], flags: tuple[str, ...]) -> bool:
    """Whether a compiler knows all flags."""
    tried = [*command, *flags, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(tried, input="", capture_output=True, text=True, check=False).returncode == 0


@lru_cache(maxsize=8)
def _version(command: tuple[str, ...]) -> str:
    return subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout


@lru_cache(maxsize=1)
def _cpu() -> str:
    """Returns the CPU properties that ``-march=native`` depends on, since several machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip(": ") in wanted}))


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _intact(path: Path) -> bool:
    """Whether the shared object exists, matches the checksum for its key, and only this user may write to it."""
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
    """Returns the checksum of a file's key and content. A file made for another key is rejected like a damaged file."""
    return hashlib.sha256(key.encode() + b"\0" + content).hexdigest()


def _build(command: tuple[str, ...], flags: tuple[str, ...], link: tuple[str, ...], source: str, path: Path) -> None:
    """Compiles `source` to `path`. Other processes see no file or the complete file.

    Raises:
        OSError: The file can't be written.
        UnsupportedRegion: The compiler rejects the source.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # The compiler reads stdin, and file names are fixed, so that equal sources give equal bytes.
        _run([*command, *flags, "-x", "c++", "-c", "-", "-o", "kernel.o"], folder, source)
        _run([*command, "-shared", "kernel.o", *link, "-o", "kernel.so"], folder, "")
        made, checksum = folder / "kernel.so", folder / "kernel.sha256"
        checksum.write_text(_checksum(path.stem, made.read_bytes()), encoding="ascii")
        for file in (made, checksum):
            file.chmod(0o600)  # independent of the user's umask
        os.replace(made, path)
        os.replace(checksum, _checksum_file(path))


def compile_to(command: list[str], source: str, path: Path) -> None:
    """Compiles `source` to the object file `path`.

    Args:
        command: The compiler and its flags.
        source: One translation unit.
        path: The file to write.

    Raises:
        OSError: The disk is full.
        UnsupportedRegion: The compiler rejects the source.
    """
    _run([*command, "-x", "c++", "-c", "-", "-o", str(path)], path.parent, source)


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
