"""Two processes: ``DistributedDataParallel`` (tests/replicas.py, the examples), ``fully_shard`` (tests/shards.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs a torch with torch.distributed")


def torchrun(*command: str, timeout: float = 600) -> str:
    """Runs a command on two processes; returns what they wrote."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    running = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        written, _ = running.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        written, _ = running.communicate()
        pytest.fail(f"not done after {timeout} s:\n{written}")
    assert running.returncode == 0, written
    return written


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_processes(device: str, tmp_path: Path) -> None:
    """All checks within one start: gloo on CPUs and where both share a GPU, NCCL on two."""
    torchrun("-m", "tests.replicas", str(tmp_path), "--device", device)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [{}, {}], "\n".join(f"{name}:\n{error}" for each in found for name, error in each.items())


@pytest.mark.slow
def test_sharded_parameters(tmp_path: Path) -> None:
    """``fully_shard``: tests/shards.py."""
    torchrun("-m", "tests.shards", str(tmp_path), timeout=300)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [{}, {}], "\n".join(f"{name}:\n{error}" for each in found for name, error in each.items())


@pytest.mark.slow
def test_the_example() -> None:
    pytest.importorskip("sklearn")
    device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    written = torchrun("examples/distributed.py", "--quick", "--device", device)
    assert "2 processes" in written and "Losses agree" in written, written


@pytest.mark.slow
def test_the_example_of_sampled_training() -> None:
    device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    written = torchrun("examples/sampled_two_gpus.py", "--quick", "--device", device, timeout=300)
    assert "2 processes" in written and "One process has the same losses" in written, written
    losses = [float(found) for found in written.split("mean losses:")[1].splitlines()[0].split()]
    assert losses[-1] < 0.95 * losses[0]
