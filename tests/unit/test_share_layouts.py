"""Sums by one end of edges walk the layout of regions that gather at the other end; gradients read rows, not copies."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import remove_self_loops, scatter

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.ir.region import parse
from gnncompile.passes.analysis import own
from tests.edge_states import CHANNELS, Centred, total
from tests.graphs import EDGE_LISTS
from tests.harness import launched, same_gradients

which = triton_regions.which


def numbers(tensors: list[Tensor], device: str = "cpu") -> list[Tensor]:
    return [t.to(device, torch.float64) if t.is_floating_point() else t.to(device) for t in tensors]


@triton_regions.INTERPRETED
@pytest.mark.parametrize("edges", EDGE_LISTS)
def test_gradients_read_the_rows_of_sums(edges: str, which: str) -> None:
    device = triton_regions.home(which)
    torch.manual_seed(0)
    edge_index = EDGE_LISTS[edges]
    given = numbers([torch.randn(5, CHANNELS), edge_index, torch.randn(edge_index.size(1), CHANNELS)], device)
    model = Centred(1).to(device, torch.float64)
    other = copy.deepcopy(model)
    with launched() as specs, torch._inductor.config.patch(force_disable_caches=True):
        same_gradients(model, (other, gnncompile.compile(other, fullgraph=True)), *given)
    regions = [parse(spec) for spec in specs]
    # The gradient of the sum is an input of the region that adds it to its own gradient of the state.
    repeated = [n for region in regions if region.tiled for n in region.nodes if n.op == "on_edges"]
    assert repeated
    ends = [region.nodes[out.node].op for region in regions for out in region.outputs if region.per_edge(out)]
    assert ends and "on_edges" not in ends


def _other_end(x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    return total(x[edge_index[0]], edge_index[1], x.size(0)) + total(e, edge_index[1], x.size(0))


def _before(x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    """The source of each edge depends on the first sum, so the layout by it comes later, and is none of structure."""
    summed = total(e, edge_index[1], x.size(0))
    source = (edge_index[0] + (summed.sum() > 0).long() * 0).clamp(0, x.size(0) - 1)
    return summed + total(x[source], edge_index[1], x.size(0))


def _other_rows(x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    """The second sum has one row more."""
    summed = total(e, edge_index[1], x.size(0) + 1)
    return total(x[edge_index[0]], edge_index[1], x.size(0)) + summed[1:]


def _masked(x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    """The sum of gathered rows leaves self loops out, the sum of states does not."""
    kept, _ = remove_self_loops(edge_index)
    gathered = scatter(x[kept[0]], kept[1], 0, x.size(0), "sum")
    return gathered + scatter(e, edge_index[1], 0, x.size(0), "sum")


def _normalised(x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
    """The degrees are counted before rows are gathered, and leave self loops out too."""
    kept, weight = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
    return scatter(x[kept[0]] * weight[:, None], kept[1], 0, x.size(0), "sum") + total(e, edge_index[1], x.size(0))


PROGRAMS = [(_other_end, 1), (_before, 1), (_other_rows, 2), (_masked, 2), (_normalised, 2)]


@pytest.mark.parametrize("program, number", PROGRAMS)
def test_layouts(program: Callable[..., Tensor], number: int) -> None:
    """Layouts are those of the whole graph, without gradients."""
    torch._dynamo.reset()
    compiled = gnncompile.compile(program)
    for edges in EDGE_LISTS.values():
        torch.manual_seed(0)
        given = numbers([torch.randn(5, CHANNELS), edges, torch.randn(edges.size(1), CHANNELS)])
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given), program(*given))
    for captured in callable_of(compiled).backend.captured:
        assert captured.structure is not None
        graph = captured.structure.program.module.graph
        assert len(graph.find_nodes(op="call_function", target=own.csr.default)) == number
