"""``python -m benchmarks minibatch``: its sampler, and that rows are checked before they are timed."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch_geometric.data import Data

from benchmarks.cases.minibatches import (
    CASES,
    GraphClassifier,
    MiniBatchCase,
    NeighbourSampler,
    NodeClassifier,
    _graphs,
    _of_graph,
    molecules,
)
from benchmarks.commands.minibatch import ROWS, MiniBatchRow, _Measurement, _plain, format_case, record
from benchmarks.measuring.comparison import Options
from benchmarks.measuring.losses import plain_loop
from tests.harness import light


def test_sampled_neighbourhoods() -> None:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(50, (2, 400), generator=generator)
    labels = torch.arange(50)
    data = NeighbourSampler(edges, 50, (3, 2), labels)([4, 9, 17])
    assert data.n_id[:3].tolist() == [4, 9, 17] and data.batch_size == 3
    assert len(data.n_id.unique()) == data.num_nodes == len(data.n_id) and torch.equal(data.y, data.n_id)
    known = set(map(tuple, edges.t().tolist()))
    assert {(int(data.n_id[s]), int(data.n_id[t])) for s, t in data.edge_index.t()} <= known
    assert int(data.edge_index[1].bincount()[:3].max()) <= 3


def test_rows_of_seeds() -> None:
    """One model, whose rows are cut by its caller or by itself; both come to the same loss."""
    cut_outside, cut_inside = (case for case in CASES if case.name.startswith("sampled"))
    features = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    model = NodeClassifier(features, 8, 2, 3)
    data = Data(edge_index=torch.randint(6, (2, 30)), n_id=torch.arange(7, 13), y=torch.arange(6) % 3, batch_size=4)
    all_rows, few_rows = model(*cut_outside.arguments(data)), model(*cut_inside.arguments(data))
    assert all_rows.shape == (6, 3) and torch.equal(all_rows[:4], few_rows)
    assert cut_outside.loss(all_rows, cut_outside.target(data)) == cut_inside.loss(few_rows, cut_inside.target(data))


def _case() -> MiniBatchCase:
    return MiniBatchCase(
        "tiny",
        "4 molecules",
        lambda: GraphClassifier(32, 8, 2, 8),
        partial(_graphs, partial(molecules, 64), 4),
        _of_graph,
        lambda data: data.y,
        kept=2,
    )


def test_rows_are_checked_and_compared() -> None:
    rows = [row for row in ROWS if row.name in ("eager", "gnncompile")]
    rows.append(MiniBatchRow("wrong", plain_loop(_Off), _plain))
    how = Options(seconds=0.05, rounds=1)
    with light():
        results = _Measurement(_case(), rows, torch.device("cpu"), how, 3, 0, lambda message: None).run()
    assert [result.status for result in results] == ["ok", "ok", "WRONG"]
    for result in results[:2]:
        assert result.timing is not None and result.loop_ms is not None and result.recompiles == 0
    assert "losses differ" in format_case(results)
    assert record(_case(), results[1], results)["step_over_eager"] > 0


class _Off(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Data) -> torch.Tensor:
        out: torch.Tensor = self.model(*inputs)
        return out * 1.5
