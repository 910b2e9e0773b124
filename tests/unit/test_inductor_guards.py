"""Inductor's own questions about sizes: attention over a batch is one graph, whatever the first batch was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.utils import to_dense_batch

import gnncompile
from gnncompile.capture.compile import callable_of


class Attention(nn.Module):
    """What :class:`torch_geometric.nn.GPSConv` does of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        dense, mask = to_dense_batch(x, batch)
        found, _ = self.attention(dense, dense, dense, key_padding_mask=~mask, need_weights=False)
        return x + found[mask]


FIRST_ONE_GRAPH, FIRST_SEVERAL = ((0,) * 9, (0, 1, 1), (0, 1, 2), (0,)), ((0, 0, 1, 2), (0, 1, 2), (0, 0, 0), (0,))


@pytest.mark.parametrize(("training", "batches"), [(True, FIRST_ONE_GRAPH), (False, FIRST_SEVERAL)], ids=str)
def test_attention_is_captured_once(training: bool, batches: tuple[tuple[int, ...], ...]):
    """One graph in a batch, graphs of one node: first of all or later."""
    torch.manual_seed(0)
    model = Attention().train(training)
    compiled = gnncompile.compile(model)
    with torch.set_grad_enabled(training):
        for batch in batches:
            found = []
            x, index = torch.randn(len(batch), 8), torch.tensor(batch)
            for run in (model, compiled):
                leaf = x.clone().requires_grad_(training)
                out = run(leaf, index)
                weight = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
                leaves = [leaf, *model.parameters()]
                found.append([out, *(torch.autograd.grad((out * weight).sum(), leaves) if training else [])])
            torch.testing.assert_close(*found)
    program = callable_of(compiled)
    assert program is not None and len(program.backend.captured) == 1
