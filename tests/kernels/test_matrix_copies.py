"""Views of weights that regions read are copied by one launch."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
from gnncompile import testing
from gnncompile.codegen.matrix_view import View
from gnncompile.codegen.triton.matrix_copies import MatrixCopies
from tests.edge_layers import TwoLayers
from tests.harness import kernels
from tests.triton_regions import DEVICE

pytestmark = triton_regions.INTERPRETED
device = triton_regions.device


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float64])
def test_copies_are_the_views(to: torch.dtype, device: str) -> None:
    weights = torch.randn(70, 130, device=device)
    vector = torch.randn(9, device=device)
    views = [
        weights.t(),
        weights[:, 1:40].t(),
        weights[3:, 128:129].t(),
        weights[5:6, 7:8],
        weights[::2, ::3],
        vector.expand(50, 9),
        vector.view(9, 1).expand(9, 300),
    ]
    sources = [weights] * 5 + [vector] * 2
    numbers = [View(*view.shape, *view.stride(), view.storage_offset()) for view in views]
    copies = [torch.full(view.shape, torch.nan, dtype=to, device=device) for view in views]
    MatrixCopies(numbers, [torch.float32] * 7 + [to] * 7)(sources, copies)
    flat = [n for view in numbers for n in view]
    for found, of_op, view in zip(copies, torch.ops.gnncompile.matrix_copies(sources, flat, to), views, strict=True):
        assert torch.equal(found, view.to(to))
        assert torch.equal(of_op, view.to(to))
        assert of_op.is_contiguous()


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoLayers(16) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Runs regions by Triton. Yields the number of copies of each launch."""
    found: list[int] = []
    run = MatrixCopies.__call__

    def counted(self: MatrixCopies, sources: list[Tensor], copies: list[Tensor]) -> None:
        found.append(len(copies))
        run(self, sources, copies)

    monkeypatch.setattr(MatrixCopies, "__call__", counted)
    with kernels("triton"), torch._inductor.config.patch(force_disable_caches=True):
        torch._dynamo.reset()
        yield found
    torch._dynamo.reset()


def step(model: nn.Module, called: nn.Module, x: Tensor, edge_index: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    out = called(x, edge_index)
    grads = torch.autograd.grad((out * out.detach().cos()).sum(), [x, *model.parameters()])
    return [out.detach().double(), *(g.double() for g in grads)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("graph", ["random", "no edge", "hub"])
def test_all_weights_of_a_graph_are_copied_at_once(
    graph: str, precision: str, launches: list[int], device: str
) -> None:
    torch.manual_seed(0)
    edge_index = {
        "random": testing.power_law(20, 60, max_degree=9, channels=1, seed=1).edge_index,
        "no edge": torch.empty(2, 0, dtype=torch.int64),
        "hub": torch.stack([torch.arange(40) % 20, torch.zeros(40, dtype=torch.int64)]),
    }[graph].to(device)
    model = _Model().to(device)
    x = torch.randn(20, 16, device=device)
    if precision == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    compiled = gnncompile.compile(model, fullgraph=True)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "autocast"):
        found = step(model, compiled, x, edge_index)
    expected = step(*[copy.deepcopy(model).double()] * 2, x.double(), edge_index)
    close = 1e-4 if precision == "float32" else 1e-1
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= close * (1 + b.norm())
    # One in the forward, one in the backward. Under autocast another one of the forward converts what no region reads,
    # and another one of the backward two gradients that kernels of ours made; on a GPU the library makes them.
    assert len(launches) == (2 if precision != "autocast" else 3 if DEVICE == "cuda" else 4)
    assert min(launches) >= 2


class _Stored(nn.Module):
    """Two layers of each edge, whose weights are rounded to a type of 8 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last, self.dtype = nn.Linear(32, 16), nn.Linear(16, 16), dtype

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, destination = edge_index
        first, last = (layer.weight.to(self.dtype).float() for layer in (self.first, self.last))
        hidden = nn.functional.linear(torch.cat([x[source], x[destination]], -1), first, self.first.bias).sigmoid()
        messages = nn.functional.linear(hidden, last).tanh()
        return messages.new_zeros(x.size(0), 16).index_add(0, destination, messages)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_that_are_rounded_on_the_way_stay_rounded(dtype: torch.dtype, launches: list[int], device: str) -> None:
    torch.manual_seed(0)
    model, x = _Stored(dtype).to(device), torch.randn(20, 16, device=device)
    edge_index = torch.randint(20, (2, 60)).to(device)
    with torch.no_grad():
        torch.testing.assert_close(gnncompile.compile(model)(x, edge_index), model(x, edge_index), rtol=1e-4, atol=1e-4)
