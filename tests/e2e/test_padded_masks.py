"""Losses and models that select rows by a mask, on padded mini-batches. On a CPU tapes stand in for CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, SAGEConv, global_add_pool

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.passes.padded import masked_reductions

pytestmark = pytest.mark.usefixtures("recording")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(5, 8), SAGEConv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).tanh(), edge_index)  # type: ignore[no-any-return]


def one_graph(nodes: int, edges: int, share: float, g: torch.Generator) -> Data:
    ends = torch.randint(nodes, (2, edges), generator=g)
    made = Data(x=torch.randn(nodes, 5, generator=g, dtype=torch.float64), edge_index=ends)
    made.y = torch.randint(3, (nodes,), generator=g)
    made.train_mask = torch.rand(nodes, generator=g) < share
    made.other_mask = torch.rand(nodes, generator=g) < 0.5
    made.edge_mask = torch.rand(edges, generator=g) < 0.5
    made.norm = torch.rand(nodes, generator=g, dtype=torch.float64)
    return made


def graphs() -> list[Data]:
    """Masks of none, of all, and of some; no edge; one node."""
    g = torch.Generator().manual_seed(0)
    pairs = (
        [(9, 20, 0.5), (7, 0, 0.5)],
        [(5, 9, 1.0), (1, 1, 1.0)],
        [(12, 40, 0.2), (6, 12, 0.0)],
        [(8, 8, 0.7), (10, 30, 0.4)],
    )
    return [one_graph(*shape, g) for pair in pairs * 5 for shape in pair]


def batches() -> DataLoader:
    return DataLoader(graphs(), batch_size=2)


def target_of(one: Any) -> dict[str, Any]:
    return {
        "y": one.y,
        "mask": one.train_mask,
        "other": one.other_mask,
        "edge_mask": one.edge_mask,
        "edges": one.edge_index,
        "norm": one.norm,
    }


Target = dict[str, Any]


def selected(out: Tensor, t: Target) -> Tensor:
    return F.cross_entropy(out[t["mask"]], t["y"][t["mask"]])


def sampled_by_saint(out: Tensor, t: Target) -> Tensor:
    loss = F.nll_loss(out.log_softmax(-1), t["y"], reduction="none")
    return (loss * t["norm"])[t["mask"]].sum()


def two_masks(out: Tensor, t: Target) -> Tensor:
    one, other = out[t["mask"]].square().sum(), F.l1_loss(out[t["other"]], torch.zeros_like(out[t["other"]]))
    return one + 2 * other


def calculated(out: Tensor, t: Target) -> Tensor:
    mask = t["mask"] & (t["y"] > 0)
    return F.mse_loss(out[mask][:, 0], t["norm"][mask], reduction="sum")


def with_accuracy(out: Tensor, t: Target) -> tuple[Tensor, Tensor, Tensor]:
    mask = t["mask"]
    right = (out[mask].argmax(-1) == t["y"][mask]).sum()
    return F.cross_entropy(out[mask], t["y"][mask], reduction="sum"), right, mask.sum()


def of_size(out: Tensor, t: Target) -> Tensor:
    chosen = out[t["mask"]]
    return chosen.square().sum() / chosen.size(0)


def of_edges(out: Tensor, t: Target) -> Tensor:
    row, col = t["edges"]
    scores = (out[row] * out[col]).sum(-1)
    return F.binary_cross_entropy_with_logits(scores[t["edge_mask"]], t["norm"][row][t["edge_mask"]], reduction="sum")


def spread(out: Tensor, t: Target) -> Tensor:
    chosen = out[t["mask"]]
    return chosen.sum() + (chosen - chosen.sum(0)).square().sum()


def selects_nothing(out: Tensor, t: Target) -> Tensor:
    mask = t["mask"] & (t["y"] > 2)
    chosen = F.l1_loss(out[mask][:, 0], t["norm"][mask], reduction="sum")
    return out[mask].square().sum() + out[:, 0].square().sum() + chosen


def equal_masks(out: Tensor, t: Target) -> Tensor:
    chosen = F.cross_entropy(out[t["y"] > 0], t["y"][t["y"] > 0], reduction="sum")
    others = F.cross_entropy(out[~t["mask"] & (out[:, 0] < 1)], t["y"][~t["mask"] & (out[:, 0] < 1)], reduction="sum")
    return chosen + 2 * others


PADDED = (selected, sampled_by_saint, two_masks, calculated, with_accuracy, of_size, of_edges, spread, selects_nothing)


def first_rows(out: Tensor, t: Target) -> Tensor:
    return out[t["mask"]][:1].sum()


def joined(out: Tensor, t: Target) -> Tensor:
    return torch.cat([out[t["mask"]], out[t["other"]]]).square().sum()


def counted_by_class(out: Tensor, t: Target) -> Tensor:
    return (out.new_zeros(3, 3).index_add(0, t["y"][t["mask"]], out[t["mask"]]) ** 2).sum()


def selected_by_two(out: Tensor, t: Target) -> Tensor:
    """Other operations for the same: that they select as many rows is not seen."""
    return F.cross_entropy(out[t["y"] > 0], t["y"][t["y"] >= 1], reduction="sum")


UNPADDED = (first_rows, joined, counted_by_class, selected_by_two)
"""Right on mini-batches without padding."""


def compare(device: str, loss: Callable[..., Any]) -> gnncompile.TrainStep:
    torch.manual_seed(0)
    model = Net().double().to(device)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    step = gnncompile.TrainStep(model, loss, optimizers[0], options={"inductor": device != "cpu"})
    for one, true in zip(gnncompile.loader(batches(), device, buckets=2), batches(), strict=True):
        found = step(one.x, one.edge_index, target=target_of(one))
        optimizers[1].zero_grad()
        true = true.to(device)
        expected = loss(plain(true.x, true.edge_index), target_of(true))
        first = expected[0] if isinstance(expected, tuple) else expected
        first.backward()
        optimizers[1].step()
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8, equal_nan=True)
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-8, atol=1e-8)
    return step


@pytest.mark.parametrize("loss", PADDED)
def test_losses_of_selected_rows(device: str, loss: Callable[..., Any]) -> None:
    step = compare(device, loss)
    assert not step._program.backend.notes and step.not_recorded is None
    assert sum(len(plan.recordings.recorded) for plan in step._plans) > 0


def test_masks_that_are_made_twice(device: str) -> None:
    """Older releases of torch ask while they trace whether both select as many rows, which nobody knows there."""
    step = compare(device, equal_masks)
    assert not step._program.backend.notes or torch.__version__ < "2.13"


@pytest.mark.filterwarnings("ignore:gnncompile.*scatter op")  # torch 2.11 loses the size of a slice of selected rows
@pytest.mark.parametrize("loss", UNPADDED)
def test_what_has_no_padded_form(device: str, loss: Callable[..., Any]) -> None:
    step = compare(device, loss)
    assert any("padding" in note.what for note in step._program.backend.notes)


class Mean(nn.Module):
    """What a model says of the rows that it selects itself."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.net, self.what = Net(), what

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, mask: Tensor) -> Tensor:
        out = self.net(x, edge_index)
        if self.what == "sum":
            return out[mask].sigmoid().sum(0)
        if self.what == "rows":
            return out[mask]
        return global_add_pool(out[mask], batch[mask], 2)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("what", "is_padded"), [("sum", True), ("rows", False), ("pool", False)])
def test_models_that_select(device: str, what: str, is_padded: bool) -> None:
    torch.manual_seed(0)
    model = Mean(what).double().to(device)
    compiled = gnncompile.compile(model, mode="reduce-overhead", options={"inductor": device != "cpu"})
    for one, true in zip(gnncompile.loader(batches(), device, buckets=2), batches(), strict=True):
        true = true.to(device)
        found = compiled(one.x, one.edge_index, one.batch, one.train_mask)
        expected = model(true.x, true.edge_index, true.batch, true.train_mask)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
        ours, theirs = (torch.autograd.grad(r.square().sum(), list(model.parameters())) for r in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    program = callable_of(compiled)
    assert program is not None and (not program.backend.notes) == is_padded


@pytest.mark.parametrize("mask", [[True, False, True, True], [False, False], [True], [False, True, False]])
def test_places(device: str, mask: list[bool]) -> None:
    given = torch.tensor(mask, device=device)
    found = masked_reductions.places(given, 2).squeeze(1)
    expected = [*given.nonzero().view(-1).tolist(), *(~given).nonzero().view(-1).tolist(), 0, 0]
    assert found.tolist() == expected


def test_a_model_writes_to_a_dict_and_a_list(device: str) -> None:
    """What it writes there has no padding."""

    class Writes(Net):
        def forward(self, x: dict[str, Tensor], edge_index: Tensor, rows: list[Tensor]) -> Tensor:  # type: ignore[override]
            x["out"] = super().forward(x["x"], edge_index)
            rows.append(2 * x["out"])
            return x["out"].sum(-1)

    model = Writes().double().to(device)
    compiled = gnncompile.compile(model, mode="reduce-overhead", options={"inductor": device != "cpu"})
    for one, true in zip(gnncompile.loader(batches(), device, buckets=2), batches(), strict=True):
        calls = []
        for run, data in ((model, true.to(device)), (compiled, one)):
            x, rows = {"x": data.x}, list[Tensor]()
            run(x, data.edge_index, rows)
            calls.append((x["out"].detach().clone(), rows[0].detach().clone()))
        torch.testing.assert_close(calls[1], calls[0])
    program = callable_of(compiled)
    assert program is not None and not program.backend.notes and len(program.backend.captured) == 1
