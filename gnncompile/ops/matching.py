"""Nodes that an algorithm of many steps puts together: ``gnncompile::matched_edges`` and ``gnncompile::components``.

They are ops, so that a layer that asks for them stays one graph. Each runs on the host, for which the graph is copied
there once: one look at the data.

- ``matched_edges(edge_index, score, num_nodes)``: cluster of each node ``[num_nodes]``, the edges that were chosen
  ``[num_chosen]`` and the nodes that none of them has ``[num_single]``, as :class:`torch_geometric.nn.EdgePooling`
  finds them.
- ``components(edge_index, alive, num_nodes)``: weakly connected component of each node ``[num_nodes]``, and the first
  node of each component ``[num_components]``, over the edges that are `alive`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.ops.region import LIBRARY

LIBRARY.define("matched_edges(Tensor edge_index, Tensor score, SymInt num_nodes) -> (Tensor, Tensor, Tensor)")
LIBRARY.define("components(Tensor edge_index, Tensor alive, SymInt num_nodes) -> (Tensor, Tensor)")

ROUNDS = 16


def matched_edges(edge_index: Tensor, score: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Edges without a common end, the one of the highest score first, and so on.

    An edge that is the best of all that are left at both its ends is chosen whatever is chosen elsewhere: all such
    edges are taken at once, those at their ends drop out, and so on. What is left after :data:`ROUNDS` of that is taken
    one by one: on a path along which scores rise, a round would take one edge.
    """
    order = torch.argsort(score, descending=True)  # as PyG has it: which of two equal edges comes first is its choice
    ends = edge_index.index_select(1, order).cpu().long()
    rank, free = torch.arange(ends.size(1)), torch.ones(num_nodes, dtype=torch.bool)
    taken = []
    for _ in range(ROUNDS):
        left = ends[:, rank]
        best = torch.full((num_nodes,), ends.size(1)).scatter_reduce_(
            0, left.reshape(-1), rank.repeat(2), "amin", include_self=True
        )
        chosen = (best[left[0]] == rank) & (best[left[1]] == rank)
        taken.append(rank[chosen])
        free[left[:, chosen].reshape(-1)] = False
        rank = rank[free[left[0]] & free[left[1]]]
    chosen = torch.cat([*taken, _one_by_one(ends, rank, free)]).sort().values
    single = free.nonzero().view(-1)
    cluster = torch.empty(num_nodes, dtype=torch.long)
    cluster[ends[0, chosen]] = cluster[ends[1, chosen]] = torch.arange(chosen.numel())
    cluster[single] = torch.arange(chosen.numel(), chosen.numel() + single.numel())
    device = score.device
    return cluster.to(device), order.index_select(0, chosen.to(device)), single.to(device)


def _one_by_one(ends: Tensor, rank: Tensor, free: Tensor) -> Tensor:
    """The edges of these ranks that are taken; takes their ends out of the nodes that are `free`."""
    taken, is_free = [], free.tolist()
    for edge, (one, other) in zip(rank.tolist(), ends[:, rank].t().tolist(), strict=True):
        if is_free[one] and is_free[other]:
            is_free[one] = is_free[other] = False
            taken.append(edge)
    found = torch.tensor(taken, dtype=torch.long)
    free[ends[:, found].reshape(-1)] = False
    return found


def components(edge_index: Tensor, alive: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Components in the order of their first nodes; every node takes the least number among its neighbours', and that
    of the node with this number, until nothing changes.
    """
    ends = torch.where(alive, edge_index, edge_index[0]).cpu().long()  # what is not alive becomes a self loop
    least = torch.arange(num_nodes)
    while True:
        before = least
        lower = torch.minimum(least[ends[0]], least[ends[1]])
        # The nodes that the ends point to learn of it as well: whole trees are joined at once.
        for at in (ends[0], ends[1], least[ends[0]], least[ends[1]]):
            least = least.scatter_reduce(0, at, lower, "amin", include_self=True)
        least = least[least]
        if torch.equal(least, before):
            break
    first = (least == torch.arange(num_nodes)).nonzero().view(-1)
    place = torch.empty(num_nodes, dtype=torch.long)
    place[first] = torch.arange(first.numel())
    return place[least].to(edge_index.device), first.to(edge_index.device)


def _fake_matched_edges(edge_index: Tensor, score: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    cluster = edge_index.new_empty(num_nodes, dtype=torch.long)
    return cluster, cluster.new_empty(_compat.unknown_size()), cluster.new_empty(_compat.unknown_size())


def _fake_components(edge_index: Tensor, alive: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    cluster = edge_index.new_empty(num_nodes, dtype=torch.long)
    return cluster, cluster.new_empty(_compat.unknown_size())


LIBRARY.impl("matched_edges", matched_edges, "CompositeExplicitAutograd")
LIBRARY.impl("components", components, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::matched_edges", _fake_matched_edges, lib=LIBRARY)
torch.library.register_fake("gnncompile::components", _fake_components, lib=LIBRARY)
