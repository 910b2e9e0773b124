"""Normalisation where there are no rows: gradients of zeros, and running statistics as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.passes.padded import masked_reductions
from tests.harness import light

C = 8
SIZES = (9, 0, 12, 0, 5)
"""Rows of each call; a capture serves all of them."""


class OfMessages(nn.Module):
    """Learns a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = pyg.MessageNorm(learn_scale=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, x + 1)


class OfTypes(nn.Module):
    """A normalisation for each type of node; the types are those of the rows' positions."""

    def __init__(self, norm: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.norm = norm(C, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, torch.arange(x.size(0), device=x.device) % 2)


class Several(nn.Module):
    """Every normalisation of the same rows, side by side: one capture serves them all."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict(
            {
                "torch_batch_norm": nn.BatchNorm1d(C),
                "torch_batch_norm_of_half_momentum": nn.BatchNorm1d(C, momentum=0.5),
                "torch_batch_norm_without_weight": nn.BatchNorm1d(C, affine=False),
                "torch_batch_norm_without_statistics": nn.BatchNorm1d(C, track_running_stats=False),
                "torch_layer_norm": nn.LayerNorm(C),
                "torch_group_norm": nn.GroupNorm(2, C),
                "batch_norm": pyg.BatchNorm(C),
                "batch_norm_of_a_single_element": pyg.BatchNorm(C, allow_single_element=True),
                "instance_norm": pyg.InstanceNorm(C, affine=True, track_running_stats=True),
                "graph_norm": pyg.GraphNorm(C),
                "graph_size_norm": pyg.GraphSizeNorm(),
                "layer_norm_of_a_node": pyg.LayerNorm(C, mode="node"),
                "pair_norm": pyg.PairNorm(),
                "mean_subtraction_norm": pyg.MeanSubtractionNorm(),
                "diff_group_norm": pyg.DiffGroupNorm(C, 2),
                "message_norm": OfMessages(),
                "hetero_batch_norm": OfTypes(pyg.HeteroBatchNorm),
                "hetero_layer_norm": OfTypes(pyg.HeteroLayerNorm),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([norm(x) for norm in self.norms.values()])


def compare(
    make: Callable[[], nn.Module], training: bool, device: str, sizes: tuple[int, ...] = SIZES, graphs: int = 1
) -> None:
    """Compares outputs, every gradient and all buffers with eager, call after call, and counts captured graphs."""
    torch.manual_seed(0)
    eager = make().to(device).train(training)
    for parameter in eager.parameters():
        nn.init.uniform_(parameter)
    ours = copy.deepcopy(eager)
    compiled = gnncompile.compile(ours)
    for rows in sizes:
        found: list[dict[str, Tensor | None]] = []
        value = torch.randn(rows, C, device=device)
        for model, called in ((eager, eager), (ours, compiled)):
            x = value.clone().requires_grad_()
            model.zero_grad()
            out = called(x)
            (out * torch.linspace(-1, 1, C, device=device)).sum().backward()
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            found.append({"out": out, "x": x.grad, **gradients, **dict(model.named_buffers())})
        torch.testing.assert_close(
            found[1], found[0], rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m, rows=rows: f"{rows} rows: {m}"
        )
    program = callable_of(compiled)
    assert program is not None and len(program.backend.captured) == graphs


@pytest.mark.parametrize("training", [True, False])
def test_no_rows(training: bool, device: str):
    with light():
        compare(Several, training, device)


def test_no_rows_of_a_standard_deviation(device: str):
    """Torch's gradient of one over all dimensions would ask whether there are any elements."""
    with light():
        compare(lambda: pyg.LayerNorm(C), True, device)


class Spread(nn.Module):
    """A variance and a standard deviation over all rows. Their gradients divide by the number of rows less one."""

    def forward(self, x: Tensor) -> Tensor:
        return x.var(0) + (2 * x).std(0) + sum(torch.var_mean(3 * x, 0))


@pytest.mark.parametrize("inductor", [False, True])
def test_variances_of_one_row(inductor: bool, device: str):
    """They are NaN, as in eager."""
    torch._dynamo.reset()
    with nullcontext() if inductor else light():
        compare(Spread, True, device, (5, 1, 0, 7))


@pytest.mark.parametrize("sizes", [SIZES, SIZES[1:]])
def test_no_rows_by_inductor(sizes: tuple[int, ...], device: str):
    """Whichever size comes first."""
    torch._dynamo.reset()
    compare(lambda: nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.ReLU()), True, device, sizes)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_no_rows_of_a_padded_batch(number: int, device: str):
    """Only the first rows are true; as in eager, gradients of no rows are zeros and statistics stay as they are."""
    x = torch.randn(4, C, device=device).requires_grad_()
    norm, alone = (nn.BatchNorm1d(C).to(device) for _ in range(2))
    mask = torch.arange(4, device=device).unsqueeze(1) < number
    given = norm.weight, norm.bias, norm.running_mean, norm.running_var
    out = masked_reductions.batch_norm(x, *given, mask, mask.sum(), norm.momentum or 0.1, norm.eps)
    out.masked_fill(~mask, 0).sum().backward()
    if number == 1:  # eager refuses a single row
        assert bool(norm.weight.grad.isfinite().all())  # type: ignore[union-attr]
        return
    alone(x.detach()[:number]).sum().backward()
    for ours, eager in zip(norm.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, eager.grad)
    torch.testing.assert_close(norm.running_mean, alone.running_mean)
    torch.testing.assert_close(norm.running_var, alone.running_var)


def test_a_gradient_is_rounded_once_where_float32_becomes_float64():
    """Several regions read the same rows in float64. Their gradients are added up before they are rounded."""
    torch.manual_seed(0)
    norm, batch = pyg.InstanceNorm(4, affine=True).double(), torch.zeros(6, dtype=torch.long)
    weights = torch.arange(24.0, dtype=torch.float64).reshape(6, 4).cos()

    def run(x: Tensor) -> Tensor:
        return (norm(x.float().double(), batch) * weights).sum()

    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4).sin().requires_grad_()
    ours, torchs = (torch.autograd.grad(one(x), x)[0] for one in (gnncompile.compile(run), run))
    torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)
