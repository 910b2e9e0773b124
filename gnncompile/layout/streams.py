"""Streams of our own, and tensors that are made on one stream of a GPU and read on others, which would not wait.

torch gives out 32 streams of each priority, one after the other: what was made later may be the same stream again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gnncompile import _compat


@lru_cache(maxsize=64)
def capturing(device: torch.device) -> torch.cuda.Stream:
    """The stream that CUDA graphs of a device are captured on.

    What another thread did on it meanwhile would become part of the graph, and the events that it recorded could not be
    waited for. With a priority of its own it is none of the streams that users, loaders and NCCL are given.
    """
    return torch.cuda.Stream(device, priority=-1)


@lru_cache(maxsize=64)
def copying(device: torch.device) -> torch.cuda.Stream:
    """The stream that all loaders copy to a device on."""
    return torch.cuda.Stream(device)


class Ordered:
    """Tensors of one GPU, made on the stream that was current there.

    Args:
        tensors: All of them.
        device: The GPU's index.
    """

    def __init__(self, tensors: Sequence[Tensor], device: int) -> None:
        self.tensors, self.device = tensors, device
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(device))
        self._known = {_compat.current_stream(device)}

    @staticmethod
    def after(tensors: Sequence[Tensor]) -> Ordered | None:
        """For tensors whose making was just launched; None where no stream can overtake it: on a CPU, and while a
        CUDA graph is captured, of which they are a part.
        """
        device = next((t.get_device() for t in tensors if t.is_cuda), None)
        return None if device is None or torch.cuda.is_current_stream_capturing() else Ordered(tensors, device)

    def follow(self) -> None:
        """Makes the current stream wait for the tensors, if it has not yet, and their memory wait for it. No sync."""
        current = _compat.current_stream(self.device)
        # A capture began with a sync; waiting for what is not part of it would end it.
        if current in self._known or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._done)
        for tensor in self.tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)
        self._known.add(current)
