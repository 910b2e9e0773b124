"""``python -m benchmarks sampled``: rows are checked before they are timed, and wrong mini-batches are found."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.cases.sampled import CASES, graph, neighbour_loader, sampled_by_numpy
from benchmarks.commands.sampled import ROWS, SampledRow, _Measurement, format_case, problem, record
from tests.harness import light

pytestmark = pytest.mark.filterwarnings("ignore:.*without a 'pyg-lib' installation")

SMALL = CASES[-1]


def test_rows_are_checked_and_compared() -> None:
    def others(case: object, workers: int) -> list[object]:
        found = list(sampled_by_numpy(SMALL, 0))
        for batch in found:
            batch.x = batch.x + 1
        return found

    wrong = SampledRow("wrong", ROWS[0].make, others, ROWS[0].alone)  # type: ignore[arg-type]
    with light():
        results = _Measurement(SMALL, [*ROWS, wrong], 1, 0, 0, lambda message: None).run()
    assert [result.status for result in results] == ["ok", "ok", "ok", "WRONG"]
    for result in results[:3]:
        assert result.epoch_s is not None and result.loading_s is not None
        assert result.edge_ns is not None and result.edges is not None and result.edges > SMALL.batch_size
        assert record(SMALL, result, results)["edge_over_first"] > 0
    assert "features or labels are those of other nodes" in format_case(results)


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


def test_other_devices_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sampled", "--quick", "--device", "meta"]) == 2
    assert "expected cpu: no row samples for another device yet" in capsys.readouterr().err
