"""Attention and max without linear layers: queries, keys and values are inputs, and every input gets a gradient.

The modules are written with PyG's utilities, as a user would write them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import scatter, softmax

from benchmarks.cases import limits
from benchmarks.cases.graphs import GRAPHS, MESH, MESH_TO_GRID, Graph
from benchmarks.cases.inputs import MakeInputs, ordered
from benchmarks.cases.layers import Layer
from benchmarks.cases.targets import Target


class DotProduct(nn.Module):
    r"""Dot-product attention :math:`\sum_j \mathrm{softmax}_j(\mathbf{q}_i^\top \mathbf{k}_j / \sqrt{c}) \mathbf{v}_j`.

    Edge features are added to keys and values, as `TransformerConv` does with its projected ones.
    """

    def __init__(self, heads: int, channels: int) -> None:
        super().__init__()
        self.heads, self.channels = heads, channels

    def forward(self, q: Tensor, k: Tensor, v: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Returns `[num_destinations, heads, channels]`.

        Args:
            q: `[num_destinations, heads, channels]`.
            k: `[num_sources, heads, channels]`.
            v: `[num_sources, heads, channels]`.
            edge_index: `[2, num_edges]`.
            edge_attr: `[num_edges, heads * channels]`.
        """
        source, destination = edge_index[0], edge_index[1]
        k_j, v_j = k.index_select(0, source), v.index_select(0, source)
        if edge_attr is not None:
            edge_attr = edge_attr.view(-1, self.heads, self.channels)
            k_j, v_j = k_j + edge_attr, v_j + edge_attr
        alpha = (q.index_select(0, destination) * k_j).sum(dim=-1) / math.sqrt(self.channels)
        alpha = softmax(alpha, destination, num_nodes=q.size(0))
        out: Tensor = scatter(v_j * alpha.unsqueeze(-1), destination, dim=0, dim_size=q.size(0), reduce="sum")
        return out


class HeadByHead(nn.Module):
    """:class:`DotProduct` with edge features, one head at a time; the backward computes each head again.

    The reference in float64 takes this form, because all heads at once need much more memory.
    """

    def __init__(self, heads: int, channels: int) -> None:
        super().__init__()
        self.heads, self.one = heads, DotProduct(1, channels)

    @classmethod
    def of(cls, core: nn.Module) -> "HeadByHead":
        """Returns this form of a `DotProduct`."""
        assert isinstance(core, DotProduct)
        return cls(core.heads, core.channels)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Returns the same result as :class:`DotProduct`, for the same arguments."""
        columns = edge_attr.chunk(self.heads, dim=1)
        rows = zip(*(tensor.split(1, dim=1) for tensor in (q, k, v)), strict=True)
        outs = [
            checkpoint(self.one, *head, edge_index, features, use_reentrant=False)
            for head, features in zip(rows, columns, strict=True)
        ]
        return torch.cat(outs, dim=1)


class GATv2(nn.Module):
    r"""The attention of `GATv2Conv`: the softmax over :math:`j` of
    :math:`\mathbf{a}^\top \mathrm{LeakyReLU}(\mathbf{x}^l_j + \mathbf{x}^r_i)`, and the sum of :math:`\mathbf{x}^l_j`.
    """

    def __init__(self, heads: int, channels: int) -> None:
        super().__init__()
        self.att = nn.Parameter(torch.randn(1, heads, channels) / math.sqrt(channels))

    def forward(self, x_l: Tensor, x_r: Tensor, edge_index: Tensor) -> Tensor:
        """Returns `[num_nodes, heads, channels]`. `x_l` (sources) and `x_r` (destinations) have the same shape."""
        source, destination = edge_index[0], edge_index[1]
        x_j = x_l.index_select(0, source)
        x = nn.functional.leaky_relu(x_j + x_r.index_select(0, destination), 0.2)
        alpha = softmax((x * self.att).sum(dim=-1), destination, num_nodes=x_r.size(0))
        out: Tensor = scatter(x_j * alpha.unsqueeze(-1), destination, dim=0, dim_size=x_r.size(0), reduce="sum")
        return out


class Max(nn.Module):
    """The maximum over neighbours."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Returns `[num_nodes, channels]`, as `x` is; a node without neighbours gets 0."""
        x_j = x.index_select(0, edge_index[0])
        out: Tensor = scatter(x_j, edge_index[1], dim=0, dim_size=x.size(0), reduce="max")
        return out


@dataclass(frozen=True)
class Core:
    """One of these modules with fixed heads and dtype, for any graph. The heads share a graph's `channels`."""

    name: str
    heads: int
    dtype: torch.dtype
    make: Callable[[int, int], nn.Module]
    make_inputs: MakeInputs
    limit: limits.Limit
    reference: Callable[[nn.Module], nn.Module] | None = None

    def layer(self, milliseconds: float) -> Layer:
        """Returns the layer of a case; `milliseconds` is its target time on an H200."""
        return Layer(
            lambda graph: self.make(self.heads, graph.channels // self.heads).to(self.dtype),
            self.make_inputs,
            limits.core(self.limit, self.dtype, self.heads),
            Target(milliseconds=milliseconds),
            reference=self.reference,
            all_grads=True,
        )

    def on(self, graph: Graph, milliseconds: float) -> tuple[str, Graph, Layer]:
        """Returns a case: its name, its graph and its layer."""
        shape = f"{self.heads}x{graph.channels // self.heads}" if self.heads > 1 else str(graph.channels)
        return f"{self.name} {shape} {str(self.dtype).removeprefix('torch.')}", graph, self.layer(milliseconds)


def dot_product(heads: int, dtype: torch.dtype) -> Core:
    """Returns dot-product attention of `q`, `k` and `v`."""

    def make_inputs(graph: Graph, order: str, generator: Generator) -> tuple[Any, ...]:
        q, k, v = (_rows(nodes, graph, generator, dtype, heads) for nodes in (graph.num_nodes, *[graph.sources] * 2))
        return q, k, v, *ordered(graph, order)

    return Core("dot", heads, dtype, DotProduct, make_inputs, limits.dot_product_core)


def dot_product_edge(heads: int, dtype: torch.dtype) -> Core:
    """Returns dot-product attention of `q`, `k` and `v` with features of each edge."""
    plain = dot_product(heads, dtype)

    def make_inputs(graph: Graph, order: str, generator: Generator) -> tuple[Any, ...]:
        edge_attr = _rows(graph.num_edges, graph, generator, dtype)
        return *plain.make_inputs(graph, order, generator), edge_attr

    return replace(
        plain,
        name="dot edge",
        make_inputs=make_inputs,
        limit=limits.dot_product_edge_core,
        reference=HeadByHead.of,
    )


def gatv2(heads: int, dtype: torch.dtype) -> Core:
    """Returns GATv2's attention of `x_l` and `x_r`."""

    def make_inputs(graph: Graph, order: str, generator: Generator) -> tuple[Any, ...]:
        x_l, x_r = (_rows(nodes, graph, generator, dtype, heads) for nodes in (graph.sources, graph.num_nodes))
        return x_l, x_r, *ordered(graph, order)

    return Core("GATv2", heads, dtype, GATv2, make_inputs, limits.gatv2_core)


def maximum(dtype: torch.dtype) -> Core:
    """Returns the maximum of `x` over neighbours."""

    def make_inputs(graph: Graph, order: str, generator: Generator) -> tuple[Any, ...]:
        return _rows(graph.num_nodes, graph, generator, dtype), *ordered(graph, order)

    return Core("max", 1, dtype, lambda heads, channels: Max(), make_inputs, limits.max_core)


def _rows(rows: int, graph: Graph, generator: Generator, dtype: torch.dtype, heads: int | None = None) -> Tensor:
    """Returns random rows `[rows, channels]`, or `[rows, heads, channels // heads]`, rounded to the dtype."""
    values = torch.randn(rows, graph.channels, generator=generator).to(dtype)
    return values if heads is None else values.view(rows, heads, -1)


F32, F16 = torch.float32, torch.float16
ARXIV = GRAPHS["powerlaw-arxiv"]
WIDE_MESH, WIDE_MESH_TO_GRID = (replace(graph, channels=16 * 64) for graph in (MESH, MESH_TO_GRID))

ATTENTION = (
    dot_product(4, F32).on(ARXIV, 2.9),
    dot_product(4, F16).on(ARXIV, 2.6),
    gatv2(4, F32).on(ARXIV, 3.5),
    gatv2(4, F16).on(ARXIV, 3.2),
    maximum(F32).on(ARXIV, 0.55),
    dot_product(4, F32).on(MESH_TO_GRID, 1.88),
    dot_product(4, F16).on(MESH_TO_GRID, 1.19),
    dot_product_edge(16, F16).on(WIDE_MESH_TO_GRID, 7.6),
    dot_product_edge(16, F16).on(WIDE_MESH, 1.45),
    dot_product(4, F32).on(MESH, 0.55),
    dot_product(4, F16).on(MESH, 0.55),
    gatv2(4, F32).on(MESH, 0.51),
    gatv2(4, F16).on(MESH, 0.72),
)
