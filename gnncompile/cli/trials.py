"""Compiles and runs a small kernel with each generator, and a model with Inductor, each in its own process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from gnncompile.cli.finding import NOTE, OK, SLOW, WRONG, Finding
from gnncompile.cli.packages import installed
from gnncompile.cli.probe import MODEL, NATIVE
from gnncompile.codegen.cache_dir import VARIABLE, chosen, why_unusable

LIMIT = 300
"""Seconds after which a trial is stopped."""

REMEDIES = {
    "no C++ compiler found": "install g++ (on Debian and Ubuntu: apt install g++), or set CXX to a C++17 compiler",
    "Python.h": "install Python's headers (on Debian and Ubuntu: apt install python3-dev)",
    "failed to map segment": f"the disk of the cache folder forbids execution: set {VARIABLE} to another folder",
    "No space left": f"free some space, or set {VARIABLE} to another folder",
}
"""The remedy for each text that an error message may contain."""


@dataclass(frozen=True)
class Trial:
    """One trial, which runs in its own process.

    Attributes:
        name: Its name in the report.
        what: The first argument of :mod:`gnncompile.cli.probe`.
        device: The device to run on, "cpu" or "cuda".
        failed: The level of the finding if the trial fails.
        environment: Environment variables to set in addition to the user's.
    """

    name: str
    what: str
    device: str
    failed: str = WRONG
    environment: dict[str, str] = field(default_factory=dict)


def trials(gpu: bool, model: bool) -> list[Trial]:
    """Returns the trials for this machine.

    Args:
        gpu: Whether there is a GPU that torch can use.
        model: Whether to try a whole model, which takes Inductor half a minute the first time.
    """
    found = [Trial("kernel, C++", "cpp", "cpu", SLOW), Trial("kernel, reference", "reference", "cpu")]
    if gpu:
        found.append(Trial("kernel, Triton", "triton", "cuda", environment={"TRITON_INTERPRET": "0"}))
        found.append(Trial("host code of recordings, C++", NATIVE, "cpu", SLOW))
    elif installed("triton") is not None:
        # Only the tests need the interpreter, so its failure is no problem for the user.
        interpreted = {"TRITON_INTERPRET": "1"}
        found.append(Trial("kernel, Triton interpreted", "triton", "cpu", NOTE, interpreted))
    if model:
        found += [Trial(f"model on {device}", MODEL, device) for device in ("cpu", *["cuda"] * gpu)]
    return found


def run(what: Sequence[Trial]) -> Iterator[Finding]:
    """Runs the trials, a few at a time; yields their findings in the order of the trials."""
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
        yield from pool.map(_run, what)


def _run(trial: Trial) -> Finding:
    if trial.what == MODEL:
        return _judge(trial, _process(trial, dict(trial.environment)))
    # Cached kernels would hide that compilation fails, so the trial gets an empty folder on the same disk.
    folder = chosen()
    there = None if why_unusable(folder) else folder
    name = tempfile.mkdtemp(prefix="doctor-", dir=there)
    try:
        kernels = {"GNNCOMPILE_KERNELS": trial.what, VARIABLE: name, "TRITON_CACHE_DIR": name}
        return _judge(trial, _process(trial, {**trial.environment, **kernels}))
    finally:
        shutil.rmtree(name, ignore_errors=True)


def _process(trial: Trial, environment: dict[str, str]) -> tuple[bool, str]:
    """Runs a trial; returns whether it succeeded, and its time or its problem in words."""
    command = [sys.executable, "-m", "gnncompile.cli.probe", trial.what, trial.device]
    everything = {**os.environ, **environment}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
            env=everything,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return False, f"not done after {LIMIT} s"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        how = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        return False, f"{how}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    answer = json.loads(lines[-1])
    return answer["ok"], answer["message"] or f"right, compiled and run in {answer['seconds']:.1f} s"


def _judge(trial: Trial, answer: tuple[bool, str]) -> Finding:
    good, message = answer
    if good:
        return Finding(trial.name, OK, message)
    remedy = next((remedy for sign, remedy in REMEDIES.items() if sign in message), "")
    whole = f"python -m gnncompile.cli.probe {trial.what} {trial.device} --traceback"
    return Finding(trial.name, trial.failed, message, remedy or f"for the whole message: {whole}")
