"""What all tests share: Triton's interpreter where there is no NVIDIA GPU, and the device to run on.

Tests marked `gpu` are skipped, and said to be, where there is no NVIDIA GPU.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

if torch.cuda.is_available():
    # Read when cuBLAS makes its first handle; without it torch.use_deterministic_algorithms refuses products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
else:
    # Read when Triton is first imported, which torch._dynamo does, and with it gnncompile.
    os.environ["TRITON_INTERPRET"] = "1"


SLOW = Path(__file__).with_name("slow.txt")
"""Node ids of tests that `make test` leaves out: see tests/slow.py."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/kernels/golden anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = set(SLOW.read_text(encoding="utf-8").splitlines()) if SLOW.exists() else set()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


_fell_back: list[str] = []


def pytest_warning_recorded(warning_message: warnings.WarningMessage, nodeid: str) -> None:
    """A test that expects a capture to fail catches the warning; any other would pass with eager's own numbers."""
    told = str(warning_message.message)
    if told.startswith("gnncompile") and "a capture failed" in told:
        _fell_back.append(f"{nodeid}: {told}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _fell_back and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _fell_back:
        terminalreporter.write_line(f"FELL BACK {line}", red=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def recording(device: str) -> Iterator[None]:
    """Recordings are CUDA graphs on a GPU, and tapes on a CPU; the host's code in C++ is there from the beginning."""
    from gnncompile.cudagraphs import native  # only now, as Triton is told above how to run
    from tests.tape import tapes

    assert not native.wait()

    torch._dynamo.reset()
    with tapes() if device == "cpu" else nullcontext():
        yield
    torch._dynamo.reset()
