"""Whether the autograd graph of a tensor is older than the running call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class _Thread(threading.local):
    """The number of the first autograd node that the thread's running call can make; None outside of calls."""

    first: int | None = None


_thread = _Thread()


@contextmanager
def one_call() -> Iterator[None]:
    """Marks a call of a compiled callable. Calls inside of another one are part of it."""
    if _thread.first is not None:
        yield
        return
    _thread.first = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _thread.first = None


def is_of_an_earlier_call(tensor: Tensor) -> bool:
    """Whether a tensor has a history that was there before the running call began."""
    node, first = tensor.grad_fn, _thread.first
    return node is not None and (first is None or node._sequence_nr() < first)
