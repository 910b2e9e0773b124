"""Draws the arguments of models from a graph and a seed, on the CPU, so that every device and row gets the same."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.cases.graphs import Graph

NUM_RELATIONS = 8
EDGE_DIM = 16
NODE_TYPES = ("paper", "author")
EDGE_TYPES = (
    ("paper", "cites", "paper"),
    ("paper", "written_by", "author"),
    ("author", "writes", "paper"),
    ("author", "knows", "author"),
)
ORDERS = ("random", "sorted")
METADATA = (list(NODE_TYPES), list(EDGE_TYPES))

# Takes a graph, the order of its edges (one of `ORDERS`) and the source of random numbers.
MakeInputs = Callable[[Graph, str, Generator], tuple[Any, ...]]


@lru_cache(maxsize=1)
def _generated(graph: Graph) -> Tensor:
    """Returns a graph's edges. The last graph is cached, because the cases of a run share it and drawing it is slow."""
    return graph.make()


def ordered(graph: Graph, order: str, *of_edges: Tensor) -> tuple[Tensor, ...]:
    """Returns `edge_index`, `[2, num_edges]`, and tensors with a row per edge, in the given order.

    Args:
        graph: the graph to generate.
        order: `random`, as the edges are generated, or `sorted`, stably by destination.
        of_edges: features or types of the generated edges, `[num_edges, ...]`.

    Raises:
        ValueError: the order is neither of the two.
    """
    if order not in ORDERS:
        raise ValueError(f"order: got {order!r}, expected one of {', '.join(ORDERS)}")
    edge_index = _generated(graph)
    if order == "random":
        return edge_index, *of_edges
    position = edge_index[1].argsort(stable=True)
    return edge_index[:, position], *(tensor[position] for tensor in of_edges)


def _features(graph: Graph, generator: Generator) -> Tensor:
    return torch.randn(graph.num_nodes, graph.channels, generator=generator)


def plain(graph: Graph, order: str, generator: Generator) -> tuple[Any, ...]:
    """Returns `x`, `[num_nodes, channels]`, float32, and `edge_index`, `[2, num_edges]`."""
    return _features(graph, generator), *ordered(graph, order)


def with_edge_features(graph: Graph, order: str, generator: Generator) -> tuple[Any, ...]:
    """Returns `x`, `edge_index` and `edge_attr`, `[num_edges, EDGE_DIM]`, float32."""
    x = _features(graph, generator)
    return x, *ordered(graph, order, torch.randn(graph.num_edges, EDGE_DIM, generator=generator))


def with_edge_types(graph: Graph, order: str, generator: Generator) -> tuple[Any, ...]:
    """Returns `x`, `edge_index` and `edge_type`, `[num_edges]`, uniform in `0 .. NUM_RELATIONS - 1`."""
    x = _features(graph, generator)
    return x, *ordered(graph, order, torch.randint(NUM_RELATIONS, (graph.num_edges,), generator=generator))


def typed(graph: Graph, order: str, generator: Generator) -> tuple[Any, ...]:
    """Returns `x_dict` and `edge_index_dict` of two node types and four edge types.

    A random two thirds of the nodes are papers, the others authors. The types of an edge's ends give its type.
    The order of edges is kept within a type.
    """
    x = _features(graph, generator)
    is_author = torch.randperm(graph.num_nodes, generator=generator) >= 2 * graph.num_nodes // 3
    # Indices within a type follow the order of the nodes, so edges sorted by destination stay sorted.
    local = torch.where(is_author, is_author.cumsum(0), (~is_author).cumsum(0)) - 1
    (edge_index,) = ordered(graph, order)
    code = 2 * is_author[edge_index[0]].long() + is_author[edge_index[1]].long()
    x_dict = {"paper": x[~is_author], "author": x[is_author]}
    return x_dict, {kind: local[edge_index[:, code == number]] for number, kind in enumerate(EDGE_TYPES)}
