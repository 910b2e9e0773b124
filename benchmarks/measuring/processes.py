"""Runs a part of a benchmark in a process of its own, which may die or hang without an end of the benchmark.

Such a process is a module of this folder. Its arguments are its settings in JSON, and the file for its result.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.measuring.environment import ROOT
from benchmarks.measuring.errors import first_line

TOLD_LINES = 20
"""The last lines of a failed process that are shown."""


class ProcessError(Exception):
    """A process ended without a result; the text is one line."""


def run(module: str, settings: Mapping[str, Any], seconds: float) -> Any:
    """Runs a module of this folder, and returns its result.

    Args:
        module: the name of the module.
        settings: what `serve_process` passes on, numbers, text and lists.
        seconds: after this time the process is killed, with all processes that it started.

    Raises:
        ProcessError: it took too long, died or had an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        command = [sys.executable, "-m", f"benchmarks.measuring.{module}", json.dumps(dict(settings)), str(result)]
        with log.open("w") as file:
            started = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
            try:
                status = started.wait(seconds)
            except subprocess.TimeoutExpired:
                raise ProcessError(f"took longer than {seconds:g} s") from None
            finally:
                _end(started)
        told = json.loads(result.read_text()) if result.exists() else {}
        if "result" in told:
            return told["result"]
        lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
        print("\n".join(lines[-TOLD_LINES:]), file=sys.stderr, flush=True)
        raise ProcessError(told.get("error", f"exit status {status}: {lines[-1]}"))


def _end(started: "subprocess.Popen[bytes]") -> None:
    kill_session(started.pid)
    started.wait()


def kill_session(pid: int) -> None:
    """Kills the processes that are left of a session, which the process `pid` began."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main(work: Callable[[dict[str, Any]], Any]) -> int:
    """Runs such a process: writes the result of its work, or the first line of the error. Returns the exit status."""
    settings, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    try:
        told = {"result": work(settings)}
    except Exception as error:
        traceback.print_exc()
        told = {"error": first_line(error)}
    path.write_text(json.dumps(told))
    return int("error" in told)
