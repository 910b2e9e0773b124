"""The cases of the suite `science`: models that keep states or run layers on edges, in two precisions."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.cases import science_inputs
from benchmarks.cases import science_models as models
from benchmarks.cases.graphs import Graph, uniform
from benchmarks.cases.inputs import MakeInputs, plain, with_edge_features
from benchmarks.cases.layers import DTYPES, Layer
from benchmarks.cases.limits import Limit
from benchmarks.cases.science_inputs import QUERIES, bonds, edge_states, positions
from benchmarks.cases.science_limits import align, dime_net, edge_layers, graph_cast, mace, tensor_net
from benchmarks.cases.targets import Target

CPU_TARGET = Target(over_compile=1.5)
"""The target of every case on a CPU."""


@dataclass(frozen=True)
class Science:
    """A model of the suite.

    Attributes:
        make: makes the model from the numbers of channels and of layers.
        num_layers: the number of layers.
        make_inputs: makes its arguments in float32.
        size: nodes, edges and channels.
        limit: the least work of a step.
        over_compile: the targets on a GPU, in fp32 and in bf16 (which hold for autocast too).
        edges: draws the edges.
        milliseconds: the longest times on a GPU, in fp32 and in bf16; None where there is no target.
        reference: turns the model into one with the same results and parameters that needs less memory.
    """

    make: Callable[[int, int], nn.Module]
    num_layers: int
    make_inputs: MakeInputs
    size: tuple[int, int, int]
    limit: Limit
    over_compile: tuple[float, float]
    edges: Callable[[int, int], Tensor] = uniform
    milliseconds: tuple[float | None, float | None] = (None, None)
    reference: Callable[[nn.Module], nn.Module] | None = None

    def graph(self, name: str, scale: float = 1.0) -> Graph:
        """Returns the graph of the model, with `scale` times its nodes and edges: both numbers are even."""
        whole_nodes, whole_edges, channels = self.size
        nodes, edges = (2 * max(1, round(number * scale / 2)) for number in (whole_nodes, whole_edges))
        if scale == 1.0:
            nodes, edges = whole_nodes, whole_edges
        return Graph(name, nodes, edges, channels, lambda: self.edges(nodes, edges), "random edges")

    def layer(self, precision: str) -> Layer:
        """Returns the case's description in a precision, one of `DTYPES`."""
        at = min(list(DTYPES).index(precision), 1)  # autocast has the targets of bfloat16
        target = Target(over_compile=self.over_compile[at], milliseconds=self.milliseconds[at])

        def make(graph: Graph) -> nn.Module:
            return self.make(graph.channels, self.num_layers)

        layer = Layer(make, self.make_inputs, self.limit, target, CPU_TARGET, reference=self.reference, all_grads=True)
        return layer.in_precision(precision)


STATES, MOLECULES, BONDS = (100_000, 600_000), (20_000, 600_000), (100_000, 200_000)
MESH, TRIPLETS = (40_962, 327_660), (10_000, 100_000)  # about a million triplets

SCIENCE: dict[str, Science] = {
    "MeshGraphNet": Science(
        models.Processor, 4, edge_states, (*STATES, 128), edge_layers(4, 2, 2, 5, states=1), (3.0, 3.0)
    ),
    "MeshGraphNet-15": Science(
        models.Processor,
        15,
        edge_states,
        (166_666, 1_000_000, 128),
        edge_layers(15, 2, 2, 5, states=1),
        (3.0, 3.0),
        milliseconds=(None, 40.0),
        reference=models.CheckpointedProcessor.of,
    ),
    "GraphCast": Science(models.GraphCast, 4, science_inputs.grid_and_mesh, (*MESH, 128), graph_cast(4), (1.0, 1.0)),
    "EGNN": Science(models.EGNN, 3, positions, (*MOLECULES, 64), edge_layers(3, 2, 2, 5), (3.0, 2.5)),
    "SchNet": Science(models.SchNet, 3, positions, (*MOLECULES, 128), edge_layers(3, 1, 1.4, 3), (2.5, 2.5)),
    "PaiNN": Science(models.PaiNN, 2, positions, (*MOLECULES, 64), edge_layers(2, 6, 1, 17, nodes=8), (2.0, 2.0)),
    "TensorNet": Science(models.TensorNet, 2, positions, (*MOLECULES, 64), tensor_net(2), (3.0, 2.0)),
    "DimeNet++": Science(
        models.DimeNetPlusPlus, 3, science_inputs.with_triplets, (*TRIPLETS, 128), dime_net(3), (2.0, 1.5)
    ),
    "MACE": Science(models.MACE, 2, positions, (10_000, 300_000, 64), mace(2), (1.0, 1.0)),
    "D-MPNN": Science(
        models.DMPNN, 3, edge_states, (*BONDS, 128), edge_layers(3, 2, 1, 1, states=2), (2.0, 2.0), bonds
    ),
    "GatedGCN": Science(models.GatedGCN, 3, edge_states, (*STATES, 64), edge_layers(3, 3, 1, 4, states=2), (2.0, 2.0)),
    "ALIGNN": Science(models.ALIGNN, 2, science_inputs.line_graph, (*TRIPLETS, 64), align(2), (1.0, 1.0)),
    "relational convolution": Science(
        models.RelationalConvolution,
        3,
        science_inputs.relations,
        (14_541, 544_230, 32),
        edge_layers(3, QUERIES, 0, 2 * QUERIES, nodes=2 * QUERIES),
        (2.0, 1.5),
    ),
    "CGCNN": Science(models.cgcnn, 3, edge_states, (*STATES, 64), edge_layers(3, 4, 2, 4, states=0.5), (2.0, 1.5)),
    "EdgeConv": Science(models.edge_conv, 3, plain, (*MOLECULES, 64), edge_layers(3, 2, 1, 2), (2.0, 1.5)),
    "NNConv": Science(models.nn_conv, 2, with_edge_features, (*MOLECULES, 16), edge_layers(2, 1, 33, 1), (2.0, 1.5)),
    "PointTransformer": Science(
        models.point_transformer, 2, positions, (*MOLECULES, 64), edge_layers(2, 3, 3, 3), (2.0, 1.5)
    ),
}
"""The models of the suite by name, with the sizes of their cases."""
