"""PyG's layers whose own code looks at data, without the look where there is a way around it.

What is not PyG's own layer on a plain edge list is traced as written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import ChebConv, MFConv, SuperGATConv
from torch_geometric.utils import degree, get_laplacian

from gnncompile._compat import copy_of
from gnncompile.capture.relations.linear import typed_linear
from gnncompile.runtime import sampling_ops  # noqa: F401  (defines the ops)

_OPS: Any = torch.ops.gnncompile

_mf_forward = copy_of(MFConv.forward)
_cheb_norm = copy_of(ChebConv.__norm__)


def positive_sampling(self: Any, edge_index: Tensor) -> Tensor:
    """See :meth:`torch_geometric.nn.SuperGATConv.positive_sampling`."""
    live: Tensor = _OPS.live_edges(edge_index)
    p = 1.0 - self.edge_sample_ratio
    return _OPS.dropped_edges(live, p) if self.training and p > 0 else live


def negative_sampling(self: Any, edge_index: Tensor, num_nodes: int, batch: Tensor | None = None) -> Tensor:
    """See :meth:`torch_geometric.nn.SuperGATConv.negative_sampling`."""
    ratio = self.neg_sample_ratio * self.edge_sample_ratio
    live = _OPS.live_edges(edge_index)
    return _OPS.negative_edges(live, num_nodes, ratio, self.is_undirected, batch)  # type: ignore[no-any-return]


def cheb_norm(
    self: Any,
    edge_index: Any,
    num_nodes: Any,
    edge_weight: Any,
    normalization: Any,
    lambda_max: Any = None,
    dtype: Any = None,
    batch: Any = None,
) -> Any:
    """See :meth:`torch_geometric.nn.ChebConv.__norm__`."""
    if type(edge_index) is not Tensor or type(self).__norm__ is not ChebConv.__norm__:
        return _cheb_norm(self, edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch)
    index, weight = get_laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
    # The Laplacian's diagonal stands behind all other edges, of which removed self loops may be but masked.
    diagonal = torch.cat([weight.new_zeros(index.size(1) - num_nodes), weight.new_ones(num_nodes)])
    if lambda_max is None:
        alive = torch.logical_or(diagonal > 0, index[0] != index[1])
        all_in_one = _OPS.mark_dead(torch.zeros_like(index[0]), alive)
        lambda_max = 2.0 * _OPS.segment_reduce(weight, all_in_one, 1, "max")
    elif not isinstance(lambda_max, Tensor):
        lambda_max = torch.tensor(lambda_max, dtype=dtype, device=edge_index.device)
    if batch is not None and lambda_max.numel() > 1:
        lambda_max = lambda_max[batch[index[0]]]
    weight = (2.0 * weight) / lambda_max
    return index, weight.masked_fill(weight == float("inf"), 0) - diagonal


def mf_forward(self: Any, x: Any, edge_index: Any, size: Any = None) -> Any:
    """See :meth:`torch_geometric.nn.MFConv.forward`: every node's rows times the weights of its degree.

    All products are made, a few degrees at a time, and the right one is taken: ``max_degree + 1`` times the arithmetic
    of one layer, which a GPU has done before it could have asked how many nodes have which degree.
    """
    ends = (x, x) if isinstance(x, Tensor) else x
    plain = type(edge_index) is Tensor and edge_index.layout == torch.strided and ends[0].dim() == 2
    if not plain or type(self).forward is not MFConv.forward:
        return _mf_forward(self, x, edge_index, size)
    x_r = ends[1]
    num_rows = x_r.size(0) if x_r is not None else (size[1] if size is not None else ends[0].size(0))
    index = edge_index[1 if self.flow == "source_to_target" else 0]
    kind = degree(index, num_rows, dtype=torch.long).clamp(max=self.max_degree)
    h = self.propagate(edge_index, x=ends, size=size)
    out = typed_linear(self.lins_l, h, kind)
    return out if x_r is None else out + typed_linear(self.lins_r, x_r, kind)


METHODS: dict[Callable[..., Any], Callable[..., Any]] = {
    ChebConv.__norm__: cheb_norm,
    MFConv.forward: mf_forward,
    SuperGATConv.positive_sampling: positive_sampling,
    SuperGATConv.negative_sampling: negative_sampling,
}
"""What is traced in place of PyG's methods."""
