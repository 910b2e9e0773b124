"""Autocast inside of a model, around a part of it, and nested: results, gradients and dtypes are those of eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINEConv, RGCNConv, SAGEConv, TransformerConv

import gnncompile
from gnncompile import _compat
from gnncompile.support import check
from gnncompile.support.aggr import AGGR
from gnncompile.support.case import Case
from gnncompile.support.conv import CONV
from gnncompile.support.norm import NORM
from gnncompile.support.pool import POOL
from tests.edge_layers import TwoLayers
from tests.harness import UnderAutocast

CHANNELS, NODES, EDGES = 40, 20, 60


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "GCN": (lambda: GCNConv(CHANNELS, CHANNELS), tuple),
    "GAT": (lambda: GATConv(CHANNELS, CHANNELS), tuple),
    "SAGE": (lambda: SAGEConv(CHANNELS, CHANNELS), tuple),
    "GINE": (lambda: GINEConv(nn.Linear(CHANNELS, CHANNELS)), lambda: (torch.randn(EDGES, CHANNELS),)),
    "RGCN": (lambda: RGCNConv(CHANNELS, CHANNELS, 3), lambda: (torch.arange(EDGES) % 3,)),
    "Transformer": (lambda: TransformerConv(CHANNELS, CHANNELS), tuple),
    "layers on edges": (lambda: TwoLayers(CHANNELS), tuple),
}


class Within(nn.Module):
    """A layer under autocast."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.linear = layer, nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.linear(self.layer(x, *others))


class Nested(Within):
    """A part of the layers leaves autocast again."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            x = self.layer(x, *others)
            with torch.autocast(x.device.type, enabled=False):
                return self.linear(x.float())


class Before(Within):
    """The same layer under autocast and then without."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            x = self.linear(self.layer(x, *others))
        return self.layer(x.float(), *others)


def results(model: nn.Module, called: Callable[..., Tensor], x: Tensor, *others: Any) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    out = called(x, *others)
    return [out, *torch.autograd.grad((out * out.detach().cos()).sum(), [x, *model.parameters()], allow_unused=True)]


@pytest.mark.parametrize("around", [Within, Nested, Before])
@pytest.mark.parametrize("name", LAYERS)
def test_numbers_and_dtypes_are_those_of_eager(name: str, around: type[Within], device: str) -> None:
    torch.manual_seed(0)
    make, more = LAYERS[name]
    model = around(make()).to(device)
    given = [torch.randint(NODES, (2, EDGES)), *more()]
    args = [torch.randn(NODES, CHANNELS).to(device), *(one.to(device) for one in given)]
    compiled = gnncompile.compile(copy.deepcopy(model), fullgraph=True)
    found, expected = results(compiled, compiled, *args), results(model, model, *args)
    exact = copy.deepcopy(model).double()
    exact_args = [one.double() if one.is_floating_point() else one for one in args]
    with torch.autocast(device, enabled=False):
        right = results(exact, _without_float(exact), *exact_args)
    for one, other, best in zip(found, expected, right, strict=True):
        if other is None:
            assert one is None
            continue
        assert one.dtype == other.dtype
        error = (other.double() - best).norm()
        assert (one.double() - best).norm() <= 2 * error + 2e-2 * best.norm()


def _without_float(model: nn.Module) -> Callable[..., Tensor]:
    """Returns a function that calls a model in float64, in which ``x.float()`` changes nothing."""

    def called(*args: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "float", lambda tensor: tensor)
            return model(*args)

    return called


class Differences(nn.Module):
    """Two layers of differences of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, destination = edge_index
        messages = self.last(self.first(x[source] - x[destination]).relu())
        return messages.new_zeros(x.size(0), CHANNELS).index_add(0, destination, messages)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_differences_of_large_rows_keep_their_digits(offset: float, device: str) -> None:
    torch.manual_seed(0)
    model = Differences().to(device)
    x, edge_index = torch.randn(NODES, CHANNELS).to(device) + offset, torch.randint(NODES, (2, EDGES)).to(device)
    exact = copy.deepcopy(model).double()(x.double(), edge_index)
    with torch.autocast(device, torch.bfloat16):
        found = gnncompile.compile(model)(x, edge_index)
    assert (found.double() - exact).norm() <= 1e-2 * exact.norm()


class GradientOutside(nn.Module):
    """A forward without autocast, whose gradient is taken under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = TwoLayers(CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        energy = self.layer(x, edge_index).float().square().sum()
        with torch.autocast(x.device.type, torch.bfloat16):
            return torch.autograd.grad(energy, x, create_graph=True)[0]


def test_a_gradient_is_taken_in_the_modes_of_its_call(device: str) -> None:
    torch.manual_seed(0)
    model = GradientOutside().to(device)
    x = torch.randn(NODES, CHANNELS).to(device).requires_grad_()
    edge_index = torch.randint(NODES, (2, EDGES)).to(device)
    compiled = gnncompile.compile(copy.deepcopy(model))
    found, expected = compiled(x, edge_index), model(x, edge_index)
    assert found.dtype == expected.dtype
    assert (found - expected).norm() <= 2e-2 * expected.norm()


MODULES = {case.name: case for case in (*CONV, *POOL, *AGGR, *NORM) if isinstance(case, Case) and not case.drawn}


@pytest.mark.parametrize("name", MODULES)
def test_layers_of_pyg(name: str) -> None:
    """Results are as close to those in float64 as eager's, and have its dtypes."""
    torch.manual_seed(0)
    case, sizes = MODULES[name], [(12, 40), (7, 0)]
    model, low = case.make(), replace(case, dtype=torch.float32)
    if not isinstance(model, nn.Module):
        pytest.skip("it is a function")
    around = UnderAutocast(copy.deepcopy(model).float())
    try:
        expected = [check._run(low, copy.deepcopy(around), size) for size in sizes]
        exact = [check._run(case, copy.deepcopy(model).to(case.dtype), size) for size in sizes]
    except Exception as error:
        pytest.skip(f"eager can't run it: {error}")
    compiled = gnncompile.compile(copy.deepcopy(around), options={"inductor": False})
    for size, eager, right in zip(sizes, expected, exact, strict=True):
        for one, other, best in zip(check._run(low, compiled, size), eager, right, strict=True):
            assert (one is None) == (other is None)
            if one is None or other is None:
                continue
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            if one.is_floating_point():
                error = (other.double() - best.double()).norm()
                assert (one.double() - best.double()).norm() <= 3 * error + 5e-2 * (best.double().norm() + 1)


def test_an_error_while_tracing_leaves_autocast() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("stop")

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    mode = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, False))
    made = graph.call_function(fails, (x,))
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (mode,))
    graph.output(made)
    fakes = torch._subclasses.FakeTensorMode()
    with pytest.raises(ValueError, match="stop"):
        _compat.trace_aten(torch.fx.GraphModule({}, graph), [fakes.from_tensor(torch.randn(3))])
    assert not torch.is_autocast_enabled("cpu")
