"""Numbers on their way from a GPU to the host, which does not wait for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arriving:
    """Numbers that are being copied from a GPU to the host.

    Attributes:
        host: The memory that they are copied to. They may be read once `done` is reached.
        done: The event after the copy.
    """

    host: Tensor
    done: torch.cuda.Event

    @staticmethod
    def of(value: Tensor) -> Arriving:
        """Starts to copy numbers from a GPU, after the work on its current stream."""
        host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        host.copy_(value, non_blocking=True)
        return Arriving(host, torch.cuda.current_stream(value.device).record_event())
