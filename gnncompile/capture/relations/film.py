"""FiLM: messages scaled and shifted by their destination. See :class:`torch_geometric.nn.FiLMConv`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import FiLMConv, Linear

from gnncompile.capture.relations.tables import REDUCTIONS, Group, copy_of, groups, is_own, is_typed, segment_reduce

_film_forward = copy_of(FiLMConv.forward)


def _tables(layers: Any, x: Tensor, channels: int) -> list[Tensor]:
    """What layers (one per relation) make of `x`, as tables ``[num_nodes * relations, channels]``: one, or several from
    layers with several times as many outputs. Linear layers are one product per table.
    """
    wide = [len(layers) * x.size(0), channels]
    if all(type(one) is Linear and not one._forward_hooks and not one._forward_pre_hooks for one in layers):
        made = []
        for at in range(0, layers[0].out_channels, channels):
            weight = torch.cat([one.weight[at : at + channels] for one in layers])
            bias = None if layers[0].bias is None else torch.cat([one.bias[at : at + channels] for one in layers])
            made.append(F.linear(x, weight, bias).view(wide))
        return made
    parts = [one(x).split(channels, dim=-1) for one in layers]
    return [torch.stack(table, 1).view(wide) for table in zip(*parts, strict=True)]


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
        (table,) = _tables(self.lins[first : first + count], ends[0], channels)
        beta, gamma = _tables(self.films[first : first + count], ends[1], channels)
        source, rows = group.rows(group.source), group.rows(group.destination)
        messages = gamma.index_select(0, rows) * table.index_select(0, source) + beta.index_select(0, rows)
        if self.act is not None:
            messages = self.act(messages)
        reduced = segment_reduce(messages, rows, num_rows * count, REDUCTIONS[type(self.aggr_module)])
        out = out + reduced.view(num_rows, count, channels).sum(1)
    return out
