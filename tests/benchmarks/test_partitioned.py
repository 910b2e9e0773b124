"""``python -m benchmarks partitioned``: halo rows of many parts, and a quick run in two processes."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from tests.e2e.test_distributed import torchrun


def test_halo_rows_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partitioned", "--count", "--cases", "small-grid"]) == 0
    lines = capsys.readouterr().out.splitlines()
    two = lines[3].split()
    # A mesh of 40 by 40 is cut between two rows: each part reads the 40 nodes of a row.
    assert two[:3] == ["2", "1.7%", "40"] and len(lines) == 3 + 10


def test_it_asks_for_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main(["partitioned", "--quick"]) == 2
    assert "torchrun" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run() -> None:
    written = torchrun("-m", "benchmarks", "partitioned", "--quick", "--device", "cpu", "--models", "GCN")
    assert "WRONG" not in written and written.count("GCN 16") == 4
