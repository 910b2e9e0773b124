"""Applies one of several linear layers to each row: computes a table of all layers' results, and selects rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import HeteroLinear, Linear

from gnncompile._compat import copy_of
from gnncompile.substitutes.registry import substitute
from gnncompile.substitutes.relation_tables import groups, products

_hetero_linear_forward = copy_of(HeteroLinear.forward)


def is_plain(layer: Any, kind: Any) -> bool:
    """Whether a layer is of exactly this class and has no hooks, so its weights may be used without calling it."""
    return type(layer) is kind and not layer._forward_hooks and not layer._forward_pre_hooks


def linear_tables(layers: Any, x: Tensor, channels: int) -> list[Tensor]:
    """The results of all layers (one per relation) on `x`, as tables ``[num_nodes * relations, channels]``.

    Layers with k times `channels` outputs give k tables. Plain linear layers take one matrix product per table.
    """
    wide = [len(layers) * x.size(0), channels]
    if all(is_plain(one, Linear) for one in layers):
        made = []
        for at in range(0, layers[0].out_channels, channels):
            weight = torch.cat([one.weight[at : at + channels] for one in layers])
            bias = None if layers[0].bias is None else torch.cat([one.bias[at : at + channels] for one in layers])
            made.append(F.linear(x, weight, bias).view(wide))
        return made
    parts = [one(x).split(channels, dim=-1) for one in layers]
    return [torch.stack(table, 1).view(wide) for table in zip(*parts, strict=True)]


@substitute(HeteroLinear.forward)
def hetero_linear_forward(self: Any, x: Tensor, type_vec: Tensor) -> Tensor:
    """See :class:`torch_geometric.nn.HeteroLinear`: computes the products of all types, and each row selects its own.

    With ``is_sorted=True``, PyG's own code runs: for types that are not sorted, it uses other weights.
    """
    if self.is_sorted or x.dim() != 2 or type_vec.dim() != 1:
        return _hetero_linear_forward(self, x, type_vec)  # type: ignore[no-any-return]
    out = typed_product(self.weight, x, type_vec)
    return out if self.bias is None else out + self.bias.index_select(0, type_vec)


def typed_product(weight: Tensor, x: Tensor, kind: Tensor) -> Tensor:
    """``x[i] @ weight[kind[i]]`` for every row i.

    Args:
        weight: ``[kinds, in_channels, out_channels]``.
        x: ``[num_nodes, in_channels]``.
        kind: ``[num_nodes]``, from 0 up to the number of kinds.
    """
    kinds, _, channels = weight.shape
    place = torch.arange(x.size(0), device=x.device)
    out = x.new_zeros(x.size(0), channels)
    for first, count in groups(kinds, channels):
        table = products(x, weight[first : first + count])
        inside = (kind >= first) & (kind < first + count)
        rows = place * count + torch.where(inside, kind - first, 0)
        out = torch.where(inside.view(-1, 1), table.index_select(0, rows), out)
    return out


def typed_linear(layers: Any, x: Tensor, kind: Tensor) -> Tensor:
    """``layers[kind[i]](x[i])`` for every row i; all layers have the same number of outputs.

    Args:
        layers: One linear layer per kind.
        x: ``[num_nodes, in_channels]``.
        kind: ``[num_nodes]``, from 0 up to the number of layers.
    """
    out: Tensor | None = None
    channels = layers[0].out_channels
    place = torch.arange(x.size(0), device=x.device)
    for first, count in groups(len(layers), channels):
        (table,) = linear_tables(layers[first : first + count], x, channels)
        inside = (kind >= first) & (kind < first + count)
        rows = place * count + torch.where(inside, kind - first, 0)
        part = torch.where(inside.view(-1, 1), table.index_select(0, rows), 0)
        out = part if out is None else out + part
    assert out is not None, "there is at least one layer"
    return out
