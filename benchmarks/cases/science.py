"""The cases of the suite `science`: models that keep states or run layers on edges, in two precisions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from benchmarks.cases import limits
from benchmarks.cases import science_models as models
from benchmarks.cases.graphs import Graph, uniform
from benchmarks.cases.inputs import MakeInputs, ordered, plain, with_edge_features
from benchmarks.cases.layers import Layer
from benchmarks.cases.limits import Limit, Size
from benchmarks.cases.nested import map_tensors
from benchmarks.cases.targets import Target
from gnncompile.report.traffic import Phase, Work

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
QUERIES = 8

CPU_TARGET = Target(over_compile=1.5)
"""The target of every case on a CPU."""


def edge_layers(
    num_layers: int, gathered: float, edge_products: float, node_products: float, states: float = 0, nodes: float = 2
) -> Limit:
    """Returns the limit of a stack of layers that compute every value on edges again in the backward.

    Each layer walks forward, and backward by destination and by source: the second walk computes the layers on edges
    again and their gradients, the third adds rows per edge up. A state on the edges is read and written forward; its
    value, its gradient and the gradient before it are read or written backward.

    Args:
        num_layers: the number of layers.
        gathered: rows of `channels` values that the forward gathers per edge.
        edge_products: products of one edge's row with a `[channels, channels]` matrix, in the forward.
        node_products: the same for nodes, first layers of edge networks that are computed per node included.
        states: states per edge, in units of `channels` values.
        nodes: node tensors that a walk reads or writes.
    """

    def limit(size: Size) -> Work:
        square = size.channels * size.channels
        flops = 2 * size.edges * edge_products * square
        forward = size.walk(gathered, nodes, per_edge=2 * states * size.channels, flops=flops)
        backward = size.walk(gathered, 2 * nodes, per_edge=(3 * states + 1) * size.channels, flops=3 * flops)
        by_source = size.walk(1, nodes=1)
        rows = size.value_bytes * size.nodes * 2 * node_products * size.channels
        products = Work((Phase(streamed=rows, flops=2 * size.nodes * node_products * square),) * 3)
        one = forward + backward + by_source + products
        return Work(one.phases * num_layers)

    return limit


def _edge_states(graph: Graph, order: str, generator: Generator) -> tuple[Tensor, ...]:
    """`x` `[nodes, channels]`, `edge_index` `[2, edges]`, and `edge_attr` `[edges, channels]`."""
    x = torch.randn(graph.num_nodes, graph.channels, generator=generator)
    return x, *ordered(graph, order, torch.randn(graph.num_edges, graph.channels, generator=generator))


def _positions(graph: Graph, order: str, generator: Generator) -> tuple[Tensor, ...]:
    """`x` `[nodes, channels]`, `pos` `[nodes, 3]` in a cube of side 4, and `edge_index` `[2, edges]`."""
    x = torch.randn(graph.num_nodes, graph.channels, generator=generator)
    return x, 4 * torch.rand(graph.num_nodes, 3, generator=generator), *ordered(graph, order)


def _relations(graph: Graph, order: str, generator: Generator) -> tuple[Tensor, ...]:
    """`x` `[nodes, queries, channels]`, `edge_index` `[2, edges]`, and `edge_type` `[edges]`."""
    x = torch.randn(graph.num_nodes, QUERIES, graph.channels, generator=generator)
    return x, *ordered(graph, order, torch.randint(models.NUM_RELATIONS, (graph.num_edges,), generator=generator))


def bonds(num_atoms: int, num_bonds: int) -> Tensor:
    """Draws bonds in both directions, `[2, num_bonds]`: columns `2k` and `2k + 1` are each other's reverse."""
    one = uniform(num_atoms, num_bonds // 2)
    return torch.stack([one, one.flip(0)], dim=2).view(2, -1)


@dataclass(frozen=True)
class Science:
    """A model of the suite.

    Attributes:
        make: makes the model from the numbers of channels and of layers.
        num_layers: the number of layers.
        make_inputs: makes its arguments in float32.
        size: nodes, edges and channels.
        limit: the least work of a step.
        over_compile: the targets on a GPU, in fp32 and in bf16.
        edges: draws the edges.
    """

    make: Callable[[int, int], nn.Module]
    num_layers: int
    make_inputs: MakeInputs
    size: tuple[int, int, int]
    limit: Limit
    over_compile: tuple[float, float]
    edges: Callable[[int, int], Tensor] = uniform

    def graph(self, name: str) -> Graph:
        """Returns the graph of the model."""
        nodes, edges, channels = self.size
        return Graph(name, nodes, edges, channels, lambda: self.edges(nodes, edges), "random edges")

    def layer(self, precision: str) -> Layer:
        """Returns the case's description in a precision, one of `DTYPES`."""
        dtype = DTYPES[precision]

        def converted(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        def make_inputs(graph: Graph, order: str, generator: Generator) -> tuple[Tensor, ...]:
            return tuple(map_tensors(converted, one) for one in self.make_inputs(graph, order, generator))

        limit = limits.core(self.limit, dtype, limits.HEADS)
        target = Target(over_compile=self.over_compile[list(DTYPES).index(precision)])

        def make(graph: Graph) -> nn.Module:
            return self.make(graph.channels, self.num_layers).to(dtype)

        return Layer(make, make_inputs, limit, target, CPU_TARGET, all_grads=True)


STATES, MOLECULES, BONDS = (100_000, 600_000), (20_000, 600_000), (100_000, 200_000)

SCIENCE: dict[str, Science] = {
    "MeshGraphNet": Science(
        models.Processor, 4, _edge_states, (*STATES, 128), edge_layers(4, 2, 2, 5, states=1), (3.0, 3.0)
    ),
    "EGNN": Science(models.EGNN, 3, _positions, (*MOLECULES, 64), edge_layers(3, 2, 2, 5), (3.0, 2.5)),
    "SchNet": Science(models.SchNet, 3, _positions, (*MOLECULES, 128), edge_layers(3, 1, 1.4, 3), (2.5, 2.5)),
    "PaiNN": Science(models.PaiNN, 2, _positions, (*MOLECULES, 64), edge_layers(2, 6, 1, 17, nodes=8), (2.0, 2.0)),
    "D-MPNN": Science(
        models.DMPNN, 3, _edge_states, (*BONDS, 128), edge_layers(3, 2, 1, 1, states=2), (2.0, 2.0), bonds
    ),
    "GatedGCN": Science(models.GatedGCN, 3, _edge_states, (*STATES, 64), edge_layers(3, 3, 1, 4, states=2), (2.0, 2.0)),
    "relational convolution": Science(
        models.RelationalConvolution,
        3,
        _relations,
        (14_541, 544_230, 32),
        edge_layers(3, QUERIES, 0, 2 * QUERIES, nodes=2 * QUERIES),
        (2.0, 1.5),
    ),
    "CGCNN": Science(models.cgcnn, 3, _edge_states, (*STATES, 64), edge_layers(3, 4, 2, 4, states=0.5), (2.0, 1.5)),
    "EdgeConv": Science(models.edge_conv, 3, plain, (*MOLECULES, 64), edge_layers(3, 2, 1, 2), (2.0, 1.5)),
    "NNConv": Science(models.nn_conv, 2, with_edge_features, (*MOLECULES, 16), edge_layers(2, 1, 33, 1), (2.0, 1.5)),
    "PointTransformer": Science(
        models.point_transformer, 2, _positions, (*MOLECULES, 64), edge_layers(2, 3, 3, 3), (2.0, 1.5)
    ),
}
"""The models of the suite by name, with the sizes of their cases."""
