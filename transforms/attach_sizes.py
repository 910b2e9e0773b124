"""What a compiled model would otherwise find out about a graph in its call, attached to the graph's tensors."""

from typing import Any

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from gnncompile.batches.prepare import prepared_on


@functional_transform("attach_sizes")
class AttachSizes(BaseTransform):
    r"""Attaches sizes and layouts to a graph or mini-batch (functional name: :obj:`attach_sizes`).

    What :func:`gnncompile.loader` does to each mini-batch, for those that come from elsewhere: edges are sorted by
    destination (stably, edge attributes alike), and the tensors carry what compiled models ask for: the numbers of
    nodes, edges and graphs, the largest index, and the layouts (CSR) by destination and by source. So a model sorts
    nothing, and :func:`~torch_geometric.nn.pool.global_mean_pool` without a size does not wait for the device.

    This goes with the tensors themselves, not with their copies: let it be the last transform, applied to what the
    model takes (to a mini-batch, not to its graphs), and name the device here rather than by :obj:`data.to` afterwards.

    Args:
        device: Where the result is; None for where the graph is.

    Example:
        >>> data = Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1, 2], [2, 0, 1]]))
        >>> AttachSizes()(data).edge_index.tolist()
        [[1, 2, 0], [0, 1, 2]]
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = device

    def forward(self, data: Data | HeteroData) -> Any:
        """Returns a copy of `data` that is ready."""
        return prepared_on(data, self.device, None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.device is None else f'device={str(self.device)!r}'})"
