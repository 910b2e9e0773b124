"""Graphs to test and measure with: ``gnncompile.testing``.

Generators of graphs as they are met, power laws, molecules, grids, typed edges, hubs, and of those on which code fails,
all from a seed; and the way from and to networkx. Every generator returns PyG's :class:`~torch_geometric.data.Data`
(or :class:`~torch_geometric.data.HeteroData`) with normally distributed features ``x``, ``[num_nodes, channels]``,
float32; with ``channels=None`` there is no ``x``, only ``num_nodes``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import utils
from torch_geometric.data import Data, HeteroData

from gnncompile.exc import ArgumentError

__all__ = [
    "awkward",
    "bipartite",
    "from_networkx",
    "grid",
    "hub",
    "molecules",
    "power_law",
    "to_networkx",
    "typed",
    "uniform",
]

ATOMS = (6, 6, 6, 6, 7, 8, 9, 16)
"""Atomic numbers of heavy atoms, about as often as drugs have them."""

MAX_BONDS = 4


def _generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _features(num_nodes: int, channels: int | None, generator: torch.Generator) -> dict[str, Any]:
    if channels is None:
        return {"num_nodes": num_nodes}
    return {"x": torch.randn(num_nodes, channels, generator=generator, device=generator.device)}


def uniform(num_nodes: int, num_edges: int, *, channels: int | None = 16, seed: int = 0) -> Data:
    """Sources and destinations drawn uniformly; self loops and repeated edges may occur.

    Args:
        num_nodes: Number of nodes.
        num_edges: Number of edges.
        channels: Width of the features.
        seed: Of the random numbers.
    """
    generator = _generator(seed)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    return Data(edge_index=edge_index, **_features(num_nodes, channels, generator))


def power_law(
    num_nodes: int,
    num_edges: int,
    max_degree: int,
    exponent: float = 2.4,
    *,
    channels: int | None = 16,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Data:
    r"""A symmetric graph whose degrees follow a power law, like a citation graph with its edges made undirected.

    Half of the edges lead from uniformly drawn nodes to nodes drawn with weights
    :math:`w_r = (r + c)^{-1/(\gamma - 1)}` of their rank :math:`r`, the other half are their reverses; :math:`c` is
    found such that the heaviest node is expected to get `max_degree` edges. Node numbers and the order of edges are
    random. There are no self loops; edges may repeat.

    Args:
        num_nodes: Number of nodes.
        num_edges: Number of edges, even.
        max_degree: Expected in-degree (and out-degree) of the largest hub.
        exponent: :math:`\gamma` of :math:`P(d) \propto d^{-\gamma}`, above 2.
        channels: Width of the features.
        seed: Of the random numbers.
        device: Where they are drawn; each device has numbers of its own.

    Raises:
        ValueError: `num_edges` is odd, or no graph of this size can have such a hub.
    """
    if num_edges % 2:
        raise ArgumentError(f"num_edges: got {num_edges}, expected an even number, since every edge has its reverse")
    half = num_edges // 2
    mean_degree = half / num_nodes
    if not mean_degree < max_degree - mean_degree < half:
        raise ArgumentError(
            f"max_degree: got {max_degree}, expected more than {2 * mean_degree:.0f} and less than {half}; change it, "
            "or num_edges"
        )
    generator = _generator(seed, device)
    # A hub is drawn as a destination max_degree - mean_degree times, and as a source as often as any other node.
    weights = _rank_weights(num_nodes, (max_degree - mean_degree) / half, 1 / (exponent - 1), device)
    cumulative = weights.cumsum(0)
    drawn = torch.rand(half, generator=generator, dtype=torch.float64, device=device) * cumulative[-1]
    rank = torch.searchsorted(cumulative, drawn).clamp_(max=num_nodes - 1)
    popular = torch.randperm(num_nodes, generator=generator, device=device)[rank]
    other = torch.randint(num_nodes, (half,), generator=generator, device=device)
    other = torch.where(other == popular, (other + 1) % num_nodes, other)
    edge_index = torch.stack([torch.cat([other, popular]), torch.cat([popular, other])])
    edge_index = edge_index[:, torch.randperm(num_edges, generator=generator, device=device)]
    return Data(edge_index=edge_index, **_features(num_nodes, channels, generator))


def _rank_weights(num_nodes: int, share: float, slope: float, device: torch.device | str) -> Tensor:
    """`(rank + c) ** -slope` with `c` such that the first weight has the given share of their sum (bisection)."""
    rank = torch.arange(num_nodes, dtype=torch.float64, device=device)

    def weights(shift: float) -> Tensor:
        return (rank + shift) ** -slope

    low, high = 1e-9, float(num_nodes) * num_nodes
    for _ in range(100):
        middle = (low * high) ** 0.5
        candidate = weights(middle)
        if candidate[0] / candidate.sum() > share:
            low = middle
        else:
            high = middle
    return weights(high)


def hub(num_nodes: int, *, channels: int | None = 16, seed: int = 0) -> Data:
    """A star: every node, the first one included, has one edge to node 0, in random order; no other has any.

    Args:
        num_nodes: Number of nodes, and of edges.
        channels: Width of the features.
        seed: Of the random numbers.
    """
    generator = _generator(seed)
    source = torch.randperm(num_nodes, generator=generator)
    edge_index = torch.stack([source, torch.zeros_like(source)])
    return Data(edge_index=edge_index, **_features(num_nodes, channels, generator))


def grid(height: int, width: int, *, channels: int | None = 16, seed: int = 0) -> Data:
    """A mesh: every node has edges from its neighbours, diagonal ones included, and from itself (PyG's ``grid``).

    Args:
        height: Number of rows.
        width: Number of columns.
        channels: Width of the features.
        seed: Of the features.

    Returns:
        A graph of ``height * width`` nodes, with positions ``pos``, ``[num_nodes, 2]``.
    """
    edge_index, pos = utils.grid(height, width)
    return Data(edge_index=edge_index, pos=pos, **_features(height * width, channels, _generator(seed)))


def bipartite(
    num_sources: int, num_destinations: int, degree: int, *, channels: int | None = 16, seed: int = 0
) -> HeteroData:
    """So many edges to each destination, from sources drawn uniformly; repeated edges may occur.

    Args:
        num_sources: Number of nodes of type ``"source"``.
        num_destinations: Number of nodes of type ``"destination"``.
        degree: Edges to each of these.
        channels: Width of the features of both.
        seed: Of the random numbers.

    Returns:
        A graph with edges of the one type ``("source", "to", "destination")``, sorted by destination.
    """
    generator = _generator(seed)
    source = torch.randint(num_sources, (num_destinations * degree,), generator=generator)
    data = HeteroData()
    data["source"].update(_features(num_sources, channels, generator))
    data["destination"].update(_features(num_destinations, channels, generator))
    destination = torch.arange(num_destinations).repeat_interleave(degree)
    data["source", "to", "destination"].edge_index = torch.stack([source, destination])
    return data


def typed(
    num_nodes: int,
    num_edges: int,
    num_relations: int = 20,
    num_types: int = 4,
    *,
    channels: int | None = 16,
    seed: int = 0,
) -> Data:
    """Typed edges as RDF data has them: few relations hold most edges, few objects most edges of a relation.

    A relation leads from one type of nodes to one type. The shares of relations, and of the objects of each, fall
    with their rank (Zipf); subjects are drawn uniformly.

    Args:
        num_nodes: Number of nodes, at least `num_types`.
        num_edges: Number of edges.
        num_relations: Number of types of edges; some may have no edge.
        num_types: Number of types of nodes, all of one size.
        channels: Width of the features.
        seed: Of the random numbers.

    Returns:
        A graph with ``edge_type``, ``[num_edges]``, and ``node_type``, ``[num_nodes]``, int64, in random order; PyG's
        ``to_heterogeneous()`` takes it apart.

    Raises:
        ValueError: There are fewer nodes than types.
    """
    if num_nodes < num_types:
        raise ArgumentError(f"num_nodes: got {num_nodes}, expected at least num_types={num_types}; change one of them")
    generator = _generator(seed)
    node_type = torch.randperm(num_nodes, generator=generator) % num_types
    edge_type = _zipf(torch.full((num_edges,), num_relations), generator)
    first, last = torch.randint(num_types, (2, num_relations), generator=generator)[:, edge_type]
    members, count = node_type.argsort(stable=True), node_type.bincount(minlength=num_types)
    start = count.cumsum(0) - count
    subject = (torch.rand(num_edges, generator=generator, dtype=torch.float64) * count[first]).long()
    edge_index = torch.stack([members[start[first] + subject], members[start[last] + _zipf(count[last], generator)]])
    features = _features(num_nodes, channels, generator)
    return Data(edge_index=edge_index, edge_type=edge_type, node_type=node_type, **features)


def _zipf(count: Tensor, generator: torch.Generator) -> Tensor:
    """Ranks below `count`, about as often as one over the rank says (inverse of the logarithm as their sum)."""
    drawn = torch.rand(count.numel(), generator=generator, dtype=torch.float64)
    return ((count + 1).double().pow(drawn) - 1).long().clamp(max=count - 1)


def molecules(
    num_graphs: int, min_atoms: int = 8, max_atoms: int = 30, *, channels: int | None = 16, seed: int = 0
) -> list[Data]:
    """Graphs like small molecules: sparse, of degree 4 at most, with rings of 5 and 6.

    Atoms are bonded to earlier ones at random, then rings are closed.

    Args:
        num_graphs: Number of molecules.
        min_atoms: The fewest atoms of one, at least 1.
        max_atoms: The most.
        channels: Width of the features.
        seed: Of the random numbers.

    Returns:
        Molecules for a loader, or for :meth:`Batch.from_data_list`, with atomic numbers ``z``, ``[num_nodes]``, int64;
        positions ``pos``, ``[num_nodes, 3]``; bonds in both directions, of one-hot types ``edge_attr``,
        ``[num_edges, 4]``; and the number of rings ``y``, ``[1]``, float32.

    Raises:
        ValueError: `min_atoms` is less than 1 or more than `max_atoms`.
    """
    if not 1 <= min_atoms <= max_atoms:
        raise ArgumentError(f"min_atoms: got {min_atoms}, expected 1 to max_atoms={max_atoms}; change one of them")
    generator = _generator(seed)
    sizes = torch.randint(min_atoms, max_atoms + 1, (num_graphs,), generator=generator)
    return [_molecule(size, channels, generator) for size in sizes.tolist()]


def _molecule(atoms: int, channels: int | None, generator: torch.Generator) -> Data:
    draws = torch.rand(2, atoms, generator=generator).tolist()
    parents, bonds = [0], [0] * atoms
    for atom in range(1, atoms):
        free = [p for p in range(max(atom - 4, 0), atom) if bonds[p] < MAX_BONDS] or [atom - 1]
        parents.append(free[int(draws[0][atom] * len(free))])
        bonds[atom] += 1
        bonds[parents[atom]] += 1
    pairs = [(atom, parents[atom]) for atom in range(1, atoms)]
    for atom in range(atoms):
        ancestor, steps = atom, 4 + int(2 * draws[1][atom])
        for _ in range(steps):
            ancestor = parents[ancestor] if ancestor else -1
            if ancestor < 0:
                break
        if ancestor >= 0 and bonds[atom] < 3 and bonds[ancestor] < 3:
            pairs.append((atom, ancestor))
            bonds[atom] += 1
            bonds[ancestor] += 1
    one_way = torch.tensor(pairs, dtype=torch.long).view(-1, 2).t()
    kind = torch.nn.functional.one_hot(torch.randint(4, (one_way.size(1),), generator=generator), 4).float()
    step = torch.nn.functional.normalize(torch.randn(atoms, 3, generator=generator), dim=1) * 1.5
    pos = torch.zeros(atoms, 3)
    for atom in range(1, atoms):
        pos[atom] = pos[parents[atom]] + step[atom]
    return Data(
        edge_index=torch.cat([one_way, one_way.flip(0)], dim=1),
        edge_attr=torch.cat([kind, kind]),
        z=torch.tensor(ATOMS)[torch.randint(len(ATOMS), (atoms,), generator=generator)],
        pos=pos,
        y=torch.tensor([float(len(pairs) - atoms + 1)]),
        **_features(atoms, channels, generator),
    )


def awkward(channels: int | None = 16, seed: int = 0) -> dict[str, Data | HeteroData]:
    """Small graphs on which code fails that is right on others.

    Args:
        channels: Width of the features.
        seed: Of the random numbers.

    Returns:
        Graphs by name, :class:`Data` but for ``"bipartite"``: parametrise a test with it.
    """
    edges = {
        "no edge": (5, []),
        "one node": (1, []),
        "one node, self loop": (1, [(0, 0)]),
        "one edge": (5, [(4, 1)]),
        "duplicates": (3, [(0, 1), (2, 1), (0, 1), (1, 2), (0, 1)]),
        "self loops": (4, [(3, 3), (0, 1), (1, 1), (1, 0), (3, 3), (2, 1)]),
        "isolated nodes": (7, [(5, 2), (2, 5), (3, 2)]),
        "only destinations": (4, [(0, 3), (0, 1), (0, 2)]),
        "unsorted, duplicates, hub": (5, [(3, 0), (0, 1), (2, 0), (0, 1), (1, 0), (4, 0), (4, 2), (0, 0), (2, 3)]),
    }
    found: dict[str, Data | HeteroData] = {}
    for name, (num_nodes, pairs) in edges.items():
        edge_index = torch.tensor(pairs, dtype=torch.long).view(-1, 2).t().contiguous()
        found[name] = Data(edge_index=edge_index, **_features(num_nodes, channels, _generator(seed)))
    found["hub"] = hub(40, channels=channels, seed=seed)
    found["bipartite"] = bipartite(3, 7, 2, channels=channels, seed=seed)
    return found


def from_networkx(graph: Any, *, channels: int | None = 16, seed: int = 0) -> Data:
    """A networkx graph as PyG has it, with features where it brings none (:func:`torch_geometric.utils.from_networkx`).

    Args:
        graph: Any networkx graph; edges without a direction become two.
        channels: Width of the features that nodes get if they have no ``x``; None for none.
        seed: Of these features.
    """
    data: Data = utils.from_networkx(graph)
    if data.x is None and channels is not None:
        data.update(_features(data.num_nodes, channels, _generator(seed)))
    return data


def to_networkx(data: Data | HeteroData) -> Any:
    """A graph with its attributes as networkx has it, repeated edges too (:func:`torch_geometric.utils.to_networkx`).

    Args:
        data: A graph with ``edge_index``.

    Returns:
        A ``networkx.MultiDiGraph``; :func:`from_networkx` leads back, with the edges in order of their sources. Of a
        heterogeneous graph it keeps the types alone.
    """
    if isinstance(data, HeteroData):
        return utils.to_networkx(data, to_multi=True)
    edges = [key for key in data.edge_attrs() if key != "edge_index"]
    return utils.to_networkx(data, node_attrs=data.node_attrs(), edge_attrs=edges, to_multi=True)
