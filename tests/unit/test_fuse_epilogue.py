"""Row-wise arithmetic behind a reduction is part of its region, forward and backward, with the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, MessagePassing, SAGEConv, VarAggregation
from torch_geometric.utils import softmax

import gnncompile
from gnncompile.ir.region import BOOL, Region, parse
from tests.graphs import EDGE_LISTS
from tests.harness import kernels, launched, needs_interpreter

CHANNELS = 6
HUB = EDGE_LISTS["unsorted, duplicates, hub"]


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
    "rows and a column": (lambda m, out, x: out - x[:, :1].contiguous() - m.bias, "sub"),
    "in place": (_in_place, "mul"),
    "bias and activation": (lambda m, out, x: torch.relu(out + m.bias), "where"),
    "an axis of one more": (lambda m, out, x: torch.tanh(out.unsqueeze(1) + m.bias), "tanh"),
    "one column of heads": (lambda m, out, x: out.view(-1, 1, CHANNELS) * 2 + x.unsqueeze(1), "add"),
}
"""What is behind the sum, and the operation that the region ends with."""

KEPT: dict[str, Callable[[Sum, Tensor, Tensor], Tensor]] = {
    "the sum is used twice": lambda m, out, x: (out + m.bias) * out,
    "the gradient reads the sum": lambda m, out, x: out * m.bias,
    "a matrix product": lambda m, out, x: out @ x.t(),
    "rows in another order": lambda m, out, x: out.t() + x.t(),
    "channels as heads": lambda m, out, x: out.view(-1, 2, 3) + m.bias.view(2, 3),
    "an operand in columns": lambda m, out, x: out + x.t().contiguous().t(),
    "rows become wider": lambda m, out, x: out.unsqueeze(2) + m.bias,
}


def last_ops(specs: list[str]) -> list[str]:
    """The operation that the first output of each region ends with."""
    regions = [parse(spec) for spec in specs]
    return [region.nodes[region.outputs[0].node].op for region in regions]


def gradients(model: nn.Module, x: Tensor, edge_index: Tensor) -> tuple[list[Tensor | None], list[str], list[str]]:
    """The output and all gradients; the regions launched in the forward and in the backward."""
    x = x.clone().requires_grad_()
    with launched() as forward:
        out = model(x, edge_index)
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    with launched() as backward:
        found = torch.autograd.grad((out * weight).sum(), [x, *model.parameters()], allow_unused=True)
    return [out, *found], forward, backward


def check(model: nn.Module, edge_index: Tensor, generator: str, **options: Any) -> tuple[list[str], list[str]]:
    torch._dynamo.reset()
    return compare(model, gnncompile.compile(model, fullgraph=True, options=options), edge_index, generator)


def compare(model: nn.Module, compiled: nn.Module, edge_index: Tensor, generator: str) -> tuple[list[str], list[str]]:
    """The regions launched in the forward and in the backward."""
    x = torch.randn(5, CHANNELS)
    with kernels(generator):
        found, forward, backward = gradients(compiled, x, edge_index)
    expected, _, _ = gradients(copy.deepcopy(model).double(), x.double(), edge_index)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    return forward, backward


@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str):
    """One graph after the other in the same code."""
    torch.manual_seed(0)
    behind, last = FUSED[name]
    torch._dynamo.reset()
    model = Sum(behind)
    compiled = gnncompile.compile(model, fullgraph=True)
    for edge_index in EDGE_LISTS.values():
        forward, _ = compare(model, compiled, edge_index, "cpp")
        assert last_ops(forward) == [last]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FUSED)
def test_fused_in_triton(name: str):
    pytest.importorskip("triton")
    needs_interpreter("triton")
    check(Sum(FUSED[name][0]), HUB, "triton")


@pytest.mark.parametrize("name", KEPT)
def test_not_fused(name: str):
    torch.manual_seed(0)
    forward, _ = check(Sum(KEPT[name]), HUB, "cpp")
    assert last_ops(forward) == ["reduce_sum"]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(CHANNELS, CHANNELS), SAGEConv(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("on", EDGE_LISTS)
def test_a_product_is_added_behind_the_last_sum_in_triton(on: str):
    """In the memory of the sum: one matrix less is alive than if the region read it."""
    pytest.importorskip("triton")
    needs_interpreter("triton")
    torch.manual_seed(0)
    with torch._inductor.config.patch(force_disable_caches=True):  # on a CPU they may hold what C++ kernels would get
        _, backward = check(Two(), EDGE_LISTS[on], "triton")
    assert last_ops(backward) == ["where", "reduce_sum"]


@pytest.mark.parametrize("on", EDGE_LISTS)
def test_the_gradient_of_an_activation_is_in_the_backward(on: str):
    """Two layers: what reaches the first one's rows is masked by the kernel that sums it."""
    torch.manual_seed(0)
    _, backward = check(Two(), EDGE_LISTS[on], "cpp")
    assert last_ops(backward) == ["where", "add"]
    assert not any(n.dtype == BOOL for spec in backward for n in parse(spec).inputs)  # no mask is stored


def test_more_is_fused_without_a_gradient():
    torch._dynamo.reset()
    model = Sum(lambda m, out, x: torch.sigmoid(out * m.bias))
    compiled = gnncompile.compile(model)
    x = torch.randn(5, CHANNELS)
    with torch.no_grad(), kernels("cpp"), launched() as specs:
        torch.testing.assert_close(compiled(x, HUB), model(x, HUB))
    assert last_ops(specs) == ["sigmoid"]


def test_switched_off():
    forward, _ = check(Sum(FUSED["bias"][0]), HUB, "cpp", epilogues=False)
    assert last_ops(forward) == ["reduce_sum"]


@pytest.mark.parametrize("train_eps", [False, True])
@pytest.mark.parametrize("on", EDGE_LISTS)
def test_gin(on: str, train_eps: bool):
    torch.manual_seed(0)
    model = GINConv(nn.Linear(CHANNELS, 4), eps=0.3, train_eps=train_eps)
    forward, _ = check(model, EDGE_LISTS[on], "cpp")
    assert last_ops(forward) == ["add"]


def test_gcn_takes_its_bias():
    torch.manual_seed(0)
    forward, _ = check(GCNConv(CHANNELS, 4), HUB, "cpp")
    assert last_ops(forward)[-1] == "add"


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("on", EDGE_LISTS)
def test_gat_takes_its_bias_behind_the_heads(on: str, concat: bool):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = GATConv(CHANNELS, 4, heads=2, concat=concat), torch.randn(5, CHANNELS)
    nn.init.normal_(model.bias)
    compiled = gnncompile.compile(model)
    with torch.no_grad(), kernels("cpp"), launched() as specs:
        torch.testing.assert_close(compiled(x, EDGE_LISTS[on]), model(x, EDGE_LISTS[on]))
    assert last_ops(specs) == (["add"] if concat else ["reduce_sum"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype):
    """What is stored keeps its type; a step into another precision stays outside."""
    torch._dynamo.reset()
    model = Sum(lambda m, out, x: (out + m.bias).relu().to(torch.float64) * 3).to(dtype)
    compiled = gnncompile.compile(model)
    x = torch.randn(5, CHANNELS, dtype=dtype)
    with torch.no_grad(), kernels("cpp"), launched() as specs:
        found, expected = compiled(x, HUB), model(x, HUB)
    assert found.dtype == expected.dtype
    tolerance = 1e-12 if dtype == torch.float64 else 0.05
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    region: Region = parse(specs[0])
    assert [out.dtype for out in region.outputs] == [str(dtype).removeprefix("torch.")]


def _gate(x: Tensor, w: Tensor, edge_index: Tensor) -> Tensor:
    """The gradient of `w` is the sum of two results of one region, one of them in another order."""
    order = torch.arange(w.size(0) - 1, -1, -1)
    return softmax(torch.tanh(x[edge_index[1]] + w + w[order]), edge_index[1], num_nodes=x.size(0))


def _variance(x: Tensor, w: Tensor, edge_index: Tensor) -> Tensor:
    """The difference of two means over the same edges."""
    return VarAggregation()(x[edge_index[0]] * w, edge_index[1], dim_size=x.size(0))


@pytest.mark.parametrize("program", [_gate, _variance])
def test_two_results_of_one_region_that_are_combined(program: Callable[..., Tensor]):
    """What combines them is no epilogue of either: the region would read its own result."""
    torch._dynamo.reset()
    compiled = gnncompile.compile(program)
    for edges in (HUB, EDGE_LISTS["no edge"]):
        for training in (True, False):
            x = torch.randn(5, CHANNELS, dtype=torch.float64, requires_grad=training)
            w = torch.randn(edges.size(1), CHANNELS, dtype=torch.float64, requires_grad=training)
            with torch.set_grad_enabled(training):
                ours, theirs = compiled(x, w, edges), program(x, w, edges)
            torch.testing.assert_close(ours, theirs)
            if training:
                for a, b in zip(*(torch.autograd.grad(o.sin().sum(), [x, w]) for o in (ours, theirs)), strict=True):
                    torch.testing.assert_close(a, b)
