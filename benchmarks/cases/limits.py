r"""The least that a layer must move and multiply, forward and backward, and the time for this on a known GPU.

A layer is a list of phases that run one after the other. A phase is either a product of node rows with a matrix or a
walk over the edges. Its time is that of its memory traffic or that of its products, whichever is longer:

.. math::
    t = \sum_{\text{phases}} \max\left(\frac{\text{gathered}}{r_g} + \frac{\text{streamed}}{r_s},
    \frac{\text{flops}}{r_f}\right)

Gathered bytes: a row for each edge of a walk. Streamed bytes: the column index (int32) and the features of each edge,
and once each node tensor that a walk or a product reads or writes. Flops: two for each multiplication in a matrix
product. Not counted are weights, biases, activations and norms (assumed to be fused), and building the CSR layout (once
per graph). Nothing is subtracted for caches. Values are float32 unless a layer says otherwise.

Each function below returns the limit of a layer, and its docstring lists the layer's phases. :math:`n`, :math:`e` and
:math:`c` are the numbers of nodes, edges and channels. `walk(k)` is a walk that gathers :math:`kc` values per edge. A
walk by destination goes through the edges into each node, as every forward walk does. A walk by source goes through the
edges out of each node. `linear(i, o)` stands for the three products of a linear layer (output, gradient of the
input, gradient of the weight) on :math:`n` rows, from width :math:`ic` to width :math:`oc`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.cases.inputs import EDGE_DIM, NUM_RELATIONS
from gnncompile.report.traffic import Phase, Work

BYTES = 4
HEADS = 4


@dataclass(frozen=True)
class Size:
    """The size of a case, which determines the limits of a layer.

    Attributes:
        sources: the number of sources of a bipartite graph, whose destinations are `nodes`; None if sources and
            destinations are the same nodes.
        value_bytes: bytes of a feature; an index has 4 bytes.
    """

    nodes: int
    edges: int
    channels: int
    sources: int | None = None
    heads: int = HEADS
    value_bytes: int = BYTES

    def linear(self, inputs: float = 1, outputs: float = 1, rows: int | None = None) -> Work:
        """`linear(i, o)`: each of the three products reads two of input, output and weight, and writes the third."""
        rows = self.nodes if rows is None else rows
        wide, narrow = rows * inputs * self.channels, rows * outputs * self.channels
        product = Phase(streamed=self.value_bytes * (wide + narrow), flops=2 * wide * outputs * self.channels)
        return Work((product,) * 3)

    def walk(
        self,
        gathered: float,
        nodes: float,
        per_edge: float = 0,
        flops: float = 0,
        edges: int | None = None,
        sources: float = 0,
    ) -> Work:
        """One walk over the edges.

        Args:
            gathered: rows gathered per edge, in units of `channels` values.
            nodes: node tensors read in order or written, in the same unit.
            per_edge: values read or written per edge besides its column index.
            flops: flops of matrix products on edges.
            edges: the number of edges that are walked (default: all edges of the graph).
            sources: like `nodes`, for tensors with a row per source.
        """
        edges = self.edges if edges is None else edges
        rows = self.nodes * nodes + (self.nodes if self.sources is None else self.sources) * sources
        streamed = BYTES * edges + self.value_bytes * (edges * per_edge + rows * self.channels)
        return Work((Phase(self.value_bytes * edges * gathered * self.channels, streamed, flops),))


Limit = Callable[[Size], Work]


def aggregation(num_linear: int) -> Limit:
    """GCN, SAGE mean, GraphConv, GIN: walk(1) forward, walk(1) backward, and `num_linear` linear(1, 1)."""

    def limit(size: Size) -> Work:
        work = size.walk(1, nodes=1) + size.walk(1, nodes=1)
        for _ in range(num_linear):
            work += size.linear()
        return work

    return limit


def max_core(size: Size) -> Work:
    """walk(1) that also writes the position of each maximum. The gradient has one value per node and channel, and goes
    straight to that position (three node tensors).
    """
    return size.walk(1, nodes=2) + _stream(size, 3)


def sage_max(size: Size) -> Work:
    """:func:`max_core` and two linear(1, 1)."""
    return max_core(size) + size.linear() + size.linear()


def gine(size: Size) -> Work:
    r"""walk(1) forward and backward. Each reads the edge features and multiplies them with the edge weights; the
    backward computes the ReLU again. The backward also sums the weights' gradient, so there are three products of
    :math:`2 \cdot 16 ec` flops. The MLP has two linear(1, 1).
    """
    flops = 2 * EDGE_DIM * size.edges * size.channels
    forward = size.walk(1, nodes=1, per_edge=EDGE_DIM, flops=flops)
    return forward + size.walk(1, nodes=2, per_edge=EDGE_DIM, flops=2 * flops) + size.linear() + size.linear()


def gat(size: Size) -> Work:
    """walk(1) forward; walk(1) by source, which gathers the output's gradient and writes the logits' gradients; a walk
    by destination over the logits' gradients. Logits, log-sum-exp and the like are one value per head and node. Each
    node has one self loop. One linear(1, 1).
    """
    return _additive_attention(size, size.edges + size.nodes) + size.linear()


def gatv2(size: Size) -> Work:
    """walk(1) forward (sources), walk(1) by destination (sources), walk(2) by source (destinations, output's gradient),
    with one self loop per node; two linear(1, 1).
    """
    return _gatv2_attention(size, size.edges + size.nodes) + size.linear() + size.linear()


def transformer(edge_dim: int = 0) -> Limit:
    r"""TransformerConv: walk(2) forward and by destination (keys, values), walk(2) by source (queries, output's
    gradient); four linear(1, 1). Edge features are read in each walk; their products are taken per node,
    :math:`\mathbf{q}_i^\top \mathbf{W}_e` and :math:`\mathbf{W}_e \sum_j \alpha_{ij} \mathbf{e}_{ij}`: two linear
    layers of :math:`4 \cdot 16` columns made of 4 blocks.
    """

    def limit(size: Size) -> Work:
        work = _dot_product_attention(size, edge_dim)
        for _ in range(4):
            work += size.linear()
        if edge_dim:
            work += _blocks(size, HEADS * edge_dim) + _blocks(size, HEADS * edge_dim)
        return work

    return limit


def res_gated(size: Size) -> Work:
    """walk(2) forward and by destination (queries, values), walk(2) by source (keys, output's gradient); four
    linear(1, 1).
    """
    walks = size.walk(2, nodes=2) + size.walk(2, nodes=3) + size.walk(2, nodes=4)
    return walks + size.linear() + size.linear() + size.linear() + size.linear()


def gen_softmax(size: Size) -> Work:
    """walk(1) forward, which also writes the log-sum-exp of each channel; walk(3) by source, which gathers the output's
    gradient, the output and the log-sum-exp; the MLP's linear(1, 2) and linear(2, 1).
    """
    return size.walk(1, nodes=2) + size.walk(3, nodes=2) + size.linear(1, 2) + size.linear(2, 1)


def pna(size: Size) -> Work:
    """Two linear(1, 1) in place of the message's linear layer on edges; walk(1) forward, which writes 4 aggregates and
    2 positions; walk(2) by source, which gathers the gradients of mean and deviation. The gradients of minimum and
    maximum go straight to their sources (4 node tensors). linear(13, 1) of aggregates and scalers, and linear(1, 1).
    """
    walks = size.walk(1, nodes=6) + size.walk(2, nodes=2) + _stream(size, 4)
    return walks + size.linear() + size.linear() + size.linear(13, 1) + size.linear()


def edge_conv(size: Size) -> Work:
    r"""Two linear(1, 1) in place of the MLP's first layer on edges; walk(1) forward with the MLP's second layer,
    :math:`2ec^2` flops; walk(1) backward with :math:`4nc^2` flops, because the maximum of a node and channel has its
    gradient at one edge.
    """
    square = size.channels * size.channels
    forward = size.walk(1, nodes=3, flops=2 * size.edges * square)
    return forward + size.walk(1, nodes=5, flops=4 * size.nodes * square) + size.linear() + size.linear()


def cg_conv(size: Size) -> Work:
    """Two linear layers of both ends, computed as four linear(1, 1); walk(2) forward and by destination, which gather
    two terms of the source; walk(3) by source, which gathers two terms of the destination and the output's gradient.
    """
    walks = size.walk(2, nodes=3) + size.walk(2, nodes=5) + size.walk(3, nodes=4)
    return walks + size.linear() + size.linear() + size.linear() + size.linear()


def rgcn(size: Size) -> Work:
    """walk(1) forward and backward; linear(1, 1) of the nodes themselves, and one with a row per pair of a node and a
    relation, at most one pair per edge.
    """
    return size.walk(1, nodes=1) + size.walk(1, nodes=1) + _per_relation(size) + size.linear()


def rgat(size: Size) -> Work:
    """Attention as in GAT, without self loops; linear(1, 1) with a row per pair of a node and a relation, at most one
    pair per edge; a narrow linear layer for the logits of both ends, for each relation and head.
    """
    logits = size.linear(1, 2 * NUM_RELATIONS * HEADS / size.channels)
    return _additive_attention(size, size.edges) + _per_relation(size) + logits


def hgt(size: Size) -> Work:
    """Attention as in TransformerConv; linear(1, 3) of keys, queries and values, linear(1, 1) of the output; keys and
    values of each node times matrices of one head, for both edge types that the node is a source of: four products.
    """
    work = _dot_product_attention(size, 0) + size.linear(1, 3) + size.linear()
    for _ in range(4):
        work += _blocks(size, size.channels)
    return work


def hetero_sage(size: Size) -> Work:
    """walk(1) forward and backward; for each of the two relations into a node linear(1, 1) of the mean, and one
    linear(1, 1) of the node itself, since the relations' weights add up.
    """
    return aggregation(3)(size)


def core(limit: Limit, dtype: torch.dtype, heads: int) -> Limit:
    """Returns the limit with another dtype and number of heads."""
    return lambda size: limit(replace(size, heads=heads, value_bytes=dtype.itemsize))


def dot_product_core(size: Size) -> Work:
    """The walks of :func:`transformer`."""
    return _dot_product_attention(size, 0)


def dot_product_edge_core(size: Size) -> Work:
    """As :func:`dot_product_core`, with `channels` features per edge and their gradient: walk(2) forward, which reads
    the features; walk(2) by destination, which reads the features, and writes their gradient, the softmax and the
    gradient of the softmax (one value per head and edge each); walk(2) by source, which reads the last two.
    """
    handed_over = 2 * size.heads
    forward = size.walk(2, nodes=2, per_edge=size.channels)
    by_destination = size.walk(2, nodes=4, per_edge=2 * size.channels + handed_over)
    return forward + by_destination + size.walk(2, nodes=0, sources=4, per_edge=handed_over)


def gatv2_core(size: Size) -> Work:
    """The walks of :func:`gatv2`, without self loops."""
    return _gatv2_attention(size, size.edges)


def _stream(size: Size, nodes: float) -> Work:
    return Work((Phase(streamed=size.value_bytes * size.nodes * nodes * size.channels),))


def _per_head(size: Size) -> float:
    """One value per head, in units of `channels`."""
    return size.heads / size.channels


def _blocks(size: Size, columns: int) -> Work:
    """A linear layer from `channels` to `columns` with one block per head, which divides the flops by `HEADS`."""
    work = size.linear(1, columns / size.channels)
    return Work(tuple(Phase(phase.gathered, phase.streamed, phase.flops / HEADS) for phase in work.phases))


def _additive_attention(size: Size, edges: int) -> Work:
    head = _per_head(size)
    forward = size.walk(1 + head, nodes=1 + 2 * head, edges=edges)
    by_source = size.walk(1 + 3 * head, nodes=2 + head, per_edge=HEADS, edges=edges)
    by_destination = size.walk(0, nodes=head, per_edge=HEADS, edges=edges)
    return forward + by_source + by_destination


def _gatv2_attention(size: Size, edges: int) -> Work:
    forward, by_destination = size.walk(1, nodes=2, edges=edges), size.walk(1, nodes=3, edges=edges)
    return forward + by_destination + size.walk(2 + 2 * _per_head(size), nodes=2, edges=edges)


def _dot_product_attention(size: Size, edge_dim: int) -> Work:
    forward = size.walk(2, nodes=2, per_edge=edge_dim)
    by_destination = size.walk(2, nodes=4, per_edge=edge_dim)
    by_source = size.walk(2 + 2 * _per_head(size), nodes=0, sources=4, per_edge=edge_dim)
    return forward + by_destination + by_source


def _per_relation(size: Size) -> Work:
    return size.linear(rows=min(size.edges, NUM_RELATIONS * size.nodes))
