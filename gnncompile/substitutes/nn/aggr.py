"""Substitutes for PyG's aggregations that read data or compare sizes, which neither read nor compare.

For arguments that a substitute does not take, PyG's code is traced as written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.aggr import (
    EquilibriumAggregation,
    PatchTransformerAggregation,
    QuantileAggregation,
    SortAggregation,
)

from gnncompile import _compat
from gnncompile._compat import copy_of
from gnncompile.substitutes.registry import substitute
from gnncompile.substitutes.relation_tables import sizes_and_starts

_OPS: Any = torch.ops.gnncompile

_sort_forward = copy_of(SortAggregation.forward)
_patch_forward = copy_of(PatchTransformerAggregation.forward)
_quantile_forward = copy_of(QuantileAggregation.forward)


@substitute(SortAggregation.forward)
def sort_forward(
    self: Any,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    max_num_elements: int | None = None,
) -> Tensor:
    """See :class:`torch_geometric.nn.SortAggregation`. All segments are padded by k, so no size is compared with k."""
    fill = x.detach().min() - 1
    dense, _ = self.to_dense_batch(x, index, ptr, dim_size, dim, fill_value=fill, max_num_elements=max_num_elements)
    order = dense[:, :, -1].sort(dim=-1, descending=True)[1]
    ordered = dense.gather(1, order.unsqueeze(-1).expand_as(dense))
    spare = fill.expand(dense.size(0), self.k, dense.size(2))
    kept = torch.cat([ordered, spare], dim=1)[:, : self.k]
    return kept.masked_fill(kept == fill, 0).flatten(1)


@substitute(PatchTransformerAggregation.forward)
def patch_forward(
    self: Any,
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    max_num_elements: int | None = None,
) -> Any:
    """See :class:`torch_geometric.nn.PatchTransformerAggregation`; the longest segment's length is a symbolic size."""
    if ptr is not None:
        return _patch_forward(self, x, index, ptr, dim_size, dim, max_num_elements)
    most = _OPS.longest_segment(index) + 1 if max_num_elements is None else max_num_elements
    patches = most // self.patch_size
    x = self.lin(x)
    x, _ = self.to_dense_batch(x, index, ptr, dim_size, dim, max_num_elements=patches * self.patch_size)
    x = self.pad_projector(x.view(x.size(0), patches, self.patch_size * x.size(-1)))
    x = x + self.pe(torch.arange(patches, device=x.device))
    for block in self.blocks:
        x = block(x, x)
    found = [getattr(torch, name)(x, dim=1) for name in self.aggrs]
    return self.fc(torch.cat([one if isinstance(one, Tensor) else one[0] for one in found], dim=1))


@substitute(QuantileAggregation.forward)
def quantile_forward(
    self: Any,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
) -> Any:
    """See :class:`torch_geometric.nn.aggr.QuantileAggregation`; rows per segment are counted by a segment reduction."""
    if index is None or dim_size is None or x.dim() < 2 or dim not in (-x.dim(), 0):
        return _quantile_forward(self, x, index, ptr, dim_size, dim)
    features, x = x.shape[1:], x.flatten(1)
    count, first = sizes_and_starts(index, dim_size)
    place = (self.q * (count - 1) + first.clamp(max=x.size(0) - 1)).t().reshape(-1)
    x, by_value = torch.sort(x, dim=0)
    by_group = torch.sort(index.unsqueeze(1).expand_as(x).gather(0, by_value), dim=0, stable=True)[1]
    x = x.gather(0, by_group)
    if self.interpolation in ("lower", "higher", "nearest"):
        rounded = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[self.interpolation](place)
        found = x.index_select(0, rounded.long())
    else:
        below, above = x.index_select(0, place.floor().long()), x.index_select(0, place.ceil().long())
        share = place.frac().unsqueeze(1) if self.interpolation == "linear" else None
        found = 0.5 * below + 0.5 * above if share is None else below + (above - below) * share
    points = self.q.numel()
    empty = (count == 0).unsqueeze(1).expand(-1, points).reshape(-1, 1)
    found = found.masked_fill(empty, self.fill_value)
    return found.view(dim_size, points * features[0], *features[1:])


@substitute(EquilibriumAggregation.forward)
def equilibrium_forward(self: Any, *args: Any, **kwargs: Any) -> None:
    """See :class:`torch_geometric.nn.EquilibriumAggregation`, which breaks the graph and runs uncompiled.

    Its inner loop takes gradients of gradients, for which compiled graphs have no formula.
    """
    _run_uncompiled(EquilibriumAggregation)
    torch._dynamo.graph_break(msg="EquilibriumAggregation differentiates within its forward")


@torch.compiler.assume_constant_result
def _run_uncompiled(kind: type) -> None:
    _compat.run_uncompiled(kind.forward)  # type: ignore[attr-defined]
