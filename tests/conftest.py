"""Settings and fixtures of all tests: Triton's interpreter on machines without an NVIDIA GPU, and the device.

On a machine without an NVIDIA GPU, tests marked `gpu` are reported as skipped.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests import interpreter

if torch.cuda.is_available():
    # cuBLAS reads this at its first handle. Without it, torch.use_deterministic_algorithms refuses matrix products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
else:
    # Triton reads this at its first import. gnncompile imports torch._dynamo, which imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter.round_to_nearest()


SLOW = Path(__file__).with_name("slow.txt")
"""The node ids of tests that `make test` leaves out: see tests/slow.py."""


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
    """Notes tests in which a capture failed: such a test would compare eager's results with themselves, and pass.

    A test that expects a capture to fail catches the warning, which then does not come here.
    """
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
    """Records CUDA graphs on a GPU, and tapes on a CPU. The C++ extension is built before the test starts."""
    from gnncompile.cudagraphs import native  # imports Triton, so not before TRITON_INTERPRET is set
    from tests.tape import tapes

    assert not native.wait()

    torch._dynamo.reset()
    with tapes() if device == "cpu" else nullcontext():
        yield
    torch._dynamo.reset()
