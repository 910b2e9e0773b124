"""Ops that cluster nodes on the host: ``gnncompile::matched_edges`` and ``gnncompile::components``.

As ops they cause no graph break. Each copies the graph to the host once, which is one sync.

- ``matched_edges(edge_index, score, num_nodes)``: the clusters of :class:`torch_geometric.nn.EdgePooling`. Returns the
  cluster of each node ``[num_nodes]``, the chosen edges ``[num_chosen]``, and the nodes at no chosen edge
  ``[num_single]``.
- ``components(edge_index, alive, num_nodes)``: the weakly connected component of each node ``[num_nodes]``, and the
  first node of each component ``[num_components]``, over the edges where `alive` is True.
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
    """Chooses edges without a common end greedily, in the order of their scores, highest first.

    An edge is chosen, whatever happens elsewhere, if it is the best remaining edge at both its ends. Each round takes
    all such edges at once, and drops the edges that share an end with them. After :data:`ROUNDS` rounds, the remaining
    edges are taken one by one: on a path along which scores rise, a round would take a single edge.
    """
    order = torch.argsort(score, descending=True)  # the same call as PyG's, so ties are broken alike
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
    """Takes edges greedily, in the order `rank`, and returns their ranks; sets `free` to False at their ends."""
    taken, is_free = [], free.tolist()
    for edge, (one, other) in zip(rank.tolist(), ends[:, rank].t().tolist(), strict=True):
        if is_free[one] and is_free[other]:
            is_free[one] = is_free[other] = False
            taken.append(edge)
    found = torch.tensor(taken, dtype=torch.long)
    free[ends[:, found].reshape(-1)] = False
    return found


def components(edge_index: Tensor, alive: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Weakly connected components, in the order of their first nodes.

    Every node holds a label, at first its own index. Until nothing changes, every node takes the least label among its
    neighbours, then the label of the node with this index.
    """
    ends = torch.where(alive, edge_index, edge_index[0]).cpu().long()  # edges that are not alive become self loops
    least = torch.arange(num_nodes)
    while True:
        before = least
        lower = torch.minimum(least[ends[0]], least[ends[1]])
        # The nodes at the ends' labels take the lower label as well, so all nodes of a tree are joined at once.
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
