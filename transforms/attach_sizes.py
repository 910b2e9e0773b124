"""Attaches sizes and layouts to a graph's tensors, which a compiled model would otherwise compute in its call."""

from typing import Any

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from gnncompile.batches.prepare import prepared_on


@functional_transform("attach_sizes")
class AttachSizes(BaseTransform):
    r"""Attaches sizes and layouts to a graph or mini-batch (functional name: :obj:`attach_sizes`).

    :func:`gnncompile.loader` does this to each mini-batch; use the transform for mini-batches from elsewhere. Edges are
    sorted by destination; the sort is stable, and edge attributes are permuted alike. The tensors carry the numbers of
    nodes, edges and graphs, the largest index, and the layouts (CSR) by destination and by source. So a compiled model
    sorts nothing, and :func:`~torch_geometric.nn.pool.global_mean_pool` without a size does not wait for the device.

    The attachment stays with the tensors themselves and is lost in copies. So let this be the last transform, apply it
    to the model's input (to a mini-batch, not to its graphs), and name the device here instead of calling
    :obj:`data.to` afterwards.

    Args:
        device: The device of the result; None for the device of the graph.

    Example:
        >>> data = Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1, 2], [2, 0, 1]]))
        >>> AttachSizes()(data).edge_index.tolist()
        [[1, 2, 0], [0, 1, 2]]
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = device

    def forward(self, data: Data | HeteroData) -> Any:
        """Returns a copy of `data` with sorted edges, sizes and layouts."""
        return prepared_on(data, self.device, None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.device is None else f'device={str(self.device)!r}'})"
