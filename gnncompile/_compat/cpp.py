"""Compiler and linker flags for a C++ extension module of Python that uses torch's own types."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


def extension_flags() -> tuple[str, ...]:
    """Returns the compiler's flags. From torch 2.13 on, torch's headers need C++20."""
    include = Path(torch.__file__).parent / "include"
    folders = (include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include"))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return ("-std=c++20", "-O2", "-fPIC", "-w", abi, *(f"-I{folder}" for folder in folders))


def extension_libraries() -> tuple[str, ...]:
    """Returns the linker's flags: torch's libraries, which the process has loaded already."""
    folder = Path(torch.__file__).parent / "lib"
    return (f"-L{folder}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10")
