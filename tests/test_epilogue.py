"""Row-wise arithmetic behind a reduction is part of its region: the same numbers, and not a byte more to write."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GINConv, MessagePassing

import gnncompile
from gnncompile.capture.compiled import program_of
from gnncompile.ir.region import Region, parse
from tests.harness import kernels

CHANNELS = 6
GRAPHS = {
    "unsorted, duplicates, hub": torch.tensor([[3, 0, 2, 0, 1, 4, 4, 0, 2], [0, 1, 0, 1, 0, 0, 2, 0, 3]]),
    "no edge": torch.empty(2, 0, dtype=torch.long),
    "one edge": torch.tensor([[2], [2]]),
}


class Sum(MessagePassing):
    """A sum over neighbours with something behind it."""

    def __init__(self, behind: Callable[[Sum, Tensor, Tensor], Tensor]) -> None:
        super().__init__(aggr="add")
        self.behind = behind
        self.bias = nn.Parameter(torch.randn(CHANNELS))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.behind(self, self.propagate(edge_index, x=x), x)


def _in_place(m: Sum, out: Tensor, x: Tensor) -> Tensor:
    out += m.bias
    return out * 2


FUSED: dict[str, tuple[Callable[[Sum, Tensor, Tensor], Tensor], str]] = {
    "bias": (lambda m, out, x: out + m.bias, "add"),
    "residual": (lambda m, out, x: x + out, "add"),
    "scaled residual": (lambda m, out, x: out + (1 + m.scale) * x, "add"),
    "a number": (lambda m, out, x: 0.5 * out - 1, "sub"),
    "rows and a column": (lambda m, out, x: out - x[:, :1] - m.bias, "sub"),
    "in place": (_in_place, "mul"),
}
"""What is behind the sum, and the operation that the region ends with."""

KEPT: dict[str, Callable[[Sum, Tensor, Tensor], Tensor]] = {
    "the sum is used twice": lambda m, out, x: (out + m.bias) * out,
    "the gradient reads the sum": lambda m, out, x: out * m.bias,
    "an activation that the gradient reads before": lambda m, out, x: torch.sigmoid(out),
    "a matrix product": lambda m, out, x: out @ x.t(),
}


def region_of(compiled: nn.Module) -> Region:
    program = program_of(compiled)
    assert program is not None
    (record,) = [r for c in program.backend.captured for r in c.record.regions]
    return parse(record.spec)


def gradients(model: nn.Module, x: Tensor, edge_index: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x, edge_index)
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *model.parameters()], allow_unused=True)]


def check(model: nn.Module, edge_index: Tensor, generator: str) -> nn.Module:
    torch._dynamo.reset()
    compiled = gnncompile.compile(model, fullgraph=True)
    x = torch.randn(5, CHANNELS)
    with kernels(generator):
        found = gradients(compiled, x, edge_index)
    expected = gradients(copy.deepcopy(model).double(), x.double(), edge_index)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    return compiled


@pytest.mark.parametrize("generator", ["cpp", "reference"])
@pytest.mark.parametrize("on", GRAPHS)
@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str, on: str, generator: str):
    torch.manual_seed(0)
    behind, last = FUSED[name]
    region = region_of(check(Sum(behind), GRAPHS[on], generator))
    assert [region.nodes[o.node].op for o in region.outputs] == [last]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FUSED)
def test_fused_in_triton(name: str):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("beside a GPU Triton is not interpreted")
    check(Sum(FUSED[name][0]), GRAPHS["unsorted, duplicates, hub"], "triton")


@pytest.mark.parametrize("name", KEPT)
def test_not_fused(name: str):
    torch.manual_seed(0)
    region = region_of(check(Sum(KEPT[name]), GRAPHS["unsorted, duplicates, hub"], "cpp"))
    assert [region.nodes[o.node].op for o in region.outputs] == ["reduce_sum"]


def test_more_is_fused_without_a_gradient():
    torch._dynamo.reset()
    model = Sum(lambda m, out, x: torch.sigmoid(out * m.bias))
    compiled = gnncompile.compile(model)
    x, edge_index = torch.randn(5, CHANNELS), GRAPHS["unsorted, duplicates, hub"]
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index))
    assert [region_of(compiled).nodes[o.node].op for o in region_of(compiled).outputs] == ["sigmoid"]


def test_switched_off():
    torch._dynamo.reset()
    model = Sum(FUSED["bias"][0])
    compiled = gnncompile.compile(model, options={"epilogues": False})
    compiled(torch.randn(5, CHANNELS), GRAPHS["one edge"])
    assert [region_of(compiled).nodes[o.node].op for o in region_of(compiled).outputs] == ["reduce_sum"]


@pytest.mark.parametrize("train_eps", [False, True])
@pytest.mark.parametrize("on", GRAPHS)
def test_gin(on: str, train_eps: bool):
    torch.manual_seed(0)
    model = GINConv(nn.Linear(CHANNELS, 4), eps=0.3, train_eps=train_eps)
    region = region_of(check(model, GRAPHS[on], "cpp"))
    assert [region.nodes[o.node].op for o in region.outputs] == ["add"]


def test_gcn_takes_its_bias():
    torch.manual_seed(0)
    compiled = check(GCNConv(CHANNELS, 4), GRAPHS["unsorted, duplicates, hub"], "cpp")
    program = program_of(compiled)
    assert program is not None
    regions = [parse(r.spec) for c in program.backend.captured for r in c.record.regions]
    assert [regions[-1].nodes[o.node].op for o in regions[-1].outputs] == ["add"]
