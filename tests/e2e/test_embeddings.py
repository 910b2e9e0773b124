"""Embeddings of categories: gradients are eager's, the same bits every time, and no atomic sum on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gnncompile


class Categories(nn.Module):
    """The sum of an embedding for each column, as models of molecules begin; one has a row that is never trained."""

    def __init__(self, columns: int = 3) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(5, 8, padding_idx=0 if k == 1 else None) for k in range(columns))
        self.linear = nn.Linear(8, 4)

    def forward(self, z: Tensor) -> Tensor:
        return self.linear(sum(one(z[:, k]) for k, one in enumerate(self.embeddings))).relu()


def gradients(model: nn.Module, z: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(z).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_those_of_eager(device: str, dtype: torch.dtype):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Categories().to(device, dtype)
    compiled = gnncompile.compile(model, fullgraph=True)
    for rows in (40, 1, 0, 7):
        z = torch.randint(5, (rows, 3), device=device)
        torch.testing.assert_close(gradients(compiled, z), gradients(model, z))


def test_the_same_bits_every_time_on_a_cpu():
    torch._dynamo.reset()
    model = gnncompile.compile(Categories(), fullgraph=True)
    z = torch.randint(5, (20_000, 3))
    first = gradients(model, z)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(model, z), strict=True))


def test_torchs_own_kernel_computes_them_on_a_cpu():
    torch._dynamo.reset()
    model, z = gnncompile.compile(Categories(), fullgraph=True), torch.randint(5, (50, 3))
    gradients(model, z)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(model, z)
    names = [event.name for event in profile.events()]
    assert names.count("aten::embedding_dense_backward") == 3
