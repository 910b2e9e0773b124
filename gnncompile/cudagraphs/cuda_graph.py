"""Captures work on a GPU in CUDA graphs that share their memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from gnncompile import _compat
from gnncompile.layout import csr, streams

T = TypeVar("T")


class Recorder(Protocol):
    """What captures work that is to be replayed over the same memory."""

    def __call__(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Captures what `work` does without doing it.

        Returns:
            What does it, and the tensors that `work` returned, which it writes to.
        """


class CudaGraphs:
    """Captures for one device. What is captured with one of these is to be replayed in the order of capture.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        csr.watch(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = streams.capturing(device)

    def __call__(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See :class:`Recorder`.

        Raises:
            RuntimeError: Something waits for the device, or there is too little memory.
        """
        graph = torch.cuda.CUDAGraph()
        # The outer block restores the stream where a failed capture can't be ended.
        with (
            _garbage_left_alone(),
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
            torch.autograd.set_multithreading_enabled(False),  # what is captured is the work of one thread
        ):
            made = work()
        return graph.replay, made


@contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """A block in which Python looks for no garbage: to destroy a graph that is among it breaks a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def supports_cuda_graphs(device: torch.device) -> bool:
    """Whether work on a device can be captured."""
    return device.type == "cuda"


def recorder(device: torch.device) -> Recorder:
    """What captures work of one recording on a device that :func:`supports_cuda_graphs`."""
    return CudaGraphs(device)


def context(device: torch.device) -> tuple[int, bool] | None:
    """What a replay depends on beside its inputs: the stream, and whether inference tensors are made.

    None where no recording may be replayed: another device is the current one, or its work is being captured.
    """
    if _compat.current_device() != device.index or torch.cuda.is_current_stream_capturing():
        return None
    return _compat.current_stream(device.index), torch.is_inference_mode_enabled()
