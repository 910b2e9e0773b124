"""Inductor's own questions about sizes: attention over a batch is one graph, whatever the first batch was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.virtualized import V
from torch_geometric.utils import to_dense_batch

import gnncompile
from gnncompile._compat import inductor
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


def test_the_sizes_of_each_graph_are_ours(monkeypatch: pytest.MonkeyPatch):
    """A first call without rows is planned for some rows; a compile of others is planned as torch does."""
    torch._dynamo.reset()
    planned: list[tuple[str, list[int]]] = []
    schedule = inductor._OwnNodes()

    def look(nodes: Any) -> Any:
        sizes = V.graph.sizevars
        planned.append((type(sizes).__name__, sorted(map(int, sizes.backed_var_to_val.values()))))
        return schedule(nodes)

    monkeypatch.setattr(inductor, "_OwnNodes", lambda: look)
    with torch._inductor.config.patch(force_disable_caches=True):
        gnncompile.compile(lambda x: x.cos() * 2)(torch.zeros(0, 3, requires_grad=True)).sum().backward()
        with torch._inductor.config.patch(_pre_fusion_custom_pass=look):
            torch.compile(lambda x: x.cos() * 2, dynamic=True)(torch.zeros(5, 3))
    assert [name for name, _ in planned] == ["_Sizes", "_Sizes", "SizeVarAllocator"]
    assert all(0 not in sizes and sizes for _, sizes in planned[:2])
