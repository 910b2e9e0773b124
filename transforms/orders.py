"""Orders for the nodes of a graph: by degree, breadth first, reverse Cuthill-McKee, by parts of METIS.

Each function takes the edges, `[2, num_edges]`, whose direction is ignored, and the number of nodes. It returns the old
index of each new node, `[num_nodes]`, int64. Without scipy, networkx (which is always installed) walks the graph, far
slower on large graphs. Breadth first then gives the same order; reverse Cuthill-McKee begins at another node.
"""

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.utils import coalesce, degree, to_undirected

from gnncompile.exc import MissingLibraryError

NODES_PER_PART = 1024
"""The approximate number of nodes in each part that METIS makes."""


def by_degree(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Orders nodes by falling number of edges; nodes with equal numbers keep their order."""
    count = degree(edge_index.flatten(), num_nodes, dtype=torch.long)
    return torch.argsort(count, descending=True, stable=True)


def breadth_first(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Orders nodes by breadth-first search, one connected component after the other, each from its first node."""
    edges = _symmetric(edge_index, num_nodes)
    if not _has_scipy():
        return _tensor(_walked_by_networkx(edges, num_nodes), edge_index)
    from scipy.sparse import csgraph

    _, component = csgraph.connected_components(_matrix(edges, num_nodes), directed=False)
    # One search for all components: it begins at an extra node with an edge to the first node of each component.
    first = torch.from_numpy(np.unique(component, return_index=True)[1]).sort().values
    start = torch.stack([torch.full_like(first, num_nodes), first])
    matrix = _matrix(torch.cat([edges, start, start.flip(0)], dim=1), num_nodes + 1)
    walk = csgraph.breadth_first_order(matrix, num_nodes, directed=False, return_predecessors=False)[1:]
    return _tensor(walk[np.argsort(component[walk], kind="stable")], edge_index)


def reverse_cuthill_mckee(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Puts neighbours together (`Cuthill and McKee, 1969 <https://doi.org/10.1145/800195.805928>`_, reversed)."""
    edges = _symmetric(edge_index, num_nodes)
    if _has_scipy():
        from scipy.sparse import csgraph

        order: Any = csgraph.reverse_cuthill_mckee(_matrix(edges, num_nodes), symmetric_mode=True)
    else:
        from networkx.utils import reverse_cuthill_mckee_ordering

        order = list(reverse_cuthill_mckee_ordering(_networkx(edges, num_nodes)))
    return _tensor(order, edge_index)


def metis(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Orders nodes by the parts of METIS (`Karypis and Kumar, 1998 <https://doi.org/10.1137/S1064827595287997>`_). The
    nodes of a part keep their order.

    Raises:
        ImportError: pymetis is not installed.
    """
    try:
        import pymetis
    except ImportError as error:
        raise MissingLibraryError(
            "method: got 'metis', which needs pymetis; install it (pip install 'gnncompile[metis]') or take 'rcm'"
        ) from error
    edges = _symmetric(edge_index, num_nodes)
    starts = torch.nn.functional.pad(torch.bincount(edges[0], minlength=num_nodes).cumsum(0), (1, 0))
    parts = max(-(-num_nodes // NODES_PER_PART), 1)
    if parts == 1:
        return torch.arange(num_nodes, device=edge_index.device)
    adjacency = pymetis.CSRAdjacency(adj_starts=starts.tolist(), adjacent=edges[1].tolist())
    part = torch.tensor(pymetis.part_graph(parts, adjacency=adjacency)[1])
    return torch.argsort(part, stable=True).to(edge_index.device)


ORDERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "bfs": breadth_first,
    "degree": by_degree,
    "metis": metis,
    "rcm": reverse_cuthill_mckee,
}


def _symmetric(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Returns both directions of every edge, without duplicates and self loops, sorted by the first row, on the CPU."""
    edges = edge_index[:, edge_index[0] != edge_index[1]].cpu()
    return coalesce(to_undirected(edges, num_nodes=num_nodes), num_nodes=num_nodes)  # type: ignore[no-any-return]


def _has_scipy() -> bool:
    return importlib.util.find_spec("scipy") is not None


def _matrix(edges: Tensor, num_nodes: int) -> Any:
    from scipy.sparse import csr_matrix

    row, col = edges.numpy()
    return csr_matrix((np.ones(len(row), dtype=np.int8), (row, col)), shape=(num_nodes, num_nodes))


def _networkx(edges: Tensor, num_nodes: int) -> Any:
    import networkx

    graph = networkx.Graph()
    graph.add_nodes_from(range(num_nodes))
    graph.add_edges_from(edges.t().tolist())
    return graph


def _walked_by_networkx(edges: Tensor, num_nodes: int) -> list[int]:
    import networkx

    graph = _networkx(edges, num_nodes)
    order: list[int] = []
    for nodes in networkx.connected_components(graph):
        start = min(nodes)
        order += [start, *(node for _, node in networkx.bfs_edges(graph, start, sort_neighbors=sorted))]
    return order


def _tensor(order: Iterable[int], like: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(order, dtype=np.int64).copy()).to(like.device)
