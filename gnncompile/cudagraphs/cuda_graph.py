"""Captures work on a GPU in CUDA graphs that share their memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from gnncompile import _compat
from gnncompile.device import device_of
from gnncompile.layout import bad_indices, streams

T = TypeVar("T")


class Recorder(Protocol):
    """Captures work, to be replayed over the same memory."""

    def __call__(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Captures the work of `work` without doing it.

        Returns:
            A function that does the work, and the tensors that `work` returned, to which the function writes.
        """

    def reset(self) -> None:
        """Frees what was captured. The functions that do the work must not be called any more."""


class CudaGraphs:
    """Captures CUDA graphs on one device. Graphs of one instance must be replayed in the order of capture.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        bad_indices.watch(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = streams.capturing(device)
        self._device = device
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def __call__(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See :class:`Recorder`.

        Raises:
            RuntimeError: The work waits for the device, or there is too little memory.
        """
        graph = torch.cuda.CUDAGraph()
        # The outer block restores the stream if a failed capture can't be ended.
        with (
            _garbage_left_alone(),
            _compat.growing_segments(self._device.index),
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
            torch.autograd.set_multithreading_enabled(False),  # the captured work is that of one thread
        ):
            made = work()
        self._graphs.add(graph)
        return graph.replay, made

    def reset(self) -> None:
        """See :class:`Recorder`. The host waits for the device, which may be at work on a graph."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()


@contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """A context manager without garbage collection: to destroy a CUDA graph that is garbage breaks a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def supports_cuda_graphs(device: torch.device) -> bool:
    """Whether work on a device can be captured in a CUDA graph."""
    return device_of(device).can_be_recorded


def recorder(device: torch.device) -> Recorder:
    """Returns the recorder for one recording on a device for which :func:`supports_cuda_graphs` is true."""
    return CudaGraphs(device)


def context(device: torch.device) -> tuple[int, bool] | None:
    """Returns ``(stream, whether inference mode is on)``, on which a replay depends besides its inputs.

    Returns None if no recording may be replayed: another device is the current device, or its work is being captured.
    """
    if _compat.current_device() != device.index or torch.cuda.is_current_stream_capturing():
        return None
    return _compat.current_stream(device.index), torch.is_inference_mode_enabled()
