"""FiLM: messages are scaled and shifted by their destination. See :class:`torch_geometric.nn.FiLMConv`."""

from __future__ import annotations

from typing import Any

from torch_geometric.nn import FiLMConv

from gnncompile._compat import copy_of
from gnncompile.substitutes.nn.conv.typed_linear import linear_tables
from gnncompile.substitutes.registry import substitute
from gnncompile.substitutes.relation_tables import REDUCTIONS, Group, groups, is_own, is_typed, segment_reduce

_film_forward = copy_of(FiLMConv.forward)


@substitute(FiLMConv.forward)
def film_forward(self: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
    """See :meth:`torch_geometric.nn.FiLMConv.forward`."""
    ends = x if isinstance(x, tuple) else (x, x)
    own = self.num_relations > 1 and is_own(self, FiLMConv) and self.node_dim == -2
    if not own or not is_typed(edge_index, edge_type) or len(ends) != 2 or ends[0].dim() != 2 or ends[1].dim() != 2:
        return _film_forward(self, x, edge_index, edge_type)
    num_rows, channels = ends[1].size(0), self.out_channels
    beta, gamma = self.film_skip(ends[1]).split(channels, dim=-1)
    out = gamma * self.lin_skip(ends[1]) + beta
    if self.act is not None:
        out = self.act(out)
    for first, count in groups(self.num_relations, channels):
        group = Group(self, edge_index, edge_type, first, count, counted=False)
        (table,) = linear_tables(self.lins[first : first + count], ends[0], channels)
        beta, gamma = linear_tables(self.films[first : first + count], ends[1], channels)
        source, rows = group.rows(group.source), group.rows(group.destination)
        messages = gamma.index_select(0, rows) * table.index_select(0, source) + beta.index_select(0, rows)
        if self.act is not None:
            messages = self.act(messages)
        reduced = segment_reduce(messages, rows, num_rows * count, REDUCTIONS[type(self.aggr_module)])
        out = out + reduced.view(num_rows, count, channels).sum(1)
    return out
