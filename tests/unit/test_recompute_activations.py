"""Activations that a backward only multiplies are not kept beside the products that they are computed from."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnncompile
from tests.graphs import EDGE_LISTS
from tests.harness import same_gradients

which = triton_regions.which

CHANNELS = 24


class Steps(nn.Module):
    """Layers with an activation, and a sum over neighbours between them."""

    def __init__(self, activation: Callable[[Tensor], Tensor], checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(4))
        self.activation, self.checkpointed = activation, checkpointed

    def step(self, x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
        """Runs two layers."""
        return second(self.activation(first(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, second, *others = self.layers
        x = (
            checkpoint(self.step, x, first, second, use_reentrant=False)
            if self.checkpointed
            else self.step(x, first, second)
        )
        x = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        return self.step(x, *others)


class Gated(nn.Module):
    """A layer of rows that are scaled by a gate of the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.rows, self.last = (nn.Linear(CHANNELS, CHANNELS) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.silu(self.gate(x)) * self.rows(x))  # type: ignore[no-any-return]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "softplus minus a number": lambda x: nn.functional.softplus(x) - 0.5,
    "elu": nn.functional.elu,
    "tanh": torch.tanh,
    "relu": torch.relu,
}


@triton_regions.INTERPRETED
@pytest.mark.parametrize("edges", EDGE_LISTS)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(activation: str, checkpointed: bool, edges: str, which: str) -> None:
    device = triton_regions.home(which)
    torch.manual_seed(0)
    model = Steps(ACTIVATIONS[activation], checkpointed).to(device, torch.float64)
    x = torch.randn(5, CHANNELS, dtype=torch.float64, device=device)
    other = copy.deepcopy(model)
    same_gradients(model, (other, gnncompile.compile(other)), x, EDGE_LISTS[edges].to(device))


def kept(model: nn.Module, *given: Tensor) -> int:
    """Returns how many matrices with a row per node, other than inputs, the compiled model keeps for its backward."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == given[0].shape and all(tensor.data_ptr() != one.data_ptr() for one in given):
            found[tensor.data_ptr()] = tensor
        return tensor

    fresh = torch._inductor.config.patch(force_disable_caches=True)
    with fresh, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = gnncompile.compile(model)(*given)
    out.sum().backward()
    return len(found)


@pytest.mark.parametrize("activation", ["silu", "gelu", "softplus minus a number", "tanh", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_matrix_is_kept_for_each_activation(
    activation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides two products or activations the sum over neighbours is kept, as the input of a layer."""
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    torch._dynamo.reset()
    device = triton_regions.DEVICE
    model = Steps(ACTIVATIONS[activation]).to(device, dtype)
    x = torch.randn(9, CHANNELS, device=device, dtype=dtype)
    assert kept(model, x, torch.randint(9, (2, 31), device=device)) == 3


@triton_regions.INTERPRETED
def test_gates(which: str) -> None:
    """The product of a gate and rows is computed again from both."""
    device = triton_regions.home(which)
    torch._dynamo.reset()
    model, x = Gated().to(device), torch.randn(9, CHANNELS, device=device)
    assert kept(model, x) == (2 if which == "triton" else 3)
    model = model.double()
    other = copy.deepcopy(model)
    same_gradients(model, (other, gnncompile.compile(other)), x.double())


def test_cpus_keep_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GNNCOMPILE_KERNELS", raising=False)
    torch._dynamo.reset()
    x = torch.randn(9, CHANNELS)
    assert kept(Steps(nn.functional.silu), x, torch.randint(9, (2, 31))) == 5
