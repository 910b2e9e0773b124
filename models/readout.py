"""Pooling from nodes to graphs, with the number of graphs as an argument."""

import torch
from torch import Tensor, nn
from torch_geometric.nn import global_add_pool, global_max_pool, global_mean_pool

from gnncompile.exc import ArgumentError

_POOLS = {"max": global_max_pool, "mean": global_mean_pool, "sum": global_add_pool}


class Readout(nn.Module):
    r"""Reduces the rows of each graph's nodes to one row.

    .. math::
        \mathbf{y}_g = \bigl\Vert_{r} \, r_{i \in g} \, \mathbf{x}_i, \qquad r \in \{ \mathrm{sum}, \mathrm{mean},
        \max \}

    The number of graphs is an argument, so that no size is read from the device; a graph without nodes gets zeros.

    Args:
        reduce: one or more of `"sum"`, `"mean"` and `"max"`; the rows of several reductions are concatenated.

    Raises:
        ValueError: a reduction is unknown, or none is given.
    """

    def __init__(self, *reduce: str) -> None:
        super().__init__()
        unknown = [name for name in reduce if name not in _POOLS]
        if unknown or not reduce:
            raise ArgumentError(f"reduce: got {reduce}, expected one or more of {sorted(_POOLS)}; name what you mean")
        self.reduce = reduce

    def forward(self, x: Tensor, batch: Tensor, batch_size: int) -> Tensor:
        """Computes one output row per graph.

        Args:
            x: rows of nodes of all graphs, `[num_nodes, channels]`.
            batch: the graph of each node, `[num_nodes]`, int64.
            batch_size: number of graphs (`data.num_graphs`).

        Returns:
            `[batch_size, channels * len(reduce)]`.
        """
        return torch.cat([_POOLS[name](x, batch, batch_size) for name in self.reduce], dim=-1)

    def extra_repr(self) -> str:
        """Returns the reductions, for `repr`."""
        return ", ".join(self.reduce)
