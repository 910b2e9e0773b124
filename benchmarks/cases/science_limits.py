"""The least work of the models of the suite `science`; `benchmarks.cases.limits` says how it is counted."""

from dataclasses import replace

from benchmarks.cases.limits import Limit, Size
from benchmarks.cases.science_inputs import GRID_PER_MESH, TO_GRID, TO_MESH
from benchmarks.cases.science_models.tensors import NUM_BESSEL, NUM_ORDERS, RADIAL_CHANNELS
from benchmarks.cases.science_models.triplets import BASIS_CHANNELS, NUM_RADIAL, NUM_SPHERICAL
from gnncompile.report.traffic import Phase, Work


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


def graph_cast(num_layers: int) -> Limit:
    """Steps on the mesh as in MeshGraphNet, and two layers between grid and mesh.

    A layer between grid and mesh reads the states of its edges and writes their gradients only. Its network on the
    edges has a product per edge, and one per row of each end. The grid's own network has two products per row.
    """

    def limit(size: Size) -> Work:
        grid = GRID_PER_MESH * size.nodes
        to_mesh = edge_layers(1, 2, 2, 4, states=0.5)(replace(size, edges=TO_MESH * grid))
        to_grid = edge_layers(1, 2, 2, 4, states=0.5)(replace(size, nodes=grid, edges=TO_GRID * grid))
        work = to_mesh + edge_layers(num_layers, 2, 2, 5, states=1)(size) + to_grid + size.linear()
        for _ in range(3):
            work += size.linear(rows=grid)
        return work

    return limit


def triplet_size(size: Size) -> Size:
    """Returns the size of the graph of triplets, whose nodes are the edges: what a uniform graph has on average."""
    return replace(size, nodes=size.edges, edges=size.edges * size.edges // size.nodes)


def dime_net(num_layers: int) -> Limit:
    """Layers on triplets, which gather messages of half the width, with a network of the basis per triplet.

    Each layer has ten products per edge: two of them with half the width.
    """

    def limit(size: Size) -> Work:
        basis = BASIS_CHANNELS * (NUM_RADIAL * NUM_SPHERICAL + size.channels / 2) / size.channels**2
        return edge_layers(num_layers, 0.5, basis, 10)(triplet_size(size))

    return limit


def align(num_layers: int) -> Limit:
    """Layers of GatedGCN on the graph and on the graph of triplets."""
    gated = edge_layers(num_layers, 3, 1, 4, states=2)
    return lambda size: gated(triplet_size(size)) + gated(size)


def tensor_net(num_layers: int, num_functions: int = 32) -> Limit:
    """Layers that gather nine values per edge and channel: one, three and five for the three parts of a matrix.

    The radial network's widths are 1, 2 and 3 in units of `channels`. Each layer has two linear layers of nine rows per
    node. The sums over edges that the matrices start with are one more walk each way.
    """

    def limit(size: Size) -> Work:
        start = edge_layers(1, 1, 3 * num_functions / size.channels, 0, nodes=10)(size)
        radial = num_functions / size.channels + 2 + 6
        return start + edge_layers(num_layers, 9, radial, 18, nodes=18)(size)

    return limit


def mace(num_layers: int) -> Limit:
    """Layers that gather one row per edge and sum 16: a row for each component of the spherical harmonics.

    The radial network has three hidden layers. Per node there are one product before, one for each of 16 rows, and ten
    after: nine of the products of higher order, and one of the node itself.
    """

    def limit(size: Size) -> Work:
        hidden = NUM_BESSEL * RADIAL_CHANNELS + 2 * RADIAL_CHANNELS**2
        radial = (hidden + RADIAL_CHANNELS * NUM_ORDERS * size.channels) / size.channels**2
        rows = NUM_ORDERS**2
        return edge_layers(num_layers, 1, radial, 1 + rows + 10, nodes=1 + rows)(size)

    return limit
