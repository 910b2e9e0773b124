"""Mini-batches of a few sizes only, behind tensors of the true ones."""

from typing import Any

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from gnncompile.batches.buckets import MOST, Buckets
from gnncompile.batches.prepare import prepared_on
from gnncompile.exc import ArgumentError


@functional_transform("pad_to_bucket")
class PadToBucket(BaseTransform):
    r"""Pads graphs or mini-batches to a few learned sizes (functional name: :obj:`pad_to_bucket`).

    What :func:`gnncompile.loader` does with ``buckets``, for mini-batches that come from elsewhere. The tensors that
    you see are those of :class:`AttachSizes`, with their true sizes; the padded ones stand behind them. Models compiled
    with ``mode="reduce-overhead"`` and :class:`gnncompile.TrainStep` take these, so that one recording serves all
    mini-batches of a bucket; no result, loss or statistic is changed by the padding, and none of it is ever seen.

    Let it be the last transform, applied to what the model takes, and name the device here: see :class:`AttachSizes`.
    Sizes are learned by each transform for itself, from what it has seen, so use one for all mini-batches.

    Args:
        device: Where the result is; None for where the graph is.
        buckets: How many sizes there may be at most.

    Raises:
        ValueError: `buckets` is not positive.

    Example:
        >>> pad = PadToBucket()
        >>> data = pad(Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1, 2, 2], [2, 0, 1, 1]])))
        >>> data.x.shape, pad.sizes
        (torch.Size([3, 2]), [(8, 8)])
    """

    def __init__(self, device: torch.device | str | None = None, buckets: int = MOST) -> None:
        if buckets < 1:
            raise ArgumentError(f"buckets: found {buckets}, expected at least 1; use AttachSizes for no padding.")
        self.device, self.buckets = device, Buckets(buckets)

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """The numbers of nodes, edges and graphs (of each type) of all buckets so far."""
        return self.buckets.sizes()

    def forward(self, data: Data | HeteroData) -> Any:
        """Returns a copy of `data` with padding behind its tensors."""
        return prepared_on(data, self.device, self.buckets)

    def __repr__(self) -> str:
        device = "" if self.device is None else f"device={str(self.device)!r}, "
        return f"{type(self).__name__}({device}buckets={self.buckets.most})"
