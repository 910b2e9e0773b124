"""Substitutes for PyG's helpers with data-dependent sizes, and the registration of all substitutes with Dynamo.

Removing an edge would change a size. So a removed edge keeps its place and is marked dead (``gnncompile::mark_dead``);
no kernel walks it. Other uses of ``torch.compile`` in the process still trace PyG's own code, through copies of its
functions.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch_geometric
import torch_geometric.utils as pyg
from torch import Tensor
from torch.autograd import forward_ad
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Batch
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.utils.num_nodes import maybe_num_nodes as pyg_maybe_num_nodes

import gnncompile.substitutes.attention
import gnncompile.substitutes.embedding
import gnncompile.substitutes.nn.aggr
import gnncompile.substitutes.nn.conv.film
import gnncompile.substitutes.nn.conv.hgt
import gnncompile.substitutes.nn.conv.rgat
import gnncompile.substitutes.nn.conv.rgcn
import gnncompile.substitutes.nn.conv.typed_linear
import gnncompile.substitutes.nn.edge_pooling
import gnncompile.substitutes.nn.layers
import gnncompile.substitutes.nn.pool
import gnncompile.substitutes.nn.sparse_products
import gnncompile.substitutes.utils  # noqa: F401  (each registers its substitutes)
from gnncompile import _compat
from gnncompile.substitutes import data, decompositions, sparse
from gnncompile.substitutes.registry import FUNCTIONS, METHODS, substitute
from gnncompile.substitutes.relation_tables import is_edge_list, sizes_and_starts
from gnncompile.substitutes.self_loops import loop_attributes

_OPS: Any = torch.ops.gnncompile

OFF, MASKED, EXACT = "off", "masked", "exact"


_OURS = os.path.dirname(__file__) + os.sep
"""The folder of the substitutes."""


@torch.compiler.assume_constant_result
def capturing() -> str:
    """How gnncompile traces: with masked edges (``"masked"``), without (``"exact"``), or not at all (``"off"``).

    Edges are masked only if PyG or a substitute is the caller: the user's code may count edges.
    """
    found = _backend_setting()
    if found == MASKED:
        caller = _compat.calling_file(skip=__file__)
        if "torch_geometric" not in caller and not caller.startswith(_OURS):
            return EXACT
    return found


def _backend_setting() -> str:
    if _compat.transform_traced():  # torch.func can differentiate and batch torch's own operations only
        return OFF
    return _compat.current_settings().self_loops


_scatter = _compat.copy_of(pyg.scatter)
_softmax = _compat.copy_of(pyg.softmax)
_maybe_num_nodes = _compat.copy_of(pyg_maybe_num_nodes)
_shallow_copy = _compat.copy_of(copy.copy)
_make_dual = _compat.copy_of(forward_ad.make_dual)
_to_dense_batch = _compat.copy_of(pyg.to_dense_batch)
_remove_self_loops = _compat.copy_of(pyg.remove_self_loops)
_add_remaining_self_loops = _compat.copy_of(pyg.add_remaining_self_loops)


@substitute(pyg.scatter)
def scatter(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum") -> Any:
    """See :func:`torch_geometric.utils.scatter`."""
    reduce = {"add": "sum", "amax": "max", "amin": "min"}.get(reduce, reduce)
    known = reduce in ("sum", "mean", "max", "min", "mul") and index.dim() == 1 and src.dim() > 0
    if not known or not src.is_floating_point() or dim not in (0, -src.dim()):
        return _scatter(src, index, dim, dim_size, reduce)
    if dim_size is None:
        dim_size = _OPS.num_segments(index)
    return _OPS.segment_reduce(src, index, dim_size, reduce)


@substitute(pyg.softmax)
def softmax(
    src: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, num_nodes: int | None = None, dim: int = 0
) -> Any:
    """See :func:`torch_geometric.utils.softmax`."""
    if index is None or ptr is not None or dim not in (0, -src.dim()) or index.dim() != 1:
        return _softmax(src, index, ptr, num_nodes, dim)
    if num_nodes is None:
        num_nodes = _OPS.num_segments(index)
    return _OPS.segment_softmax(src, index, num_nodes)


@substitute(pyg_maybe_num_nodes)
def maybe_num_nodes(edge_index: Any, num_nodes: int | None = None) -> Any:
    """See ``torch_geometric.utils.num_nodes.maybe_num_nodes``; the sizes that an ``EdgeIndex`` holds are used."""
    tables = _compat.kept_with(edge_index, _compat.EDGE_INDEX)
    if num_nodes is not None or tables is None:
        return _maybe_num_nodes(edge_index, num_nodes)
    rows, cols = tables
    n = _maybe_num_nodes(edge_index[0]) if rows is None else rows.size(0)
    m = _maybe_num_nodes(edge_index[1]) if cols is None else cols.size(0)
    return torch.sym_max(n, m)


def _mark_dead(edge_index: Tensor, alive: Tensor) -> Tensor:
    """Marks the edges dead where `alive` is False; the sizes of an ``EdgeIndex`` stay attached."""
    marked: Tensor = _OPS.mark_dead(edge_index, alive)
    tables = _compat.kept_with(edge_index, _compat.EDGE_INDEX)
    if tables is not None:
        _compat.keep_with(marked, tables, _compat.EDGE_INDEX)
    return marked


@substitute(copy.copy)
def shallow_copy(x: Any) -> Any:
    """See :func:`copy.copy`, whose way to copy dicts, lists and PyG's objects Dynamo can't trace."""
    if isinstance(x, (BaseData, BaseStorage)):
        return x.__copy__()
    if type(x) not in (dict, list):
        return _shallow_copy(x)
    return {**x} if type(x) is dict else [*x]


@substitute(pyg.to_dense_batch)
def to_dense_batch(
    x: Tensor,
    batch: Tensor | None = None,
    fill_value: float | Tensor = 0.0,
    max_num_nodes: int | None = None,
    batch_size: int | None = None,
) -> Any:
    """See :func:`torch_geometric.utils.to_dense_batch`; no size is compared with 1, which would become a guard."""
    if batch is None:
        return _to_dense_batch(x, batch, fill_value, max_num_nodes, batch_size)
    graphs = _OPS.num_segments(batch) if batch_size is None else batch_size
    longest = _OPS.longest_segment(batch) if max_num_nodes is None else max_num_nodes
    place = torch.arange(x.size(0), device=x.device) - sizes_and_starts(batch, graphs)[1].index_select(0, batch)
    spare = graphs * longest  # the row for nodes beyond max_num_nodes
    place = torch.where(place < longest, batch * longest + place, spare)
    rows = (x.new_zeros((spare + 1, *x.shape[1:])) + fill_value).to(x.dtype)
    filled = torch.zeros(spare + 1, dtype=torch.bool, device=x.device).index_fill(0, place, True)
    dense = rows.index_copy(0, place, x)[:spare].view(graphs, longest, *x.shape[1:])
    return dense, filled[:spare].view(graphs, longest)


@substitute(pyg.remove_self_loops)
def remove_self_loops(edge_index: Any, edge_attr: Tensor | None = None) -> Any:
    """See :func:`torch_geometric.utils.remove_self_loops`; the edges stay in place, marked dead."""
    if capturing() == MASKED and _compat.kept_with(edge_index, _compat.ADJACENCY) is not None:
        return sparse.without_self_loops(edge_index), None
    if capturing() != MASKED or not is_edge_list(edge_index):
        return _remove_self_loops(edge_index, edge_attr)
    alive = edge_index[0] != edge_index[1]
    if edge_attr is not None:
        edge_attr = _OPS.mark_dead(edge_attr, alive)
    return _mark_dead(edge_index, alive), edge_attr


@substitute(pyg.add_remaining_self_loops)
def add_remaining_self_loops(
    edge_index: Any, edge_attr: Tensor | None = None, fill_value: Any = None, num_nodes: int | None = None
) -> Any:
    """See :func:`torch_geometric.utils.add_remaining_self_loops`. The result has ``num_edges + num_nodes`` edges.

    Existing self loops are marked dead, and their attribute moves to the new loop of their node.
    """
    number = fill_value is None or isinstance(fill_value, (int, float))
    if capturing() != MASKED or not is_edge_list(edge_index) or num_nodes is None or not number:
        return _add_remaining_self_loops(edge_index, edge_attr, fill_value, num_nodes)
    alive = edge_index[0] != edge_index[1]
    nodes = torch.arange(num_nodes, device=edge_index.device, dtype=edge_index.dtype)
    kept = _OPS.mark_dead(edge_index, alive)
    full = torch.cat([kept, torch.stack([nodes, nodes])], dim=1)
    if edge_attr is None:
        return full, None
    loops = loop_attributes(edge_index, edge_attr, 1.0 if fill_value is None else fill_value, num_nodes)
    return full, torch.cat([edge_attr, loops])


def _while_capturing(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Any:
    """A function that calls `ours` while gnncompile captures, else `theirs`."""

    def choose(*args: Any, **kwargs: Any) -> Any:
        return theirs(*args, **kwargs) if capturing() == OFF else ours(*args, **kwargs)

    return choose


def make_dual(tensor: Tensor, tangent: Tensor, *, level: int | None = None) -> Any:
    """See :func:`torch.autograd.forward_ad.make_dual`, which takes no symbolic sizes: it breaks the graph."""
    torch._dynamo.graph_break()
    return _make_dual(tensor, tangent, level=level)


@lru_cache(maxsize=1)
def install() -> None:
    """Registers the substitutes with Dynamo, once per process, at the first compile."""
    for original, ours in FUNCTIONS.items():
        chosen = _while_capturing(ours, _compat.copy_of(original))
        torch.compiler.substitute_in_graph(original, skip_signature_check=True)(chosen)
    _compat.apply_patches()
    _compat.patch_evaluate_expr(tuple(m.__path__[0] + os.sep for m in (torch, torch_geometric)))
    _compat.notice_use_as(EdgeIndex, sparse.MATRIX_METHODS)
    for kind in (Index, EdgeIndex):
        # It runs inside of operations, below autograd: a capture of its own would lose what it writes.
        _compat.run_uncompiled(kind.__torch_dispatch__.__func__)
    _compat.patch_autograd_grad(lambda: _compat.current_settings().captures_gradients)
    decompositions.install()
    _compat.substitute_construction(Batch, data.new_batch, lambda: _backend_setting() != OFF)
    markers = {_OPS.sized, _OPS.laid_out, _OPS.hop_prefix, _OPS.padded}
    _compat.substitute_largest(_OPS.num_segments.default, markers, lambda: _backend_setting() != OFF)
    _compat.substitute_methods(METHODS, lambda: _backend_setting() != OFF)
    _compat.substitute_methods({forward_ad.make_dual: make_dual}, _compat.is_ours)
