"""Pads mini-batches to a few sizes; the tensors that the user sees keep their valid rows only."""

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

    :func:`gnncompile.loader` does this with ``buckets``; use the transform for mini-batches from elsewhere. The tensors
    that you see are those of :class:`AttachSizes`, without padding. Each has a padded tensor attached. Models compiled
    with ``mode="reduce-overhead"`` and :class:`gnncompile.TrainStep` run on the padded tensors, so that one recording
    serves all mini-batches of a bucket. The padding changes no result, loss or statistic, and is never seen.

    Let this be the last transform, apply it to the model's input, and name the device here: see :class:`AttachSizes`.
    Each transform learns sizes from the mini-batches that it has seen, so use one transform for all mini-batches.

    Args:
        device: The device of the result; None for the device of the graph.
        buckets: The largest number of sizes.

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
        """The sizes of all buckets so far: for each, the numbers of nodes, edges (of each type) and graphs."""
        return self.buckets.sizes()

    def forward(self, data: Data | HeteroData) -> Any:
        """Returns a copy of `data` with padded tensors attached to its tensors."""
        return prepared_on(data, self.device, self.buckets)

    def __repr__(self) -> str:
        device = "" if self.device is None else f"device={str(self.device)!r}, "
        return f"{type(self).__name__}({device}buckets={self.buckets.most})"
