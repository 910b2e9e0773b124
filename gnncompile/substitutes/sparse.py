"""Substitutes for PyG's functions of sparse adjacency matrices: ``torch.sparse``, and ``SparseTensor`` without values.

In such a matrix (``adj_t``), rows are destinations and columns are sources.

Dynamo takes no sparse tensor. So a matrix enters as row, column and value of each entry. In the captured graph, one op
with the shape of the matrix takes its place (``gnncompile::adjacency``), which never runs. The uses that PyG's layers
make of a matrix are traced as the functions below; any other use makes the model run uncompiled.

A matrix that the model makes is traced in the same way. Any other use of it breaks the graph where it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm as pyg_gcn_norm
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import add_self_loops as pyg_add_self_loops
from torch_geometric.utils import spmm as pyg_spmm
from torch_geometric.utils import to_edge_index as pyg_to_edge_index
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csc_tensor, to_torch_csr_tensor
from torch_geometric.utils.loop import compute_loop_attr
from torch_geometric.utils.sparse import set_sparse_value as pyg_set_sparse_value

from gnncompile import _compat
from gnncompile._compat import ADJACENCY, copy_of, keep_with, kept_with, needs_original, use_original
from gnncompile.substitutes.registry import substitute
from gnncompile.substitutes.relation_tables import is_edge_list
from gnncompile.substitutes.utils import merged

_OPS: Any = torch.ops.gnncompile

LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)

CLEAN, LOOPLESS, DOUBLE = "clean", "without self loops", "with several entries at one place"


class Matrix(NamedTuple):
    """A sparse matrix as its entries.

    Attributes:
        row: The row of each entry, ``[num_entries]``.
        col: The column of each entry, ``[num_entries]``.
        values: The value of each entry, ``[num_entries]``; None if all are 1.
        shape: A tensor ``[n, m, 0]``, which holds the shape of the matrix.
    """

    row: Any
    col: Any
    values: Tensor | None
    shape: Tensor


def take_apart(matrix: Tensor, rows: Callable[[Tensor], list[Tensor]], spread: Callable[..., list[Tensor]]) -> Matrix:
    """The entries of a matrix.

    Args:
        matrix: In COO, CSR or CSC layout.
        rows: Splits indices ``[2, num_entries]`` into two tensors.
        spread: Expands the compressed indices of a CSR or CSC matrix: returns both indices of each entry.

    Raises:
        Recapture: The values have features or a gradient, or the matrix is not coalesced.
    """
    for unable, what in (
        (matrix.requires_grad, "gradient"),
        (matrix.dim() != 2 or matrix.dense_dim() > 0, "dense dimensions"),
        (matrix.layout == torch.sparse_coo and not matrix.is_coalesced(), "uncoalesced entries"),
    ):
        if unable:
            raise needs_original(what, matrix.layout)
    if matrix.layout == torch.sparse_coo:
        row, col = rows(matrix._indices())
        values = matrix._values()
    else:
        values = matrix.values().detach()
        if matrix.layout == torch.sparse_csr:
            row, col = spread(matrix.crow_indices(), matrix.col_indices())
        else:
            col, row = spread(matrix.ccol_indices(), matrix.row_indices())
    return Matrix(row, col, values, torch.empty(*matrix.shape, 0, device=matrix.device))


def take_edges(adj: SparseTensor) -> Matrix:
    """The entries of a ``SparseTensor`` without values.

    Raises:
        Recapture: The matrix has values. Some layers weight messages by them, and others ignore them.
    """
    if adj.has_value():
        raise needs_original("values", SparseTensor)
    row, col, _ = adj.coo()
    shape = torch.empty(*adj.sparse_sizes(), 0, device=row.device)
    return Matrix(_compat.without_base(row), _compat.without_base(col), None, shape)


def make(row: Tensor, col: Tensor, values: Tensor | None, shape: Tensor, state: str = CLEAN) -> Tensor:
    """Makes the matrix of these entries as one op, traced by Dynamo.

    `state` is :data:`CLEAN`, :data:`LOOPLESS` or :data:`DOUBLE`.
    """
    matrix: Tensor = _OPS.adjacency(row, col, _ones(row) if values is None else values, shape)
    keep_with(matrix, (row, col, values, shape, state), ADJACENCY)
    return matrix


def _ones(row: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.ones(row.size(0), dtype=dtype, device=row.device)


_spmm, _to_edge_index = copy_of(pyg_spmm), copy_of(pyg_to_edge_index)
_add_self_loops, _gcn_norm = copy_of(pyg_add_self_loops), copy_of(pyg_gcn_norm)
_set_sparse_value = copy_of(pyg_set_sparse_value)


@substitute(pyg_spmm)
def spmm(src: Any, other: Tensor, reduce: str = "sum") -> Any:
    """See :func:`torch_geometric.utils.spmm`."""
    kept = kept_with(src, ADJACENCY)
    if kept is None:
        return _spmm(src, other, reduce)
    row, col, values, shape, state = kept
    reduce = "sum" if reduce == "add" else reduce
    if other.dim() != 2 or reduce not in ("sum", "mean", "min", "max") or (state == DOUBLE and reduce != "sum"):
        use_original("spmm")
    messages = other.index_select(0, col)
    if values is not None:
        messages = values.view(-1, 1) * messages
    return _OPS.segment_reduce(messages, row, shape.size(0), reduce)


@substitute(pyg_to_edge_index)
def to_edge_index(adj: Any) -> Any:
    """See :func:`torch_geometric.utils.to_edge_index`."""
    kept = kept_with(adj, ADJACENCY)
    if kept is None:
        return _to_edge_index(adj)
    row, col, values, _, state = kept
    if state == DOUBLE:
        use_original("to_edge_index")
    return torch.stack([row, col]).long(), _ones(row) if values is None else values


@substitute(pyg_set_sparse_value)
def set_sparse_value(adj: Any, value: Tensor) -> Any:
    """See ``torch_geometric.utils.sparse.set_sparse_value``."""
    kept = kept_with(adj, ADJACENCY)
    if kept is None:
        return _set_sparse_value(adj, value)
    row, col, _, shape, state = kept
    if value.dim() != 1:
        use_original("set_sparse_value")
    return make(row, col, value, shape, state)


def without_self_loops(adj: Tensor) -> Tensor:
    """The matrix with the entries on its diagonal marked dead."""
    row, col, values, shape, _ = kept_with(adj, ADJACENCY)
    alive = row != col
    edges = _OPS.mark_dead(torch.stack([row, col]), alive)
    values = None if values is None else _OPS.mark_dead(values, alive)
    return make(edges[0], edges[1], values, shape, LOOPLESS)


@substitute(pyg_add_self_loops)
def add_self_loops(
    edge_index: Any, edge_attr: Tensor | None = None, fill_value: Any = None, num_nodes: Any = None
) -> Any:
    """See :func:`torch_geometric.utils.add_self_loops`. PyG sums the entries at one place; here they stay separate."""
    kept = kept_with(edge_index, ADJACENCY)
    if kept is None:
        return _add_self_loops(edge_index, edge_attr, fill_value, num_nodes)
    row, col, values, shape, state = kept
    if state == DOUBLE:
        use_original("add_self_loops")
    loops = torch.arange(torch.sym_min(shape.size(0), shape.size(1)), device=row.device, dtype=row.dtype)
    if values is not None:
        added = compute_loop_attr(torch.stack([row, col]), values, loops.size(0), True, fill_value)
        values = torch.cat([values, added])
    row, col = torch.cat([row, loops]), torch.cat([col, loops])
    return make(row, col, values, shape, CLEAN if state == LOOPLESS else DOUBLE), None


@substitute(pyg_gcn_norm)
def gcn_norm(
    edge_index: Any,
    edge_weight: Any = None,
    num_nodes: Any = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = "source_to_target",
    dtype: Any = None,
) -> Any:
    """See ``torch_geometric.nn.conv.gcn_conv.gcn_norm``."""
    if kept_with(edge_index, ADJACENCY) is None:
        return _gcn_norm(edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype)
    adj = _with_ones(edge_index, dtype, add_self_loops)
    adj = _with_loops(adj, 2.0 if improved else 1.0, num_nodes) if add_self_loops else adj
    row, col, values, shape, state = kept_with(adj, ADJACENCY)
    degree = _OPS.segment_reduce(values, row, shape.size(0) if num_nodes is None else num_nodes, "sum")
    scale = degree.pow(-0.5)
    scale = scale.masked_fill(scale == float("inf"), 0)
    return make(row, col, scale[col] * values * scale[row], shape, state), None


def _with_ones(adj: Tensor, dtype: torch.dtype | None, replaces_loops: bool) -> Tensor:
    """The matrix with values of 1 if it has none, as a ``SparseTensor`` has none.

    If `replaces_loops`, its self loops are then marked dead. PyG replaces the self loops of a ``SparseTensor``; for
    other matrices, PyG adds the new loops to the existing ones.
    """
    row, col, values, shape, state = kept_with(adj, ADJACENCY)
    if values is not None:
        return adj
    adj = make(row, col, _ones(row, dtype), shape, state)
    return without_self_loops(adj) if replaces_loops else adj


def _with_loops(adj: Tensor, fill_value: float, num_nodes: Any) -> Any:
    return add_self_loops(adj, None, fill_value, num_nodes)[0]


@torch.compiler.assume_constant_result
def _makes_matrices() -> bool:
    """Whether matrices that the model makes are captured."""
    return _compat.current_settings().makes_matrices


def _maker(original: Callable[..., Any], by_row: bool) -> Callable[..., Any]:
    """The substitute of a function that makes a matrix of edges, with entries sorted by row, or else by column."""
    theirs = copy_of(original)

    def made(edge_index: Any, edge_attr: Any = None, size: Any = None, is_coalesced: bool = False) -> Any:
        plain = is_edge_list(edge_index) and (
            edge_attr is None or (edge_attr.dim() == 1 and edge_attr.dtype != torch.bool)
        )
        if not plain or not _makes_matrices():
            return theirs(edge_index, edge_attr, size, is_coalesced)
        if size is None:
            size = int(edge_index.max()) + 1
        rows, cols = size if isinstance(size, (tuple, list)) else (size, size)
        rows = int(edge_index[0].max()) + 1 if rows is None else rows
        cols = int(edge_index[1].max()) + 1 if cols is None else cols
        attributes = [] if edge_attr is None else [edge_attr]
        if not is_coalesced:
            edge_index, attributes = merged(edge_index, attributes, cols if by_row else rows, sort_by_row=by_row)
        values = attributes[0] if attributes else torch.ones(edge_index.size(1), device=edge_index.device)
        return make(edge_index[0], edge_index[1], values, torch.empty(rows, cols, 0, device=values.device))

    return made


substitute(to_torch_coo_tensor)(_maker(to_torch_coo_tensor, by_row=True))
substitute(to_torch_csr_tensor)(_maker(to_torch_csr_tensor, by_row=True))
substitute(to_torch_csc_tensor)(_maker(to_torch_csc_tensor, by_row=False))


def indices(matrix: Tensor) -> Tensor:
    """The substitute of ``matrix.indices()``: int ``[2, num_entries]``."""
    row, col, _, _, state = kept_with(matrix, ADJACENCY)
    if state == DOUBLE:
        use_original("indices")
    return torch.stack([row, col])


def values(matrix: Tensor) -> Tensor:
    """The substitute of ``matrix.values()``: ``[num_entries]``."""
    row, _, held, _, state = kept_with(matrix, ADJACENCY)
    if state == DOUBLE:
        use_original("values")
    return _ones(row) if held is None else held


MATRIX_METHODS = {"indices": indices, "_indices": indices, "values": values, "_values": values}
"""Substitutes for the methods of a matrix. The model sees every matrix in COO layout."""
