"""The current GPU, the current stream and the launch of kernels, at the least cost to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch


def current_device() -> int:
    """Returns the index of the current GPU. Torch's public function first asks whether CUDA is initialised."""
    return int(torch._C._cuda_getDevice())


def current_stream(device: int) -> int:
    """Returns the handle of a GPU's current stream. Torch's public function first makes a stream object."""
    return torch._C._cuda_getCurrentRawStream(device)


def static_cuda_launch() -> Callable[..., None] | None:
    """Returns the function by which Inductor launches compiled Triton kernels; None in a torch without CUDA.

    Its arguments are ``(function, grid x, y, z, warps, shared memory, types of the arguments, arguments, stream)``.
    """
    launcher = getattr(torch._C, "_StaticCudaLauncher", None)
    return getattr(launcher, "_launch_kernel", None)
