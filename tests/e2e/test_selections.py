"""Sizes that only the data knows: captured whole, equal to eager for none, one, some and all rows, asked for once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_geometric.utils import (
    coalesce,
    dropout_edge,
    dropout_node,
    is_undirected,
    negative_sampling,
    scatter,
    softmax,
    subgraph,
    to_dense_adj,
    to_dense_batch,
    to_undirected,
)

import gnncompile
from gnncompile import _compat
from gnncompile.capture.compile import callable_of
from gnncompile.report.explain import count_syncs
from gnncompile.support.case import LADDER, Graph

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""x, edge_index, batch, edge_weight and a limit, ``[1]``."""


def _add(x: Tensor, edges: Tensor, weight: Tensor | None = None) -> Tensor:
    rows = x[edges[0]] if weight is None else x[edges[0]] * weight.view(-1, 1)
    return scatter(rows, edges[1], dim_size=x.size(0))


def _kept(x: Tensor, limit: Tensor) -> Tensor:
    return x[x[:, 0] > limit]


def _attention(x: Tensor, e: Tensor, w: Tensor, limit: Tensor) -> Tensor:
    mask = w > limit
    e = e[:, mask]
    share = softmax((x[e[0]] * x[e[1]]).sum(-1), e[1], num_nodes=x.size(0))
    return scatter(x[e[0]] * share.view(-1, 1), e[1], dim_size=x.size(0), reduce="max")


def _nodes(x: Tensor, e: Tensor, limit: Tensor) -> Tensor:
    mask = x[:, 0] > limit
    return _add(x[mask], subgraph(mask, e, relabel_nodes=True, num_nodes=x.size(0))[0])


def _assign(x: Tensor, limit: Tensor) -> Tensor:
    mask, out = x[:, 0] > limit, torch.zeros_like(x)
    out[mask] = x[mask] * 3
    return out


LEARNED: dict[str, Callable[..., Any]] = {
    "rows": lambda x, e, b, w, t: _kept(x, t) * 2,
    "mean": lambda x, e, b, w, t: _kept(x, t).mean(0),
    "softmax": lambda x, e, b, w, t: torch.softmax(_kept(x, t), 0),
    "products": lambda x, e, b, w, t: _kept(x, t) @ _kept(x, t).t(),
    "loss": lambda x, e, b, w, t: F.cross_entropy(_kept(x, t), b[x[:, 0] > t]),
    "write": lambda x, e, b, w, t: _assign(x, t),
    "two halves": lambda x, e, b, w, t: torch.cat([x[x[:, 0] > t], x[x[:, 0] <= t]]),
    "elements": lambda x, e, b, w, t: x[x > t],
    "graphs of rows": lambda x, e, b, w, t: scatter(_kept(x, t), b[x[:, 0] > t]),
    "shares of rows": lambda x, e, b, w, t: softmax(_kept(x, t), b[x[:, 0] > t]),
    "edges": lambda x, e, b, w, t: _add(x, e[:, w > t], w[w > t]),
    "attention over edges": lambda x, e, b, w, t: _attention(x, e, w, t),
    "nodes and edges": lambda x, e, b, w, t: _nodes(x, e, t),
    "a count": lambda x, e, b, w, t: x.new_ones(int((x[:, 0] > t).sum()), 2) * x.sum(),
}
"""Selected by learned numbers: a step has to ask how many there are."""

STRUCTURE: dict[str, Callable[..., Any]] = {
    "subgraph": lambda x, e, b, w, t: _add(x, *subgraph(b == 0, e, w, num_nodes=x.size(0))),
    "coalesce": lambda x, e, b, w, t: _add(x, *coalesce(e, w, num_nodes=x.size(0))),
    "coalesce alone": lambda x, e, b, w, t: coalesce(e),
    "undirected": lambda x, e, b, w, t: _add(x, *to_undirected(e, w)),
    "dense adjacency": lambda x, e, b, w, t: to_dense_adj(e, b, w),
    "dense adjacency, cut": lambda x, e, b, w, t: to_dense_adj(e, b, w, max_num_nodes=2),
    "dense adjacency of one": lambda x, e, b, w, t: to_dense_adj(e, edge_attr=w),
    "unique": lambda x, e, b, w, t: scatter(x, torch.unique(b, return_inverse=True)[1]),
    "bincount": lambda x, e, b, w, t: torch.bincount(b).to(x.dtype) * x.sum(),
    "repeated": lambda x, e, b, w, t: x.repeat_interleave(b + 1, dim=0),
    "a number": lambda x, e, b, w, t: x[: int((b == 0).sum())] * 2,
    "a negative number": lambda x, e, b, w, t: x[-1 - int((b == 0).sum()) :] * 2,
    "whether undirected": lambda x, e, b, w, t: [x * is_undirected(e, num_nodes=30), *_both_ways(x, e, b)],
    "dense batch and back": lambda x, e, b, w, t: _dense_and_back(x, b),
}
"""Selected by integer inputs: asked for once per distinct graph."""

DRAWN: dict[str, Callable[..., Any]] = {
    "dropped edges": lambda x, e, b, w, t: _add(x, dropout_edge(e, 0.4)[0]),
    "dropped nodes": lambda x, e, b, w, t: _add(x, dropout_node(e, 0.4, num_nodes=x.size(0))[0]),
    "drawn edges": lambda x, e, b, w, t: _add(x, negative_sampling(e, x.size(0), method="dense")),
}


def _both_ways(x: Tensor, edges: Tensor, batch: Tensor) -> list[Tensor]:
    """Whether all edges and their reverse are undirected: yes; with a number that both have, and with one of each."""
    both, sums = torch.cat([edges, edges.flip(1).flip(0)], dim=1), batch[edges].sum(0)
    same, own = torch.cat([sums, sums.flip(0)]), torch.arange(both.size(1))
    found = (is_undirected(both, a, 30) for a in (None, same, [same, own]))
    return [x * one for one in found]


def _dense_and_back(x: Tensor, batch: Tensor) -> Tensor:
    dense, mask = to_dense_batch(x, batch)
    return (dense * dense.sum(1, keepdim=True))[mask] + x


def _inputs(size: tuple[int, int], edges: str = "batch_edge_index") -> Iterator[Inputs]:
    """Limits that select some rows, none, all and one."""
    graph = Graph(*size)
    ordered = graph.x.detach()[:, 0].sort(descending=True).values
    one = (ordered[:1] + ordered[1:2]) / 2 if size[0] > 1 else ordered - 1
    for limit in (*(torch.tensor([v], dtype=torch.float64) for v in (0.0, 1e9, -1e9)), one):
        yield graph.x, getattr(graph, edges), graph.batch, graph.edge_weight, limit


def _run(fn: Callable[..., Any], args: Inputs) -> list[Tensor | None]:
    torch.manual_seed(0)
    random.seed(0)  # where PyG draws edges
    outputs = [t for t in pytree.tree_leaves(fn(*args)) if isinstance(t, Tensor)]
    total: Any = 0
    for out in outputs:
        if out.requires_grad:
            total = total + (out * torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)).sum()
    leaves = [a for a in args if a.requires_grad]
    gradients = torch.autograd.grad(total, leaves, allow_unused=True) if isinstance(total, Tensor) else ()
    return [*outputs, *gradients]


def _compare(fn: Callable[..., Any], compiled: Callable[..., Any], args: Inputs) -> None:
    for theirs, ours in zip(_run(fn, args), _run(compiled, args), strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


def _check(fn: Callable[..., Any], sizes: Any = LADDER, **options: Any) -> tuple[int, int, int]:
    """Compares on all sizes and limits; returns numbers of graphs, breaks and syncs of a steady step."""
    torch._dynamo.reset()
    compiled = gnncompile.compile(fn, options={"inductor": False, **options})
    before = _compat.graph_breaks()
    for size in sizes:
        for args in _inputs(size):
            _compare(fn, compiled, args)
    breaks = _compat.graph_breaks() - before
    args = next(_inputs(sizes[0]))
    compiled(*args)
    syncs = count_syncs(compiled, args, {})
    program = callable_of(compiled)
    assert program is not None
    return len(program.backend.captured), breaks, syncs


@pytest.mark.gpu
def test_a_number_that_is_on_the_host_already_is_no_sync():
    """A layout's number of hubs is copied to the host while the device works, and read there later."""
    number, x = torch.zeros(()), torch.ones((), device="cuda")
    assert count_syncs(lambda x: (bool(number), x * 2), (x,), {}) == 0
    for waits in (bool, Tensor.cpu, Tensor.tolist, torch.zeros(()).copy_):
        assert count_syncs(waits, (x,), {}) == 1
    assert count_syncs(lambda x: x.to("cpu", non_blocking=True), (x,), {}) == 0
    assert count_syncs(bool, (number,), {}) == 1


def test_a_number_on_the_host_is_no_sync_where_no_operation_shows_the_device():
    number, elsewhere = torch.zeros(()), torch.ones((), device="meta")
    assert count_syncs(lambda x: bool(number), (elsewhere,), {}) == 0
    assert count_syncs(lambda x: bool(number), (number,), {}) == 1


@pytest.mark.parametrize("name", LEARNED)
def test_selections_by_learned_numbers(name: str):
    if name == "loss" and torch.__version__ < "2.12":
        pytest.xfail("the cross entropy of torch 2.11 asks whether two sizes that only the data knows are equal")
    graphs, breaks, syncs = _check(LEARNED[name])
    assert (graphs, breaks) == (1, 0) and syncs > 0


@pytest.mark.parametrize("name", STRUCTURE)
def test_selections_by_structure_are_made_once(name: str):
    assert _check(STRUCTURE[name]) == (1, 0, 0)


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_selections_are_drawn_anew(name: str):
    sizes = LADDER[:4]
    graphs, breaks, syncs = _check(DRAWN[name], sizes)
    assert (graphs, breaks) == (1, 0) and syncs > 0
    compiled, args = gnncompile.compile(DRAWN[name], options={"inductor": False}), next(_inputs((30, 100)))
    results = [compiled(*args) for _ in range(5)]
    assert any(not torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("name", ["rows", "edges", "graphs of rows", "nodes and edges"])
def test_selections_in_inductor(name: str):
    assert _check(LEARNED[name], ((12, 40), (7, 0), (17, 61)), inductor=True)[:2] == (1, 0)


@pytest.mark.parametrize("name", ["coalesce", "dense batch and back", "dense adjacency"])
def test_selections_by_structure_in_inductor(name: str):
    assert _check(STRUCTURE[name], ((12, 40), (7, 0), (17, 61)), inductor=True) == (1, 0, 0)


def test_without_selections_the_graph_breaks():
    graphs, breaks, _ = _check(LEARNED["rows"], LADDER[:2], selections=False)
    assert graphs > 1 and breaks > 0


BRANCHES: dict[str, Callable[..., Any]] = {
    "is it empty": lambda x, e, b, w, t: x.sum(0) if _kept(x, t).size(0) == 0 else _kept(x, t).sum(0),
    "are there two": lambda x, e, b, w, t: x.sum(0) if len(_kept(x, t)) < 2 else _kept(x, t).std(0),
    "are there any": lambda x, e, b, w, t: _kept(x, t).sum(0) if (x[:, 0] > t).any() else x.sum(0),
    "a dimension less": lambda x, e, b, w, t: _kept(x, t).squeeze(0) * 2,
    "a loop": lambda x, e, b, w, t: sum((x * k for k in range(int((x[:, 0] > t).sum()))), x),
    "a list": lambda x, e, b, w, t: [1.0, 2.0, 3.0][int((b == 0).sum()) % 3] * x,
}
"""Code that asks a selection for its size: it breaks the graph and stays right."""


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.filterwarnings("ignore:gnncompile.*a capture failed")
def test_questions_of_a_size_fall_back(name: str):
    _check(BRANCHES[name], LADDER[:1] + LADDER[4:])


@pytest.mark.parametrize("inductor", [False, True])
def test_rows_that_meet_others_are_as_many(inductor: bool):
    def fn(x: Tensor, mask: Tensor, scores: Tensor) -> Tensor:
        return x + x[torch.logical_and(mask, scores > 0)]

    compiled = gnncompile.compile(fn, options={"inductor": inductor})
    x, everything = torch.randn(5, 3).requires_grad_(), torch.ones(5, dtype=torch.bool)
    assert torch.equal(compiled(x, everything, torch.ones(5)), fn(x, everything, torch.ones(5)))
    if inductor:
        with pytest.raises(RuntimeError):
            compiled(x, everything, torch.tensor([1.0, 0, 0, 0, 0]))


def test_structure_that_is_not_as_large_as_assumed_is_refused():
    def fn(x: Tensor, kind: Tensor) -> Tensor:
        return x + x[kind == 0]

    compiled = gnncompile.compile(fn, options={"inductor": False})
    x = torch.randn(5, 3)
    assert torch.equal(compiled(x, torch.zeros(5, dtype=torch.long)), 2 * x)
    with pytest.raises(RuntimeError, match="selections"):
        compiled(x, torch.arange(5))


@pytest.mark.parametrize("rows", [5, 7, 1])
def test_one_row_for_all(rows: int):
    def fn(x: Tensor, center: Tensor) -> Tensor:
        return x * 2 + center

    x, center = torch.randn(rows, 3), torch.randn(1, 3)
    compiled = gnncompile.compile(fn, options={"inductor": False})
    assert torch.equal(compiled(x, center), fn(x, center))


def test_results_handed_out_are_not_the_remembered_ones():
    def fn(x: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        kinds, place = torch.unique(batch, return_inverse=True)
        return scatter(x, place, dim_size=kinds.size(0)), kinds

    compiled = gnncompile.compile(fn, options={"inductor": False})
    x, batch = torch.randn(4, 3), torch.tensor([0, 0, 2, 2])
    compiled(x, batch)[1].fill_(7)
    assert compiled(x, batch)[1].tolist() == [0, 2]


def test_writes_through_the_only_view_keep_their_strides():
    def fn(x: Tensor, mask: Tensor) -> Tensor:
        heads = (x * 2).reshape(x.size(0), x.size(1), 2, 4).permute(0, 2, 1, 3)
        heads.masked_fill_(mask[:, None, :, None], 0.0)
        return (heads * 3).permute(0, 2, 1, 3).reshape(x.size(0), x.size(1), -1)

    compiled = gnncompile.compile(fn, options={"inductor": False})
    for graphs, nodes in ((3, 5), (2, 4), (1, 1)):
        x, mask = torch.randn(graphs, nodes, 8), torch.rand(graphs, nodes) > 0.5
        torch.testing.assert_close(compiled(x, mask), fn(x, mask))


def test_gradients_of_dense_attention_for_later_sizes():
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()

    def fn(x: Tensor, batch: Tensor) -> Tensor:
        dense, mask = to_dense_batch(x, batch)
        out, _ = attention(dense, dense, dense, key_padding_mask=~mask, need_weights=False)
        return out * mask.unsqueeze(-1)  # type: ignore[no-any-return]

    compiled = gnncompile.compile(fn)
    for size in LADDER[:3]:
        graph = Graph(*size)
        found, expected = (
            torch.autograd.grad(f(graph.x, graph.batch).square().sum(), graph.x)[0] for f in (compiled, fn)
        )
        torch.testing.assert_close(found, expected)
