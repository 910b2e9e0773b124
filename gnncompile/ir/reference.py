"""The reference interpreter: runs a region in plain torch, and materialises every edge tensor.

The interpreter is slow and simple. Kernels are tested against its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnncompile.device import device_of
from gnncompile.ir import bits, philox
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import BITS, BOOL, FEATURE_REDUCTIONS, FEATURE_SUMS, INDEX, LAYERS, SEED, Node, Region, Space


class Layout(NamedTuple):
    """The edges of a graph ordered by row.

    Attributes:
        rowptr: Where the edges of each row begin and end, ``[num_rows + 1]``, int32. Masked edges (removed self loops)
            are stored from ``rowptr[-1]`` on, and are never walked.
        col: The other end of each edge, in row order, ``[num_edges]``, int32.
        edge: The index of each edge in the edge list, in row order, ``[num_edges]``, int32. Empty if no region reads
            it.
    """

    rowptr: Tensor
    col: Tensor
    edge: Tensor

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.rowptr.size(0) - 1


def run(region: Region, tensors: Sequence[Tensor], layout: Layout, slack: int = 0) -> list[Tensor]:
    """Runs `region`.

    Args:
        region: The region.
        tensors: Its inputs, ``[rows, ...]`` with ``heads * channels`` elements per row. A parameter has one row.
        layout: The edges, ordered by row.
        slack: How far a computed value may be from an input that it equals, in units in the last place. A gradient
            looks for the edges that reach a maximum. If a kernel found the maximum, it may round functions differently.

    Returns:
        One tensor ``[rows, *trailing]`` per output. An output on edges is in the order of the edge list, with zeros for
        masked edges.
    """
    return _Run(region, tensors, layout, layout.num_rows, layout.rowptr.device, slack).outputs()


def run_rows(region: Region, tensors: Sequence[Tensor], num_rows: int, device: torch.device) -> list[Tensor]:
    """Runs a region that has no value on edges, on `device`.

    The region may have no input tensor at all. Every step is a plain torch op that a compiler can fuse.
    """
    return _Run(region, tensors, None, num_rows, device).outputs()


def to_grid(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a tensor ``[rows, ...]`` as ``[rows, *shape]``.

    A reshape reads the number of rows, and a compiler would guard on this number. So other views are tried first.
    """
    if tuple(tensor.shape[1:]) == shape:
        return tensor
    if tensor.dim() == 2 and shape == (tensor.size(1), 1):
        return tensor.unsqueeze(2)
    if tensor.dim() == 1 and all(s == 1 for s in shape):
        return tensor[(slice(None), *(None for _ in shape))]
    return tensor.reshape(tensor.size(0), *shape)


def from_grid(value: Tensor, trailing: Sequence[int]) -> Tensor:
    """The inverse of :func:`to_grid`."""
    shape = tuple(value.shape[1:])
    if tuple(trailing) == shape:
        return value
    if shape and shape[-1] == 1 and tuple(trailing) == shape[:-1]:
        return value.squeeze(-1)
    return value.reshape(value.size(0), *trailing)


_IN_VECTORS = ("exp2", "pow", "sigmoid")
"""Functions that torch computes on a CPU in SIMD vectors of neighbours in memory.

Torch computes the elements left over at the end by another formula, which may differ in the last bit. So a value would
depend on its place in memory, and a maximum might not be found again among the same values in another order.
"""


def _apart(value: Tensor) -> Tensor:
    """Returns the same values with gaps between them in memory, so that torch computes each alone."""
    return torch.stack([value, value], -1).select(-1, 0) if device_of(value.device).computes_in_vectors else value


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Returns the rows of a table that an index names, and zeros where it is -1: this names the row after the last."""
    return torch.cat([table, table.new_zeros(1, *table.shape[1:])]).index_select(0, index % (table.size(0) + 1))


class _Run:
    def __init__(
        self,
        region: Region,
        tensors: Sequence[Tensor],
        layout: Layout | None,
        rows: int,
        device: torch.device,
        slack: int = 0,
    ) -> None:
        self.region, self.tensors, self.rows, self.walks = region, tensors, rows, layout is not None
        self.slack = slack
        self.dtype = getattr(torch, region.compute)
        self.device = device
        if layout is not None:
            degree = (layout.rowptr[1:] - layout.rowptr[:-1]).long()
            live = int(layout.rowptr[-1])
            self.num_edges = layout.col.size(0)
            self.row = torch.repeat_interleave(torch.arange(rows, device=self.device), degree)
            self.col, self.edge = layout.col[:live].long(), layout.edge[:live].long()
        # Without heads, values stay plain [rows, channels]: see to_grid.
        self.axes = slice(1, 2) if all(n.shape[0] == 1 for n in region.nodes) else slice(0, 2)
        self.values: list[Tensor] = []
        for node in region.nodes:
            self.values.append(self._value(node))

    def outputs(self) -> list[Tensor]:
        results = []
        for out in self.region.outputs:
            node, value = self.region.nodes[out.node], self.values[out.node]
            value = value.expand(value.size(0), *self._shape(node))
            if node.space is Space.EDGE:
                full = value.new_zeros(self.num_edges, *self._shape(node))
                value = full.index_copy(0, self.edge, value)
            elif node.space is Space.PARAMETER:
                value = value.expand(self.rows, *self._shape(node))
            value = bits.pack(value) if out.dtype == BITS else from_grid(value, out.trailing)
            results.append(value.to(bits.tensor_type(out.dtype)).contiguous())
        return results

    def _shape(self, node: Node) -> tuple[int, ...]:
        return tuple(node.shape)[self.axes]

    def _on_edges(self, at: int) -> Tensor:
        """Returns the value of a node, expanded to one row per edge."""
        node, value = self.region.nodes[at], self.values[at]
        if node.space is self.region.by:
            return value.index_select(0, self.row)
        return value if node.space is Space.EDGE else value.expand(self.row.numel(), *value.shape[1:])

    def _value(self, node: Node) -> Tensor:
        if node.op == "input":
            return self._load(node)
        if node.op == "const":
            return torch.full((1, *(1 for _ in self._shape(node))), node.number, dtype=self.dtype, device=self.device)
        if node.op in POINTWISE:
            edgewise = node.space is Space.EDGE
            args = [self._on_edges(a) if edgewise else self.values[a] for a in node.args]
            if node.op == "float":
                return args[0].to(self.dtype)
            if self.region.exact and self.walks and node.op in _IN_VECTORS:
                args = [_apart(a) for a in args]
            if self.slack and node.op == "eq" and sum(self.region.nodes[a].op == "input" for a in node.args) == 1:
                one, other = args
                return torch.isclose(one, other, rtol=self.slack * torch.finfo(self.dtype).eps, atol=0.0)
            return POINTWISE[node.op].torch(*args)
        if node.op in FEATURE_REDUCTIONS:
            axis, value = (-2 if node.op.endswith("heads") else -1), self.values[node.args[0]]
            return value.sum(axis, keepdim=True) if node.op in FEATURE_SUMS else value.amax(axis, keepdim=True)
        if node.op == "softmax":
            shifted = self._exponentials(node.args[0])
            return shifted / self._reduce("sum", shifted).index_select(0, self.row)
        if node.op == "dropout":
            return self._dropout(node)
        if node.op in LAYERS:
            return self._layer(node)
        if node.op == "softmax_max":
            return self._reduce("amax", self._on_edges(self.region.nodes[node.args[0]].args[0]))
        if node.op == "softmax_sum":
            return self._reduce("sum", self._exponentials(self.region.nodes[node.args[0]].args[0]))
        if node.op == "ties":
            edges = self._on_edges(self.region.nodes[node.args[0]].args[0])
            return self._reduce("sum", (edges == self.values[node.args[0]].index_select(0, self.row)).to(self.dtype))
        return self._reduce(REDUCTIONS[node.op].torch, self._on_edges(node.args[0]))

    def _dropout(self, node: Node) -> Tensor:
        feature = torch.arange(node.shape[0] * node.shape[1], device=self.device).reshape(1, *self._shape(node))
        edge = self.edge.view(-1, *(1 for _ in self._shape(node)))
        return philox.factors(self.values[node.args[0]], edge, feature, node.number, self.dtype)

    def _layer(self, node: Node) -> Tensor:
        first, other = self._on_edges(node.args[0]), node.args[1]
        if node.op == "linear" and self.region.exact:
            return self._products(first.flatten(1), self.values[other])
        if node.op == "linear":
            return first.flatten(1).matmul(self.values[other].flatten(1)).view(-1, *self._shape(node))
        if node.op == "transposed":
            weights = self.values[other]
            products = first.expand(-1, *weights.shape[1:]).flatten(1) @ weights.flatten(1).t()
            return products.view(-1, *self._shape(node))
        total = first.flatten(1).t().matmul(self._on_edges(other).expand(-1, *self._shape(node)).flatten(1))
        return total.view(-1, *self._shape(node))

    @staticmethod
    def _products(features: Tensor, weights: Tensor) -> Tensor:
        """Returns the linear layer of each edge. Rounding does not depend on an edge's place, unlike in a matmul."""
        total = weights.new_zeros(features.size(0), *weights.shape[1:])
        for feature, row in zip(features.unbind(1), weights.unbind(0), strict=True):
            total = total + feature.view(-1, *(1 for _ in row.shape)) * row
        return total

    def _load(self, node: Node) -> Tensor:
        tensor = self.tensors[int(node.value or 0)]
        if node.dtype in (SEED, INDEX):
            return tensor
        if node.dtype == BITS:
            return bits.unpack(tensor, self._shape(node)).index_select(0, self.edge)
        dtype = torch.bool if node.dtype == BOOL else self.dtype
        if node.space is Space.PARAMETER:
            return tensor.to(dtype).reshape(1, *self._shape(node))
        value = to_grid(tensor.to(dtype), self._shape(node))
        if node.space is self.region.by.opposite:
            return value.index_select(0, self.col)
        if node.space is Space.ORDERED:
            return value[: self.row.numel()]
        if node.through_index:
            row = self.tensors[int(self.region.nodes[node.args[0]].value or 0)].index_select(0, self.edge).long()
            return _rows(value, row)
        return value.index_select(0, self.edge) if node.space is Space.EDGE else value

    def _exponentials(self, logits: int) -> Tensor:
        value = self._on_edges(logits)
        return torch.exp(value - self._reduce("amax", value).index_select(0, self.row))

    def _reduce(self, kind: str, value: Tensor) -> Tensor:
        out = value.new_zeros(self.rows, *value.shape[1:])
        if kind == "sum":
            return out.index_add(0, self.row, value)
        index = self.row.view(-1, *(1 for _ in value.shape[1:])).expand_as(value)
        return out.scatter_reduce(0, index, value, kind, include_self=False)
