"""The current GPU and stream, and launches, at the least cost to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch


def current_device() -> int:
    """The index of the current GPU; torch's public way asks first whether CUDA is initialised."""
    return int(torch._C._cuda_getDevice())


def current_stream(device: int) -> int:
    """The handle of a GPU's current stream: the public way makes an object of it first."""
    return torch._C._cuda_getCurrentRawStream(device)


def static_cuda_launch() -> Callable[..., None] | None:
    """How Inductor launches a compiled Triton kernel: ``(function, grid x, y, z, warps, shared memory, types of the
    arguments, arguments, stream)``; None in a torch without CUDA.
    """
    launcher = getattr(torch._C, "_StaticCudaLauncher", None)
    return getattr(launcher, "_launch_kernel", None)
