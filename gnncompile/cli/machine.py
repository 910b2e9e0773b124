"""Checks of the machine: GPU, C++ compiler, cores, cache folder, and environment variables that slow models down."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from gnncompile.cli.finding import NOTE, OK, SLOW, WRONG, Finding
from gnncompile.cli.output import mebibytes
from gnncompile.codegen.cache_dir import VARIABLE, chosen, why_unusable
from gnncompile.codegen.cpp.compiler import compiler
from gnncompile.device import available_cores, is_on
from gnncompile.exc import UnsupportedRegion

OLDEST_GPU = (7, 0)
"""The lowest compute capability that Triton supports."""

LEAST_FREE = 256 * 2**20
"""Free bytes that the disk of the cache folder should have. A kernel takes about 50 KiB, Inductor's files megabytes."""

KERNELS = ("", "triton", "cpp", "reference")
"""The values that GNNCOMPILE_KERNELS may have."""


def gpu() -> Finding:
    """Checks whether there is a GPU and whether torch can use it."""
    import torch

    if torch.cuda.is_available():
        number = torch.cuda.device_count()
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        found = f"{number} x {name}, CUDA {torch.version.cuda}"
        if capability >= OLDEST_GPU or torch.version.hip:
            return Finding("GPU", OK, found)
        needs = ".".join(map(str, OLDEST_GPU))
        found = f"{found}: compute capability {capability[0]}.{capability[1]}, expected {needs} or more"
        return Finding("GPU", WRONG, found, 'Triton has no kernels for it: keep models on device "cpu"')
    there = _nvidia_smi()
    if not there:
        return Finding("GPU", NOTE, "none, which is fine: kernels are C++")
    if torch.version.cuda is None:
        what = f"{there}, but torch {torch.__version__} is a CPU build"
        return Finding("GPU", SLOW, what, "install a CUDA build of torch: https://pytorch.org/get-started")
    remedy = "update the NVIDIA driver, or unset CUDA_VISIBLE_DEVICES if it hides the GPU"
    return Finding("GPU", SLOW, f"{there}, but torch's CUDA {torch.version.cuda} can't use it", remedy)


def _nvidia_smi() -> str:
    """Returns the first GPU that ``nvidia-smi`` lists; "" if there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.splitlines()[0].split(" (UUID")[0] if done.returncode == 0 and done.stdout else ""


def cpp_compiler() -> Finding:
    """Checks the C++ compiler, which CPU kernels need."""
    remedy = "install g++ (on Debian and Ubuntu: apt install g++), or set CXX to a C++17 compiler"
    named = os.environ.get("CXX", "")
    try:
        command = compiler()
    except UnsupportedRegion:
        found = f"none: tried CXX={named!r}, g++, clang++; kernels on a CPU run by the slow reference interpreter"
        return Finding("C++ compiler", SLOW, found, remedy)
    if named and command != tuple(shlex.split(named)):
        found = f"CXX={named!r} can't be run, {shlex.join(command)} is taken instead"
        return Finding("C++ compiler", WRONG, found, "set CXX to a C++17 compiler, or unset it")
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        found = f"{shlex.join(command)} --version failed: {(done.stderr.splitlines() or ['no message'])[0]}"
        return Finding("C++ compiler", WRONG, found, remedy)
    return Finding("C++ compiler", OK, f"{shlex.join(command)}: {lines[0]}")


def cache_folder() -> Finding:
    """Checks the folder of compiled kernels."""
    folder = chosen()
    problem = why_unusable(folder)
    if problem:
        found = f"{folder}: {problem}; every process compiles all kernels anew"
        return Finding("cache folder", SLOW, found, f"set {VARIABLE} to a folder of this user alone (mode 700)")
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE:
        found = f"{folder}: {mebibytes(free)} free on its disk"
        return Finding("cache folder", WRONG, found, f"free some space there, or set {VARIABLE} to another folder")
    return Finding("cache folder", OK, str(folder))


def threads() -> Finding:
    """Compares the number of torch's threads with the number of cores."""
    import torch

    used = torch.get_num_threads()
    cores = available_cores()
    found = f"{used} of torch, {cores} cores for this process"
    if used > cores:
        return Finding("threads", SLOW, found, f"set OMP_NUM_THREADS={cores}")
    return Finding("threads", OK if used * 2 >= cores else NOTE, found)


def environment(gpu: bool) -> Iterator[Finding]:
    """Finds environment variables that prevent compilation or slow models down.

    Args:
        gpu: Whether there is a GPU that torch can use.
    """
    slow: dict[str, tuple[Any, str]] = {
        "TORCHDYNAMO_DISABLE": (is_on, "nothing is compiled"),
        "TORCH_COMPILE_DISABLE": (is_on, "nothing is compiled"),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": (is_on, "every process compiles anew"),
        "TRITON_INTERPRET": (lambda value: gpu and is_on(value), "GPU kernels run by Triton's interpreter"),
        "GNNCOMPILE_KERNELS": (
            lambda value: value == "reference" or (value == "triton" and not gpu),
            "kernels run by an interpreter",
        ),
    }
    for name, (is_slow, effect) in slow.items():
        value = os.environ.get(name, "")
        if is_slow(value):
            yield Finding(name, SLOW, f"{name}={value}: {effect}", f"unset {name}")
    value = os.environ.get("GNNCOMPILE_KERNELS", "")
    if value not in KERNELS:
        found = f"GNNCOMPILE_KERNELS={value}: not known, so it has no effect"
        yield Finding("GNNCOMPILE_KERNELS", WRONG, found, f"set it to {', '.join(KERNELS[1:])}, or unset it")
