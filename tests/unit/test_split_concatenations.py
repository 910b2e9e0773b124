"""Layers of concatenated rows become sums of layers of the parts: the same numbers and gradients, no wide rows."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from torch import Tensor, nn

import gnncompile
from gnncompile.passes.analysis import aten
from tests.graphs import EDGE_LISTS
from tests.harness import look_at_graphs
from tests.triton_regions import DEVICE

pytestmark = [triton_regions.INTERPRETED, *triton_regions.GPU]
on_tensor_cores = triton_regions.on_tensor_cores

WIDTH = 32


@pytest.fixture
def concatenations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many concatenations every captured graph has."""
    return look_at_graphs(
        monkeypatch, lambda graph: [len(graph.find_nodes(op="call_function", target=aten.cat.default))]
    )


class Update(nn.Module):
    """The update of a node by its own row and what it received, as graph networks have."""

    def __init__(self, bias: bool = True, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(2 * WIDTH, WIDTH, bias=bias), activation

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, destination = edge_index
        received = torch.zeros_like(x).index_add(0, destination, x[source])
        return self.activation(self.rows(x, received))

    def rows(self, x: Tensor, received: Tensor) -> Tensor:
        return self.layer(torch.cat([x, received], -1))


class Both(Update):
    """The concatenation is read by an activation as well."""

    def rows(self, x: Tensor, received: Tensor) -> Tensor:
        both = torch.cat([x, received], 1)
        return self.layer(both) + both.sin()[:, :WIDTH]


class Narrow(Update):
    """A part with fewer columns than tensor cores take."""

    def rows(self, x: Tensor, received: Tensor) -> Tensor:
        return nn.functional.linear(torch.cat([x, received[:, :3]], 1), self.layer.weight[:, : WIDTH + 3])


class Several(Update):
    """Three parts: each sum in between would be written."""

    def rows(self, x: Tensor, received: Tensor) -> Tensor:
        parts = torch.cat([x, received[:, :16], received[:, 16:]], 1)
        return nn.functional.linear(parts, self.layer.weight, self.layer.bias)


class Rows(Update):
    """Rows below each other are no parts of a row."""

    def rows(self, x: Tensor, received: Tensor) -> Tensor:
        return nn.functional.linear(torch.cat([x, received]), self.layer.weight[:, :WIDTH])


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "relu": (Update, 0),
    "no bias": (lambda: Update(bias=False), 0),
    "sine": (lambda: Update(activation=torch.sin), 0),
    "read twice": (Both, 1),
    "narrow": (Narrow, 1),
    "several": (Several, 1),
    "rows": (Rows, 1),
}


def results(model: nn.Module, called: Callable[..., Tensor], x: Tensor, edge_index: Tensor) -> list[Tensor]:
    """Returns the result and all gradients."""
    x = x.clone().requires_grad_()
    out = called(x, edge_index)
    weight = torch.cos(torch.arange(out.numel(), device=x.device)).view_as(out).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *model.parameters()], allow_unused=True)]


def compare(model: nn.Module, x: Tensor, edge_index: Tensor, tolerance: float) -> None:
    found = results(model, gnncompile.compile(model, fullgraph=True), x, edge_index)
    other = copy.deepcopy(model).double()
    for a, b in zip(found, results(other, other, x.double(), edge_index), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
            torch.testing.assert_close(a.double() / scale, b / scale, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_concatenations(name: str, on_tensor_cores: None, concatenations: list[int]) -> None:
    torch.manual_seed(0)
    make, left = MODELS[name]
    edges = EDGE_LISTS["unsorted, duplicates, hub"].to(DEVICE)
    compare(make().to(DEVICE), torch.randn(5, WIDTH, device=DEVICE), edges, 1e-5)
    assert concatenations == [left]


@pytest.mark.parametrize("edges", EDGE_LISTS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float64, 1e-9)])
def test_every_type(
    dtype: torch.dtype, tolerance: float, edges: str, on_tensor_cores: None, concatenations: list[int]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, WIDTH).to(DEVICE, dtype)
    compare(Update().to(DEVICE, dtype), x, EDGE_LISTS[edges].to(DEVICE), tolerance)
    assert concatenations == [int(dtype is torch.float64)], "the library multiplies float64"


@pytest.mark.parametrize("options", [{"products": False}, {"inductor": False}, {"double_backward": True}])
def test_without_products_of_our_own(
    options: dict[str, bool], on_tensor_cores: None, concatenations: list[int]
) -> None:
    torch.manual_seed(0)
    edges = EDGE_LISTS["unsorted, duplicates, hub"].to(DEVICE)
    gnncompile.compile(Update().to(DEVICE), options=options)(torch.randn(5, WIDTH, device=DEVICE), edges)
    assert concatenations == [1]


def test_the_library_multiplies_what_is_concatenated(concatenations: list[int]) -> None:
    """On a CPU the library multiplies, and it would write the sum twice."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    compare(Update(), torch.randn(5, WIDTH), EDGE_LISTS["unsorted, duplicates, hub"], 1e-5)
    assert concatenations == [1]
