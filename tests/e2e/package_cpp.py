"""The server of examples/serving, built once for all tests of packages."""

import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[2] / "examples" / "serving"


def server():
    """Returns the server's path, or skips the test."""
    cmake = shutil.which("cmake")
    if cmake is None or shutil.which("g++") is None:
        pytest.skip("needs cmake and g++")
    return _built(cmake)


@lru_cache(maxsize=1)
def _built(cmake):
    build = Path(tempfile.mkdtemp(prefix="gnncompile-server-"))
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run([cmake, "-S", SOURCE, "-B", build, prefix], check=True, capture_output=True)
    subprocess.run([cmake, "--build", build], check=True, capture_output=True)
    return build / "server"


def serve_in_cpp(path, calls, folder, *options):
    """Runs calls in the server. Returns for each call its tensors or the error's text, and the finished process."""
    torch.save([list(call) for call in calls], folder / "requests.pt")
    command = [server(), path, folder / "requests.pt", folder / "answers.pt", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return torch.load(folder / "answers.pt", weights_only=False), done
