"""Every spelling of an index, of a gather and of a reduction becomes one region, along any dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.utils import segment

import gnncompile
from gnncompile import _compat, testing
from gnncompile.ir.region import parse
from tests.harness import light
from tests.tracing import WIDTH, Traced, check, data

BATCH = 3


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light(), mock.patch.object(_compat, "calling_file", return_value="torch_geometric"):
        yield


def is_one_region(found: Traced | None, gathers: int = 1) -> None:
    """One region, of rows that it gathers itself, and nothing said to be left out."""
    assert found is not None and found.ctx.log.skipped == []
    (region,) = found.ctx.log.regions
    read = [node for node in parse(region.spec).nodes if node.op == "input"]
    assert sum(node.space.name in ("SOURCE", "DESTINATION") for node in read) == gathers
    left = ("index_select", "scatter", "index_add", "aten.index.", "index_put", "index_reduce", "gather")
    assert not any(part in op for op in found.after["lower_unfused"] for part in left)


def add(x: Tensor, index: Tensor, message: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, index, message)


EXPANDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "repeat": lambda i, m: i.unsqueeze(1).repeat(1, m.size(1)),
    "repeat of a constant": lambda i, m: i.unsqueeze(1).repeat(1, WIDTH),
    "repeat_interleave": lambda i, m: i.view(-1, 1).repeat_interleave(WIDTH, 1),
    "expand": lambda i, m: i[:, None].expand(-1, WIDTH),
    "expand_as": lambda i, m: i.view(-1, 1).expand_as(m),
    "broadcast_to": lambda i, m: i[:, None].broadcast_to(m.shape),
    "transposed": lambda i, m: i.expand(WIDTH, -1).t(),
    "permuted": lambda i, m: i.expand(WIDTH, -1).permute(1, 0),
    "stacked": lambda i, m: torch.stack([i] * WIDTH, -1),
    "joined": lambda i, m: torch.cat([i.view(-1, 1)] * WIDTH, 1),
    "copies of views": lambda i, m: i.clone().view(-1, 1, 1).long().expand(-1, 2, 2).reshape(-1, WIDTH).contiguous(),
}


@pytest.mark.parametrize("spelling", EXPANDED)
def test_an_index_for_every_element(spelling: str) -> None:
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        rows = x.gather(0, EXPANDED[spelling](row, x[row])).exp()
        return torch.zeros_like(x).scatter_add(0, EXPANDED[spelling](col, rows), rows)

    is_one_region(check(fn, *data()))


PAIRS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "long": lambda e: (e[0].long(), e.long()[1]),
    "to": lambda e: (e.to(torch.int64)[0], e[1].to(torch.int64)),
    "int32": lambda e: (e.int()[0], e[1].int()),
    "clone": lambda e: (e.clone()[0], e[1].clone().contiguous()),
    "unpacked, then long": lambda e: tuple(e.long()),  # type: ignore[return-value,arg-type]
    "transposed": lambda e: (e.t()[:, 0], e.t().contiguous()[:, 1]),
    "slices": lambda e: (e[0:1].view(-1), e[1:2].squeeze(0)),
    "split": lambda e: tuple(part.squeeze(0) for part in e.split(1)),  # type: ignore[return-value]
    "chunk": lambda e: tuple(part[0] for part in e.chunk(2)),  # type: ignore[return-value]
    "flipped": lambda e: (e.flip(0)[1], e.flip([0])[0]),
    "detached, reshaped": lambda e: (e.detach()[0].reshape(-1), e[-1].view(-1, 1).squeeze(1)),
}


@pytest.mark.parametrize("spelling", PAIRS)
def test_rows_of_an_edge_list(spelling: str) -> None:
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        edge_index = torch.stack([row, col])
        source, destination = PAIRS[spelling](edge_index)
        first = add(x, edge_index[1], x[edge_index[0]] * x[col])
        return first + add(x, destination, x[source].exp() * x[destination])

    found = check(fn, *data())
    assert found is not None and found.ctx.log.skipped == []
    assert (
        found.count("form_regions", "gnncompile.region") == 2 and found.count("lower_unfused", "gnncompile.region") == 1
    )
    assert found.count("lower_unfused", "gnncompile.csr") == 2  # by both ends, once


GATHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "all features": lambda x, row, col: x[row, :],
    "ellipsis": lambda x, row, col: x[row, ...],
    "take_along_dim": lambda x, row, col: torch.take_along_dim(x, row.view(-1, 1), 0),
    "embedding": lambda x, row, col: F.embedding(row, x),
    "a pair": lambda x, row, col: x[torch.stack([row, col])][0],
}


@pytest.mark.parametrize("spelling", GATHERS)
def test_gathers(spelling: str) -> None:
    found = check(lambda x, row, col: add(x, col, GATHERS[spelling](x, row, col).exp()), *data())
    if spelling != "embedding":  # its gradient is another one
        is_one_region(found)


@pytest.mark.parametrize("reduce", ["mean", "amax", "amin"])
def test_index_reduce(reduce: str) -> None:
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return torch.zeros_like(x).index_reduce_(0, col, x[row] * 2, reduce, include_self=False)

    is_one_region(check(fn, *data()), gathers=2 if reduce == "mean" else 1)  # a mean reads degrees


BASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a residual": lambda x, i, m: x.index_add(0, i, m),
    "in place": lambda x, i, m: (2 * x).index_add_(0, i, m),
    "scatter": lambda x, i, m: x.scatter_add(0, i.view(-1, 1).expand_as(m), m),
    "index_put": lambda x, i, m: x.index_put((i,), m, accumulate=True),
    "scaled": lambda x, i, m: x.index_add(0, i, m, alpha=-2),
    "scaled, onto zeros": lambda x, i, m: torch.zeros_like(x).index_add(0, i, m, alpha=0.5),
}


@pytest.mark.parametrize("spelling", BASES)
def test_sums_onto_something(spelling: str) -> None:
    is_one_region(check(lambda x, row, col: BASES[spelling](x, col, x[row].exp()), *data()))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("pointers", [False, True])
def test_segments(reduce: str, pointers: bool) -> None:
    def fn(x: Tensor, row: Tensor, given: Tensor) -> Tensor:
        if pointers:
            return segment(x[row].exp(), given, reduce)
        return torch.segment_reduce(x[row].exp(), reduce, lengths=given, initial=0)

    lengths = torch.tensor([3, 0, 4, 0, 7, 0])
    given = F.pad(lengths.cumsum(0), (1, 0)) if pointers else lengths
    x, row, _ = data()
    is_one_region(check(fn, x, row, given), gathers=2 if reduce == "mean" else 1)


def test_extrema_of_segments_stay() -> None:
    """Their gradient in torch is another one for several largest entries."""
    found = check(
        lambda x, row, given: torch.segment_reduce(x[row], "max", lengths=given), *data()[:2], torch.tensor([6, 8])
    )
    assert found is not None and not found.ctx.log.regions


# -- other dimensions -----------------------------------------------------------------------------------------------


def batched(x: Tensor) -> Tensor:
    return torch.stack([x * k for k in range(1, BATCH + 1)])


def wide(index: Tensor, like: Tensor) -> Tensor:
    return index.view(1, -1, 1).expand_as(like)


ALONG: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda z, i, j, w: torch.zeros_like(z).index_add(1, j, z[:, i].relu()),
    "of the last but one": lambda z, i, j, w: torch.zeros_like(z).index_add_(-2, j, z.index_select(-2, i) * w),
    "scatter_add": lambda z, i, j, w: torch.zeros_like(z).scatter_add(1, wide(j, z[:, i]), z[:, i] * w),
    "repeated": lambda z, i, j, w: torch.zeros_like(z).scatter_add(
        1, j.view(1, -1, 1).repeat(z.size(0), 1, z.size(2)), z[:, i, :] * z[:, j]
    ),
    "gather": lambda z, i, j, w: torch.zeros_like(z).index_add(1, j, z.gather(1, wide(i, z[:, i])).exp()),
    "maximum": lambda z, i, j, w: torch.zeros_like(z).scatter_reduce(
        1, wide(j, z[:, i]), z[:, i] * w, "amax", include_self=False
    ),
    "a residual": lambda z, i, j, w: z.index_add(1, j, (z[:, i] - z[:, j]) * w),
    "dropout and a bias": lambda z, i, j, w: torch.zeros_like(z).index_add(
        1, j, F.dropout(z[:, i] + torch.arange(4.0), 0.5, training=False) * w.unsqueeze(0)
    ),
}


@pytest.mark.parametrize("spelling", ALONG)
def test_a_batch_axis_in_front(spelling: str) -> None:
    x, row, col = data()
    gathers = 2 if spelling in ("repeated", "a residual") else 1
    weight = torch.rand(row.numel(), 1)
    is_one_region(check(lambda x, i, j, w: ALONG[spelling](batched(x), i, j, w), x, row, col, weight), gathers)


def test_edges_last() -> None:
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        z = x.t().contiguous()
        return torch.zeros_like(z).index_add(1, col, z[:, row].exp())

    is_one_region(check(fn, *data()))


def test_other_axes_in_other_orders() -> None:
    """What is no region stays as it is: nothing is gathered along the axis, and rows are too wide for a kernel."""

    def gathers_nothing(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return torch.zeros_like(batched(x)).index_add(1, col, batched(x[row]))

    def wide_rows(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        z = x.expand(4096, -1, -1)
        return torch.zeros(z.shape).index_add(1, col, z[:, row].exp()).sum(0)

    for fn in (gathers_nothing, wide_rows):
        found = check(fn, *data())
        assert found is not None and not found.ctx.log.regions and found.count("lower_unfused", "permute") == 0


TENSORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "all axes": lambda t, w, v: t * 2,
    "a factor of each channel": lambda t, w, v: t * w[:, :, None, None],
    "a factor of each edge": lambda t, w, v: (t + 1).relu() * w[:, :1, None, None],
    "numbers for the last axes": lambda t, w, v: t * w[:, :, None, None] + v,
}


@pytest.mark.parametrize("spelling", TENSORS)
def test_more_than_two_feature_axes(spelling: str) -> None:
    def fn(x: Tensor, row: Tensor, col: Tensor, w: Tensor, v: Tensor) -> Tensor:
        t = x[:, :, None, None] * v.exp()
        return torch.zeros_like(t).index_add(0, col, TENSORS[spelling](t[row], w, v))

    x, row, col = data()
    weights = torch.rand(row.numel(), WIDTH), torch.rand(3, 3)
    found = check(fn, x, row, col, *weights)
    is_one_region(found)


def test_uneven_axes_stay() -> None:
    def fn(x: Tensor, row: Tensor, col: Tensor, v: Tensor) -> Tensor:
        t = x[:, :, None, None] * v
        return torch.zeros_like(t).index_add(0, col, t[row] * x[row].view(-1, WIDTH, 1, 1) * v[:1] * v[:, :1])

    found = check(fn, *data(), torch.rand(3, 3))
    assert found is not None and not found.ctx.log.regions
    assert found.ctx.log.skipped[0].reason.startswith("messages with 3 feature axes have no kernel")


# -- whole models ---------------------------------------------------------------------------------------------------


class Spelled(nn.Module):
    """A batch axis, an index that is repeated, and rows of three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index.long()
        z = torch.stack([x, self.lin(x)])
        z = z + torch.zeros_like(z).index_add(1, col, z[:, row].relu())
        h = z.sum(0)
        h = h.scatter_add(0, col.unsqueeze(1).repeat(1, 4), (h[row] - h[col]).tanh())
        t = h.view(-1, 4, 1, 1) * torch.ones(4, 3, 3, dtype=x.dtype)
        return torch.zeros_like(t).index_add(0, col, t[row] * h[col].view(-1, 4, 1, 1)).sum([2, 3])


def compare(model: nn.Module, compiled: nn.Module, x: Tensor, edge_index: Tensor) -> None:
    found = []
    for run in (model, compiled):
        leaf = x.clone().requires_grad_()
        out = run(leaf, edge_index)
        found.append([out, *torch.autograd.grad(out.square().sum(), [leaf, *model.parameters()])])
    torch.testing.assert_close(found[1], found[0])


def test_awkward_graphs() -> None:
    torch.manual_seed(0)
    model = Spelled().double()
    compiled = gnncompile.compile(model)
    for graph in testing.awkward(channels=4).values():
        if isinstance(graph, Data):
            compare(model, compiled, graph.x.double(), graph.edge_index)
    report = gnncompile.explain(model, torch.randn(20, 4, dtype=torch.float64), torch.randint(20, (2, 50)))
    assert len(report.regions) == 3 and not report.skipped


@pytest.mark.parametrize("layer", [SAGEConv, GCNConv])
def test_layers_over_batches_of_features(layer: type[nn.Module]) -> None:
    """PyG's layers take ``[batch, num_nodes, channels]``: ``node_dim`` is -2."""
    torch.manual_seed(0)
    model = layer(4, 4).double()
    compiled = gnncompile.compile(model)
    for nodes, edges in ((20, 70), (7, 0), (9, 30)):
        x = torch.randn(BATCH, nodes, 4, dtype=torch.float64)
        compare(model, compiled, x, torch.randint(nodes, (2, edges)))
    report = gnncompile.explain(model, x, torch.randint(9, (2, 30)))
    assert report.regions and not report.skipped and report.captured_graphs == 1


LARGEST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "expanded": lambda i, v: i.view(-1, 1).expand(v.size()),
    "repeated": lambda i, v: i.unsqueeze(1).repeat(1, 4).long(),
    "as it is": lambda i, v: i[:, None].expand_as(v).contiguous(),
}


@pytest.mark.parametrize("spelling", LARGEST)
@pytest.mark.parametrize("asks", [True, False])
def test_the_number_of_segments_of_an_index_for_every_element(spelling: str, asks: bool) -> None:
    """torch_scatter's functions without a size: the number comes with the index, and no step waits for it."""

    def model(x: Tensor, edge_index: Tensor) -> Tensor:
        v = x[edge_index[0]]
        index = LARGEST[spelling](edge_index[1], v)
        number = 0 if asks and index.numel() == 0 else int(index.max()) + 1
        return torch.zeros(number, 4, dtype=x.dtype).scatter_add(0, index, v)

    compiled = gnncompile.compile(model)
    for edges in (30, 0, 1, 12) if asks else (30, 12):
        x, edge_index = torch.randn(9, 4, dtype=torch.float64), torch.randint(9, (2, edges))
        found = []
        for run in (model, compiled):
            leaf = x.clone().requires_grad_()
            out = run(leaf, edge_index)
            found.append([out, torch.autograd.grad(out.square().sum(), leaf)[0]])
        torch.testing.assert_close(found[1], found[0])
    report = gnncompile.explain(model, torch.randn(9, 4), torch.randint(9, (2, 30)))
    assert report.host_syncs == 0 and report.graph_breaks == 0 and len(report.regions) == 1
