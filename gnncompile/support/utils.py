"""Cases for the functions of ``torch_geometric.utils`` that layers call. Each gets ``x @ weight`` as input.

A function that draws random numbers is told to keep everything, or runs from a seed that eager and compiled share. A
function whose result size depends on more than the input sizes can't be captured without a graph break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import utils

from gnncompile.support.case import CHANNELS as C
from gnncompile.support.case import Absent, Argument, Case, Graph

EDGES: tuple[Argument, ...] = ("x", "edge_index")
WEIGHTED: tuple[Argument, ...] = ("x", "edge_index", "edge_weight")
ROWS: tuple[Argument, ...] = ("x", "sorted_index")
BATCH: tuple[Argument, ...] = ("x", "batch")
BATCHED: tuple[Argument, ...] = ("x", "batch_edge_index", "batch")


class Between(nn.Module):
    """A module that returns ``fn(x @ weight, *others)``, so that the function's gradient is tested too."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(torch.randn(C, C) / 3)

    def forward(self, x: Tensor, *others: Any) -> Any:
        """Returns ``fn(x @ weight, *others)``."""
        return self.fn(x @ self.weight, *others)


def _case(name: str, inputs: tuple[Argument, ...], fn: Callable[..., Any], **kwargs: Any) -> Case:
    return Case(name, lambda: Between(fn), inputs, **kwargs)


def _sum(h: Tensor, edge_index: Tensor, weight: Tensor | None = None) -> Tensor:
    """Sums (weighted) source rows at destinations, so that the order of the edges does not matter."""
    message = h[edge_index[0]] if weight is None else weight.view(-1, 1) * h[edge_index[0]]
    return h.new_zeros(h.shape).index_add(0, edge_index[1], message)


def _half(graph: Graph) -> Tensor:
    return torch.arange(graph.nodes) % 2 == 0


def _adjacency(h: Tensor, edge_index: Tensor, weight: Tensor) -> Any:
    shape = (h.size(0), h.size(0))
    return utils.spmm(torch.sparse_coo_tensor(edge_index.flip(0), weight, shape), h)


DATA = "makes or reads data, no part of a layer"
CONVERTS = "converts to or from another library's graph"

_SINCE_PYG_2_8 = (
    [_case("segment_logsumexp", ROWS, lambda h, i: utils.segment_logsumexp(h, torch.arange(h.size(0) + 1), 0))]
    if hasattr(utils, "segment_logsumexp")
    else []
)

UTILS: tuple[Case | Absent, ...] = (
    _case("scatter", ROWS, lambda h, i: utils.scatter(h, i, reduce="mean")),
    _case("scatter [any]", ROWS, lambda h, i: utils.scatter(h, i, dim_size=h.size(0), reduce="any")),
    _case("scatter [features]", ROWS, lambda h, i: utils.scatter(h.t(), i, dim=1, dim_size=h.size(0))),
    _case("group_argsort", ROWS, lambda h, i: h * utils.group_argsort(h[:, 0], i, num_groups=h.size(0)).unsqueeze(1)),
    _case("group_cat", ROWS, lambda h, i: utils.group_cat([h, 2 * h], [i, i])),
    _case("segment", (*ROWS,), lambda h, i: utils.segment(h, torch.arange(h.size(0) + 1), reduce="sum")),
    *_SINCE_PYG_2_8,
    _case("index_sort", ROWS, lambda h, i: h[utils.index_sort(i.flip(0), stable=True)[1]]),
    _case("cumsum", ROWS, lambda h, i: h * utils.cumsum(i)[1:].unsqueeze(1)),
    _case("degree", EDGES, lambda h, e: h / utils.degree(e[1], h.size(0), h.dtype).clamp(min=1).unsqueeze(1)),
    _case("degree [no size]", ROWS, lambda h, i: h.sum() * utils.degree(i, dtype=h.dtype)),
    _case("softmax", EDGES, lambda h, e: _sum(h, e, utils.softmax(h[e[0], 0], e[1], num_nodes=h.size(0)))),
    _case("softmax [no size]", ROWS, lambda h, i: utils.softmax(h, i)),
    _case("softmax [ptr]", ROWS, lambda h, i: utils.softmax(h, ptr=torch.arange(h.size(0) + 1))),
    _case("lexsort", ROWS, lambda h, i: h[utils.lexsort([i, -i])]),
    _case("sort_edge_index", WEIGHTED, lambda h, e, w: _sum(h, *utils.sort_edge_index(e, w, h.size(0)))),
    _case("coalesce", WEIGHTED, lambda h, e, w: _sum(h, *utils.coalesce(e, w, h.size(0)))),
    _case("is_undirected", EDGES, lambda h, e: h * utils.is_undirected(e, num_nodes=h.size(0))),
    _case("to_undirected", WEIGHTED, lambda h, e, w: _sum(h, *utils.to_undirected(e, w, h.size(0)))),
    _case("contains_self_loops", EDGES, lambda h, e: h * utils.contains_self_loops(e)),
    _case("remove_self_loops", WEIGHTED, lambda h, e, w: _sum(h, *utils.remove_self_loops(e, w))),
    _case("segregate_self_loops", EDGES, lambda h, e: _sum(h, utils.segregate_self_loops(e)[0])),
    _case("add_self_loops", WEIGHTED, lambda h, e, w: _sum(h, *utils.add_self_loops(e, w, 2.0, h.size(0)))),
    _case("add_self_loops [no size]", EDGES, lambda h, e: _sum(h, utils.add_self_loops(e)[0])),
    _case(
        "add_remaining_self_loops",
        WEIGHTED,
        lambda h, e, w: _sum(h, *utils.add_remaining_self_loops(e, w, 2.0, h.size(0))),
    ),
    _case("get_self_loop_attr", WEIGHTED, lambda h, e, w: h * utils.get_self_loop_attr(e, w, h.size(0)).unsqueeze(1)),
    _case("contains_isolated_nodes", EDGES, lambda h, e: h * utils.contains_isolated_nodes(e, h.size(0))),
    _case("remove_isolated_nodes", EDGES, lambda h, e: h[utils.remove_isolated_nodes(e, num_nodes=h.size(0))[2]]),
    Absent("get_num_hops", "looks at a model, not at a graph"),
    _case("subgraph", (*WEIGHTED, _half), lambda h, e, w, half: _sum(h, *utils.subgraph(half, e, w))),
    _case(
        "bipartite_subgraph",
        (*WEIGHTED, _half),
        lambda h, e, w, half: _sum(h, *utils.bipartite_subgraph((half, half), e, w, size=(h.size(0), h.size(0)))),
    ),
    _case("k_hop_subgraph", EDGES, lambda h, e: _sum(h, utils.k_hop_subgraph(0, 2, e, num_nodes=h.size(0))[1])),
    _case("dropout_node", EDGES, lambda h, e: _sum(h, utils.dropout_node(e, 0.5, h.size(0))[0])),
    _case("dropout_edge", EDGES, lambda h, e: _sum(h, utils.dropout_edge(e, 0.5)[0])),
    _case("dropout_edge [not in training]", EDGES, lambda h, e: _sum(h, utils.dropout_edge(e, 0.5, training=False)[0])),
    Absent("dropout_path", "needs torch-cluster or pyg-lib for its walks"),
    Absent("dropout_adj", "deprecated: dropout_edge"),
    _case("homophily", (*EDGES, "node_type"), lambda h, e, y: h * utils.homophily(e, y)),
    Absent("assortativity", DATA),
    _case(
        "normalize_edge_index",
        EDGES,
        lambda h, e: _sum(h, *utils.normalize_edge_index(e, h.size(0))),
        dtype=torch.float32,
    ),
    _case("get_laplacian", WEIGHTED, lambda h, e, w: _sum(h, *utils.get_laplacian(e, w, "sym", num_nodes=h.size(0)))),
    Absent("get_mesh_laplacian", DATA),
    _case("mask_select", (*BATCH, _half), lambda h, b, half: utils.mask_select(h, 0, half)),
    _case("index_to_mask", ROWS, lambda h, i: h * utils.index_to_mask(i, h.size(0)).unsqueeze(1)),
    _case("mask_to_index", ("x", _half), lambda h, half: h[utils.mask_to_index(half)]),
    _case("select", ROWS, lambda h, i: utils.select(h, i, 0)),
    _case("narrow", ROWS, lambda h, i: utils.narrow(h, 0, 1, h.size(0) - 1)),
    _case("to_dense_batch", BATCH, lambda h, b: utils.to_dense_batch(h, b)),
    _case("to_dense_adj", ("x", "batch_edge_index", "batch"), lambda h, e, b: utils.to_dense_adj(e, b) * h.sum()),
    _case(
        "to_dense_adj [sizes]",
        (*WEIGHTED, "batch"),
        lambda h, e, w, b: utils.to_dense_adj(e, b * 0, w * h.sum(), h.size(0), 1),
    ),
    Absent("to_nested_tensor", "nested tensors are not captured"),
    Absent("from_nested_tensor", "nested tensors are not captured"),
    _case("dense_to_sparse", EDGES, lambda h, e: _sum(h, *utils.dense_to_sparse((h @ h.t()).relu()))),
    _case("is_torch_sparse_tensor", EDGES, lambda h, e: h if utils.is_torch_sparse_tensor(e) else 2 * h),
    _case("is_sparse", EDGES, lambda h, e: h if utils.is_sparse(e) else 2 * h),
    _case("to_torch_coo_tensor", WEIGHTED, lambda h, e, w: utils.to_torch_coo_tensor(e, w, h.size(0)) @ h),
    _case("to_torch_csr_tensor", WEIGHTED, lambda h, e, w: utils.to_torch_csr_tensor(e, w.detach(), h.size(0)) @ h),
    Absent("to_torch_csc_tensor", "as to_torch_csr_tensor"),
    Absent("to_torch_sparse_tensor", "as to_torch_csr_tensor"),
    _case(
        "to_edge_index",
        WEIGHTED,
        lambda h, e, w: _sum(h, *utils.to_edge_index(utils.to_torch_coo_tensor(e, w.detach(), h.size(0)))),
    ),
    _case("spmm", WEIGHTED, lambda h, e, w: utils.spmm(utils.to_torch_csr_tensor(e.flip(0), w, h.size(0)), h, "mean")),
    _case("spmm [torch.sparse_coo_tensor]", WEIGHTED, _adjacency),
    _case("unbatch", BATCH, lambda h, b: torch.cat([one.cumsum(0) for one in utils.unbatch(h, b)])),
    _case("unbatch_edge_index", BATCHED, lambda h, e, b: [h.sum() * one for one in utils.unbatch_edge_index(e, b)]),
    _case("one_hot", ROWS, lambda h, i: h.sum() * utils.one_hot(i, h.size(0), h.dtype)),
    _case("one_hot [no size]", ROWS, lambda h, i: h.sum() * utils.one_hot(i, dtype=h.dtype)),
    _case("normalized_cut", WEIGHTED, lambda h, e, w: utils.normalized_cut(e, w, h.size(0)) * h.sum()),
    Absent("grid", DATA),
    Absent("geodesic_distance", DATA),
    *(
        Absent(f"{way}_{kind}", CONVERTS)
        for kind in ("scipy_sparse_matrix", "networkx", "networkit", "trimesh", "cugraph", "dgl", "rdmol", "smiles")
        for way in ("to", "from")
    ),
    *(Absent(f"{kind}_graph", DATA) for kind in ("erdos_renyi", "stochastic_blockmodel", "barabasi_albert")),
    _case("negative_sampling", EDGES, lambda h, e: _sum(h, utils.negative_sampling(e, h.size(0)))),
    Absent("batched_negative_sampling", "as negative_sampling"),
    _case(
        "structured_negative_sampling",
        EDGES,
        lambda h, e: (h[e[0]] * h[utils.structured_negative_sampling(e, h.size(0) + 3)[2] % h.size(0)]).sum(1),
    ),
    Absent("structured_negative_sampling_feasible", DATA),
    _case("shuffle_node", BATCH, lambda h, b: utils.shuffle_node(h)[0]),
    _case("mask_feature", BATCH, lambda h, b: utils.mask_feature(h, 0.5, fill_value=0.0)[0]),
    _case("add_random_edge", EDGES, lambda h, e: _sum(h, utils.add_random_edge(e, 0.5, num_nodes=h.size(0))[0])),
    Absent("tree_decomposition", DATA),
    Absent("get_embeddings", "calls a model, no part of one"),
    Absent("get_embeddings_hetero", "calls a model, no part of one"),
    _case("trim_to_layer", WEIGHTED, lambda h, e, w: _sum(*utils.trim_to_layer(0, [], [], h, e, w))),
    Absent("get_ppr", DATA),
    Absent("train_test_split_edges", DATA),
    Absent("total_influence", DATA),
)
