"""Streams of gnncompile's own, and tensors that are made on one stream of a GPU and read on other streams.

Torch's allocator gives freed memory to the stream that it was allocated on, at once. So there is one rule for memory
that work on another stream reads or writes:

- The other stream waits for an event after the work that has made the values, or for the stream itself.
- The tensor is recorded on the other stream (``record_stream``), once for each pair of them. Then its memory is given
  out only after the work that the other stream has when the tensor dies.
- Memory that a side stream works on, and nobody else keeps, is allocated on the side stream.
- Memory that gnncompile uses again for other values waits for its last readers by an event. Torch does not know of
  these readers, and ignores ``record_stream`` of tensors that share memory by DLPack.

By default, the other streams would not wait for the tensors. Torch gives out 32 streams of each priority in turn, so a
stream made later may be the same stream again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.device import device_of


@lru_cache(maxsize=64)
def capturing(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which CUDA graphs of a device are captured.

    If another thread used the stream meanwhile, its work would become part of the graph, and nobody could wait for its
    events. The stream has its own priority, so users, loaders and NCCL are never given it.
    """
    return torch.cuda.Stream(device, priority=-1)


@lru_cache(maxsize=64)
def copying(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which all loaders copy to a device."""
    return torch.cuda.Stream(device)


class Readers:
    """Records tensors on each stream that reads them, once. The allocator then waits for the stream's work.

    Args:
        tensors: Tensors that are made already. Only those on a device with streams count.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if device_of(tensor.device).has_streams]
        self._known: set[torch.cuda.Stream] = set()

    def add(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory of the tensors until the work is done that the stream has when they die."""
        if stream in self._known:
            return
        for tensor in self._tensors:
            tensor.record_stream(stream)
        self._known.add(stream)


class Ordered:
    """Tensors of one GPU that were made on its current stream. Other streams can wait for them.

    Args:
        tensors: The tensors.
        device: The index of the GPU.
    """

    def __init__(self, tensors: Sequence[Tensor], device: int) -> None:
        self.tensors, self.device = tensors, device
        stream = _compat.current_stream(device)
        # An event on the default stream can be recorded when it is needed: no CUDA graph is ever captured there. Who
        # needs it waits for later work on that stream too.
        self._done = torch.cuda.current_stream(device).record_event() if stream else None
        self._known = {stream}

    @staticmethod
    def after(tensors: Sequence[Tensor]) -> Ordered | None:
        """Returns the order of tensors whose kernels were just launched, or None if no stream can overtake the kernels.

        No stream can overtake them on a CPU, or while a CUDA graph is captured that they are part of.
        """
        for tensor in tensors:
            if device_of(tensor.device).has_streams:
                capturing = torch.cuda.is_current_stream_capturing()
                return None if capturing else Ordered(tensors, tensor.get_device())
        return None

    def follow(self) -> None:
        """Makes the current stream wait for the tensors, if it has not yet, and their memory wait for the stream.

        No sync.
        """
        current = _compat.current_stream(self.device)
        # A capture began with a sync. To wait for work outside of the capture would end it.
        if current in self._known or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._done or torch.cuda.default_stream(self.device).record_event())
        for tensor in self.tensors:
            if device_of(tensor.device).has_streams:
                tensor.record_stream(stream)
        self._known.add(current)
