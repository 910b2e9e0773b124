"""The attributes of self loops, one per node, as PyG's ``add_remaining_self_loops`` reads them."""

from __future__ import annotations

import torch
from torch import Tensor


def loop_attributes(edge_index: Tensor, edge_attr: Tensor, missing: float, num_nodes: int) -> Tensor:
    """Returns the attribute of each node's self loop.

    If a node has several loops, the last one's attribute counts; in PyG on a GPU the choice is undefined. All of them
    get the node's gradient. So does eager, whose ``loops[nodes] = attributes`` gives each value that it assigns the
    gradient of its row.

    Args:
        edge_index: The edges, int ``[2, num_edges]``.
        edge_attr: Their attributes, ``[num_edges, ...]``.
        missing: The attribute of nodes without a loop.
        num_nodes: The number of nodes.

    Returns:
        Attributes of shape ``[num_nodes, ...]``, of `edge_attr`'s dtype.
    """
    row, size = edge_index[0], edge_attr.shape[1:]
    is_loop = row == edge_index[1]
    place = torch.where(is_loop, torch.arange(1, row.size(0) + 1, device=row.device, dtype=row.dtype), 0)
    last = row.new_zeros(num_nodes).scatter_reduce(0, row, place, "amax", include_self=True)
    found = torch.cat([edge_attr.new_full((1, *size), missing), edge_attr]).index_select(0, last)
    if not edge_attr.requires_grad:
        return found
    owner = torch.where(is_loop, row, num_nodes)  # edges that are no loops share a row that is left out
    assigned = edge_attr.new_zeros((num_nodes + 1, *size)).index_put((owner,), edge_attr)[:num_nodes]
    return found.detach() + (assigned - assigned.detach()).nan_to_num()  # adds 0, and the gradient
