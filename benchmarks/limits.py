r"""What a layer must move and multiply at least, forward and backward, and the time that takes on a known GPU.

A layer is a list of phases that run one after the other. A phase is either a product of node rows with a matrix or a
walk over the edges. It takes as long as its memory traffic or as its products, whichever is longer:

.. math::
    t = \sum_{\text{phases}} \max\left(\frac{\text{gathered}}{r_g} + \frac{\text{streamed}}{r_s},
    \frac{\text{flops}}{r_f}\right)

Counted are: a row for each edge of a walk (gathered); the column index of each edge (int32) and its features, and each
node tensor that a walk or a product reads or writes, once (streamed); two flops for each multiplication in a matrix
product. Not counted: weights, biases, activations and norms (taken to be fused) and building the CSR layout (once per
graph). What caches save of the gathers is not taken off. Values are float32 unless a layer says otherwise.

Below, :math:`n`, :math:`e` and :math:`c` are the numbers of nodes, edges and channels, `walk(k)` a walk that gathers
:math:`kc` values per edge, `linear(i, o)` the three products of a linear layer (output, gradient of the input, gradient
of the weight) of :math:`n` rows, :math:`ic` to :math:`oc` wide.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from gnncompile.report.traffic import Phase, Work

from .inputs import EDGE_DIM, NUM_RELATIONS

BYTES = 4
HEADS = 4


@dataclass(frozen=True)
class Size:
    """The size of a case: the limits of a layer are a function of it.

    Attributes:
        sources: of a bipartite graph, whose destinations are `nodes`; None if both are the same nodes.
        value_bytes: of a feature; an index has 4 bytes.
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
            flops: of matrix products of edges.
            edges: how many are walked (default: the graph's).
            sources: like `nodes`, of tensors with a row per source.
        """
        edges = self.edges if edges is None else edges
        rows = self.nodes * nodes + (self.nodes if self.sources is None else self.sources) * sources
        streamed = BYTES * edges + self.value_bytes * (edges * per_edge + rows * self.channels)
        return Work((Phase(self.value_bytes * edges * gathered * self.channels, streamed, flops),))


Limit = Callable[[Size], Work]


def aggregation(num_linear: int) -> Limit:
    """GCN, SAGE mean, GraphConv, GIN: walk(1) forward, walk(1) backward, and so many linear(1, 1)."""

    def limit(size: Size) -> Work:
        work = size.walk(1, nodes=1) + size.walk(1, nodes=1)
        for _ in range(num_linear):
            work += size.linear()
        return work

    return limit


def max_core(size: Size) -> Work:
    """walk(1) that also writes where each maximum came from; its gradient has one value per node and channel, which
    goes straight there (three node tensors).
    """
    return size.walk(1, nodes=2) + _stream(size, 3)


def sage_max(size: Size) -> Work:
    """:func:`max_core`; two linear(1, 1)."""
    return max_core(size) + size.linear() + size.linear()


def gine(size: Size) -> Work:
    r"""walk(1) forward and backward, each reads the edge features and multiplies them with the edge weights (the ReLU
    is taken again rather than stored); the backward also sums the weights' gradient: in all three products of
    :math:`2 \cdot 16 ec` flops; two linear(1, 1) of the MLP.
    """
    flops = 2 * EDGE_DIM * size.edges * size.channels
    forward = size.walk(1, nodes=1, per_edge=EDGE_DIM, flops=flops)
    return forward + size.walk(1, nodes=2, per_edge=EDGE_DIM, flops=2 * flops) + size.linear() + size.linear()


def gat(size: Size) -> Work:
    """walk(1) forward; walk(1) by source, which gathers the output's gradient; a walk by destination over the logits'
    gradients that the other handed over. Logits, log-sum-exp and the like are one value per head and node; one self
    loop per node; one linear(1, 1).
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
    """walk(1) forward, which also writes the log-sum-exp of each channel; walk(3) by source (output's gradient, output,
    log-sum-exp); the MLP's linear(1, 2) and linear(2, 1).
    """
    return size.walk(1, nodes=2) + size.walk(3, nodes=2) + size.linear(1, 2) + size.linear(2, 1)


def pna(size: Size) -> Work:
    """Two linear(1, 1) in place of the message's linear layer on edges; walk(1) forward, which writes 4 aggregates and
    2 positions; walk(2) by source (gradients of mean and deviation), where those of minimum and maximum go straight to
    their sources (4 node tensors); linear(13, 1) of aggregates and scalers, and linear(1, 1).
    """
    walks = size.walk(1, nodes=6) + size.walk(2, nodes=2) + _stream(size, 4)
    return walks + size.linear() + size.linear() + size.linear(13, 1) + size.linear()


def edge_conv(size: Size) -> Work:
    r"""Two linear(1, 1) in place of the MLP's first layer on edges; walk(1) with its second layer, :math:`2ec^2` flops;
    walk(1) backward, with :math:`4nc^2` flops, since a maximum has a gradient at one edge per node and channel.
    """
    square = size.channels * size.channels
    forward = size.walk(1, nodes=3, flops=2 * size.edges * square)
    return forward + size.walk(1, nodes=5, flops=4 * size.nodes * square) + size.linear() + size.linear()


def cg_conv(size: Size) -> Work:
    """Two linear layers of both ends are four linear(1, 1); walk(2) forward and by destination (both sources' terms),
    walk(3) by source (both destinations' terms, output's gradient).
    """
    walks = size.walk(2, nodes=3) + size.walk(2, nodes=5) + size.walk(3, nodes=4)
    return walks + size.linear() + size.linear() + size.linear() + size.linear()


def rgcn(size: Size) -> Work:
    """walk(1) forward and backward; linear(1, 1) of the roots, and of as many rows as there are pairs of a node and a
    relation, at most one per edge.
    """
    return size.walk(1, nodes=1) + size.walk(1, nodes=1) + _per_relation(size) + size.linear()


def rgat(size: Size) -> Work:
    """Attention as in GAT, without self loops; linear(1, 1) of the pairs of a node and a relation, at most one per
    edge; logits of both ends for each relation and head from a narrow linear layer.
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
    """The limit in a dtype and with heads of its own."""
    return lambda size: limit(replace(size, heads=heads, value_bytes=dtype.itemsize))


def dot_product_core(size: Size) -> Work:
    """What :func:`transformer` walks."""
    return _dot_product_attention(size, 0)


def dot_product_edge_core(size: Size) -> Work:
    """As :func:`dot_product_core`, with a row of `channels` features per edge and its gradient: walk(2) forward, which
    reads the features; walk(2) by destination, which reads them, writes their gradient, and hands over the softmax and
    its gradient, one value per head and edge each; walk(2) by source, which reads these two.
    """
    handed_over = 2 * size.heads
    forward = size.walk(2, nodes=2, per_edge=size.channels)
    by_destination = size.walk(2, nodes=4, per_edge=2 * size.channels + handed_over)
    return forward + by_destination + size.walk(2, nodes=0, sources=4, per_edge=handed_over)


def gatv2_core(size: Size) -> Work:
    """What :func:`gatv2` walks, without self loops."""
    return _gatv2_attention(size, size.edges)


def _stream(size: Size, nodes: float) -> Work:
    return Work((Phase(streamed=size.value_bytes * size.nodes * nodes * size.channels),))


def _per_head(size: Size) -> float:
    """One value per head, in units of `channels`."""
    return size.heads / size.channels


def _blocks(size: Size, columns: int) -> Work:
    """A linear layer of `channels` to `columns` made of one block per head: a quarter of the flops."""
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
