"""``python -m benchmarks sampled``: rows are checked before they are timed, and wrong mini-batches are found."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.cases.sampled import CASES, graph, neighbour_loader, sampled_by_numpy
from benchmarks.commands.sampled import CHECKED_STEPS, Measurement, format_case, problem, record
from benchmarks.measuring.losses import Loss, Step
from benchmarks.rows.sampled import ROWS, SampledRow
from tests import triton_regions
from tests.e2e.test_distributed import torchrun
from tests.harness import light

pytestmark = pytest.mark.filterwarnings("ignore:.*without a 'pyg-lib' installation")

SMALL = CASES[-1]


CPU_ROWS = [row for row in ROWS if "cpu" in row.devices]
PYG_LOOP = next(row for row in ROWS if row.name == "eager + PyG's loop")


def test_rows_are_checked_and_compared() -> None:
    def others(case: object, device: object, workers: int) -> list[object]:
        found = list(sampled_by_numpy(SMALL, 0))
        for batch in found:
            batch.x = batch.x + 1
        return found

    def missing(case: object, device: object, workers: int) -> list[object]:
        raise ValueError("no loader")

    wrong = SampledRow("wrong", ROWS[0].make, others)  # type: ignore[arg-type]
    failed = SampledRow("failed", ROWS[0].make, missing)  # type: ignore[arg-type]
    with light():
        results = Measurement(SMALL, [*CPU_ROWS, PYG_LOOP, wrong, failed], 1, 0, 0, lambda message: None).run()
    assert [result.status for result in results] == ["ok", "ok", "ok", "ok", "WRONG", "FAILED"]
    for result in results[:4]:
        assert result.epoch_s is not None and result.loading_s is not None
        assert result.edges is not None and result.edges > SMALL.batch_size
        assert result.accuracy is not None and result.accuracy > 0.5
        assert (result.edge_ns is not None) == (result.row is not PYG_LOOP)
        assert record(SMALL, result, results)["epoch_over_first"] > 0
    assert "features or labels are those of other nodes" in format_case(results)
    assert "failed: FAILED: ValueError: no loader" in format_case(results)


def test_a_model_that_learns_nothing_is_wrong() -> None:
    """A step that returns the right losses, and then trains no more."""

    def make(model: torch.nn.Module, loss: Loss) -> Step:
        step, steps = ROWS[0].make(model, loss), iter(range(CHECKED_STEPS))
        return lambda inputs, target: (
            step(inputs, target) if next(steps, None) is not None else loss(model(*inputs), target).detach()
        )

    (result,) = Measurement(SMALL, [SampledRow("lazy", make, ROWS[0].load)], 1, 0, 0, lambda message: None).run()
    assert result.status == "WRONG" and "expected 0.5 or more" in result.message
    assert result.epoch_s is None


def test_wrong_mini_batches_are_found() -> None:
    for batch in (next(iter(sampled_by_numpy(SMALL, 0))), _ours()):
        assert problem(SMALL, batch) == ""
        twice = copy.copy(batch)
        twice.n_id = batch.n_id.clone()
        twice.n_id[0] = batch.n_id[1]
        assert problem(SMALL, twice) == "a node occurs twice"
        missing = copy.copy(batch)
        missing.edge_index = batch.edge_index[:, batch.edge_index[1] != 0]
        has_neighbours = bool((graph(SMALL).edge_index[1] == batch.n_id[0]).any())
        assert (problem(SMALL, missing) == "a seed has too few or too many neighbours") == has_neighbours
        foreign = copy.copy(batch)
        foreign.edge_index = torch.cat([batch.edge_index, torch.zeros(2, 1, dtype=torch.long)], 1)
        assert problem(SMALL, foreign) != ""


def _ours() -> object:
    import gnncompile

    return next(iter(gnncompile.loader(neighbour_loader(SMALL, 0))))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, for padded lanes in Triton's interpreter
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=triton_regions.GPU, id=row.name) for row in ROWS if "cuda" in row.devices]
)
def test_rows_of_gpus_load_right_mini_batches(row: SampledRow) -> None:
    batch = next(iter(row.load(SMALL, torch.device(triton_regions.DEVICE), 0)))
    assert problem(SMALL, batch) == "" and int(batch.batch_size) == SMALL.batch_size
    assert batch.x.device.type == triton_regions.DEVICE


def test_samplers_alone() -> None:
    results = Measurement(SMALL, ROWS, 2, 0, 0, lambda message: None).run_alone()
    assert [result.row.name for result in results] == ["eager + NumPy", "eager + our sampler", "gnncompile"]
    assert all(result.edge_ns > 0 and result.epoch_s is None for result in results)  # type: ignore[operator]
    assert "ns per edge" in format_case(results)


def test_other_devices_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sampled", "--quick", "--device", "meta"]) == 2
    assert "expected cpu or cuda: no row trains on another device" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run_on_two_processes() -> None:
    written = torchrun("-m", "benchmarks", "sampled", "--quick", "--device", "cpu")
    assert "on 2 processes" in written and "eager + our sampler" in written and "WRONG" not in written
    assert "4, 2" in written  # mini-batches of an epoch: of one process, and of each of two
