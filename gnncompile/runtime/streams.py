"""Tensors that are made on one stream of a GPU and read on others, which would not wait for them by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnncompile import _compat


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
