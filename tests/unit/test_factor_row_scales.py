"""Layers that read rows beside scaled copies of them scale what comes out: the same numbers, no copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch_geometric.nn import PNAConv

import gnncompile
from gnncompile.passes.analysis import aten, value
from tests.graphs import EDGE_LISTS
from tests.harness import light, look_at_graphs

ROWS, WIDTH, OUT = 7, 6, 4


@pytest.fixture
def widest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many columns the widest concatenation of each captured graph has that is no weight."""

    def look(graph: fx.Graph) -> list[int]:
        cats = graph.find_nodes(op="call_function", target=aten.cat.default)
        rows = [value(cat).shape for cat in cats if isinstance(value(cat).shape[0], torch.SymInt)]
        return [max((int(shape[-1]) for shape in rows), default=0)]

    return look_at_graphs(monkeypatch, look)


def results(model: nn.Module, inputs: list[Tensor]) -> list[Tensor | None]:
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    out = model(*leaves)
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    wanted = [t for t in (*leaves, *model.parameters()) if t.requires_grad]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True)]


def compare(model: nn.Module, *inputs: Tensor) -> None:
    exact = [t.double() if t.is_floating_point() else t for t in inputs]
    with light():
        found = results(gnncompile.compile(model, fullgraph=True), list(inputs))
    for a, b in zip(found, results(copy.deepcopy(model).double(), exact), strict=True):
        if b is not None and a is not None:
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
        else:
            assert a is b or not (b if a is None else a).any()  # type: ignore[union-attr]


PNA = [({}, 16), ({"towers": 2}, 16), ({"towers": 2, "divide_input": True}, 8), ({"train_norm": True}, 16)]
AWKWARD = "unsorted, duplicates, hub"


@pytest.mark.parametrize(
    "settings, columns, edges", [*((*one, AWKWARD) for one in PNA), *((*PNA[0], e) for e in EDGE_LISTS if e != AWKWARD)]
)
def test_pna(settings: dict[str, Any], columns: int, edges: str, widest: list[int]):
    """Four aggregations under three scalers: the four are concatenated, and not all twelve."""
    torch.manual_seed(0)
    aggregators, scalers = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
    conv = PNAConv(4, 4, aggregators, scalers, torch.tensor([1, 4, 3]), **settings)
    compare(conv, torch.randn(5, 4), EDGE_LISTS[edges].clone())
    assert widest == [columns]


class Scaled(nn.Module):
    """Reads ``[x, a, a * s, t * a]`` with `a` the sum over neighbours; `form` is what is different."""

    def __init__(self, form: str = "", width: int = OUT) -> None:
        super().__init__()
        self.form = form
        columns = {"no others": 3 * WIDTH, "one copy": 4 + WIDTH}.get(form, 4 + 3 * WIDTH)
        self.layer = nn.Linear(columns, width, bias=form != "no bias")

    def forward(self, x: Tensor, rows: Tensor, s: Tensor, t: Tensor, edges: Tensor) -> Tensor:
        a = torch.zeros_like(rows).index_add(0, edges[1], rows[edges[0]])
        copies = [a, a * s, t * a]
        if self.form == "one copy":
            copies = [a * s]
        elif self.form == "nested":
            copies = [torch.cat(copies, dim=1)]
        elif self.form == "wide factor":
            copies = [a, a * s.expand_as(a).sin(), t.expand_as(a).cos() * a]
        whole = torch.cat(copies if self.form == "no others" else [x, *copies], dim=-1)
        out = self.layer(whole)
        return out + whole.sum(-1, keepdim=True) if self.form == "read twice" else out


def arguments() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    edges = torch.stack([torch.arange(ROWS), torch.arange(ROWS).flip(0)])
    return [*(torch.randn(ROWS, n, generator=generator) for n in (4, WIDTH, 1, 1)), edges]


@pytest.mark.parametrize("form", ["", "no bias", "no others", "nested"])
def test_no_copy_is_made(form: str, widest: list[int]):
    compare(Scaled(form), *arguments())
    assert widest == [0]


@pytest.mark.parametrize("form", ["one copy", "wide factor", "read twice"])
def test_where_it_would_not_pay(form: str, widest: list[int]):
    compare(Scaled(form), *arguments())
    assert widest[0] > WIDTH


def test_layers_wider_than_what_is_copied(widest: list[int]):
    compare(Scaled(width=WIDTH + 1), *arguments())
    assert widest == [4 + 3 * WIDTH]


def test_two_bytes(widest: list[int]):
    """A sum of products would be rounded more often than one product."""
    model, inputs = Scaled().bfloat16(), [t.bfloat16() if t.is_floating_point() else t for t in arguments()]
    with light():
        torch.testing.assert_close(gnncompile.compile(model, fullgraph=True)(*inputs), model(*inputs))
    assert widest == [4 + 3 * WIDTH]


def test_infinite_rows_and_factors(widest: list[int]):
    """Results are finite where they were; of others an infinite factor makes infinities where eager has NaN too."""
    x, rows, s, t, edges = arguments()
    rows[0], s[1], t[2, 0], s[3] = float("inf"), float("inf"), float("nan"), 0.0
    model = Scaled()
    with light():
        found = gnncompile.compile(model, fullgraph=True)(x, rows, s, t, edges)
    expected = model(x, rows, s, t, edges)
    assert torch.equal(found.isfinite(), expected.isfinite()) and expected.isfinite().all(1).sum() == ROWS - 3
    torch.testing.assert_close(found[expected.isfinite()], expected[expected.isfinite()])
    assert widest == [0]
