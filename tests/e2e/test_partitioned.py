"""One graph on several processes: the checks of tests/partitioned.py, and a process that ends."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

import gnncompile
from gnncompile.exc import PartitionError
from tests.e2e.test_distributed import torchrun
from tests.partitioned import CHECKS, Here, graph, raises, spawned

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs a torch with torch.distributed")

QUICK = ("hetero_model", "awkward_graphs", "different_graphs")
RECORDED_QUICK = (
    "steps_of_sage",
    "parts_change_in_one_rank",
    "captures_fail_in_one_rank",
    "groups_end",
)


def run(size: int, names: tuple[str, ...], out: Path, inductor: bool = False, recorded: bool = False) -> None:
    """Runs checks in spawned processes."""
    given = size, str(out), names, inductor, recorded
    multiprocessing.spawn(spawned, given, nprocs=size)  # type: ignore[no-untyped-call]
    found = [json.loads((out / f"{rank}.json").read_text()) for rank in range(size)]
    assert found == [{}] * size, "\n".join(f"{name}:\n{error}" for each in found for name, error in each.items())


def test_two_processes(tmp_path: Path) -> None:
    run(2, QUICK, tmp_path)


def test_two_processes_with_inductor(tmp_path: Path) -> None:
    run(2, ("own_edges_are_walked_first", "rows_are_kept_once", "checkpoints"), tmp_path, inductor=True)


def test_two_processes_record(tmp_path: Path) -> None:
    run(2, RECORDED_QUICK, tmp_path, recorded=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_all_recorded(size: int, tmp_path: Path) -> None:
    run(size, (), tmp_path, recorded=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_all_models(size: int, tmp_path: Path) -> None:
    run(size, tuple(CHECKS), tmp_path)


@pytest.mark.slow
def test_with_inductor(tmp_path: Path) -> None:
    names = ("gcn", "gin", "gat", "rgcn", "awkward_graphs", "reductions_over_nodes", "features_have_room", "poisoned")
    run(2, names, tmp_path, inductor=True)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--recorded",)])
def test_on_two_gpus(more: tuple[str, ...], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torchrun("-m", "tests.partitioned", str(tmp_path), "--device", "cuda", "--inductor", *more)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [{}, {}], "\n".join(f"{name}:\n{error}" for each in found for name, error in each.items())


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    written = torchrun("examples/partitioned.py", "--quick", "--device", "cpu", "--folder", str(tmp_path))
    assert "One process has the same losses" in written


def ends(rank: int, folder: str) -> None:
    """Rank 1 ends before its second step. Rank 0 must get an error within the time-out."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=10)
    )
    here = Here(rank, 2, torch.device("cpu"), dist.device_mesh.init_device_mesh("cpu", (2,)), False)
    part, compiled = here.part(graph()), here.compile(here.model("sage"))
    compiled(part.data.x, part.data.edge_index)
    if rank == 1:
        os._exit(0)
    start = time.monotonic()
    raises(PartitionError, "rank 0 of 2: an exchange of halo rows failed", compiled, part.data.x, part.data.edge_index)
    Path(folder, "seconds").write_text(str(time.monotonic() - start))
    os._exit(0)


@pytest.mark.slow
def test_a_process_that_ends_is_an_error_in_the_others(tmp_path: Path) -> None:
    multiprocessing.spawn(ends, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    assert float((tmp_path / "seconds").read_text()) < 30


def test_a_mesh_is_checked() -> None:
    with pytest.raises(TypeError, match="mesh: found str, expected a DeviceMesh"):
        gnncompile.compile(torch.nn.Linear(2, 2), mesh="cuda")  # type: ignore[call-overload]
