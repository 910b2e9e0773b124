"""The facts that belong to every measured number: machine, versions and command."""

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def describe(device: torch.device, command: Sequence[str]) -> dict[str, str]:
    """Returns the environment as names and values, in the order to print and store."""
    facts = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(command),
        "commit": _commit(),
        "cpu": f"{cpu_name()}, {_cores()} cores, torch threads {torch.get_num_threads()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        facts["float32 matmul"] = torch.get_float32_matmul_precision()
    facts["system"] = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    facts["torch"] = torch.__version__
    for package in ("triton", "torch-geometric", "numpy", "gnncompile"):
        facts[package] = _version(package)
    return facts


def machine_slug(device: torch.device) -> str:
    """Returns a folder name for this machine, for example `nvidia-h200` or `intel-xeon-platinum-8480-2cores`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()} {_cores()}cores"
    name = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|@", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def cpu_name() -> str:
    """Returns the processor's name as reported by the system."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return "unknown"
