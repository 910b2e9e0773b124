"""Compiles kernels to object files, which a linker puts into a package."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from gnncompile.codegen.cpp.compiler import FLAGS, compile_to, compiler, kernel_flags, wide_vectors
from gnncompile.device import available_cores

T = TypeVar("T")

_ENTRY = 'extern "C" int run('
"""How every kernel's source declares its entry point."""


def entry_name(source: str) -> str:
    """Returns the name of a kernel's function in a package: each source has its own."""
    return f"gnncompile_{hashlib.sha256(source.encode()).hexdigest()[:16]}"


def start_object(source: str, contract: bool, folder: str, cpu: str) -> Future[Path]:
    """Starts to compile a kernel to an object file. Its only symbol is that of :func:`entry_name`.

    Args:
        source: One C++17 translation unit with the entry point ``run``.
        contract: Whether the compiler may fuse a product and a sum into one rounding.
        folder: Where the object file is written.
        cpu: The CPU that the code is compiled for, as ``-march`` names it.

    Returns:
        The object file, once it is compiled; or the error :class:`UnsupportedRegion`.
    """
    return _builders().submit(_compile, source, contract, folder, cpu)


def _compile(source: str, contract: bool, folder: str, cpu: str) -> Path:
    name = entry_name(source)
    path = Path(folder) / f"{name}.o"
    flags = (*kernel_flags(contract), f"-march={cpu}", "-fvisibility=hidden")  # the last -march counts
    compile_to([*compiler(), *flags], source.replace(_ENTRY, f'extern "C" int {name}('), path)
    return path


def start_task(task: Callable[[], T]) -> Future[T]:
    """Starts another compile among those of kernels."""
    return _builders().submit(task)


def data_object(name: str, data: bytes, folder: str) -> Path:
    """Writes an object file that holds data, and returns its path. Its only symbol is `name`, an array of bytes."""
    path = Path(folder) / f"{name}.o"
    held = path.with_suffix(".bin")
    held.write_bytes(data)
    declared = [".pushsection .rodata", f".globl {name}", f".hidden {name}", ".balign 64"]
    lines = [*declared, f"{name}:", f'.incbin "{held}"', ".popsection"]
    text = "".join(f"        {json.dumps(line + chr(10))}\n" for line in lines)
    compile_to([*compiler(), "-fPIC"], f"__asm__(\n{text});\n", path)
    return path


def flags_text(cpu: str) -> str:
    """Returns the compiler's command of a kernel for a CPU as text, for the package's metadata."""
    flags = [f"-march={cpu}" if flag.startswith("-march=") else flag for flag in FLAGS]
    return shlex.join([*compiler(), *flags, *wide_vectors()])


@lru_cache(maxsize=1)
def _builders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cores(), "gnncompile-object")
