"""The current GPU, the current stream, and Triton's preparations and launches, at the least cost to the host."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch
from torch.utils._triton import triton_hash_with_backend

_preparing = threading.Lock()


def prepare_triton() -> None:
    """Does what Triton does once in a process before it compiles: it builds its driver, and hashes its own files.

    This takes half a second. Triton has no lock here, so each of several threads that begin together would do it all.
    """
    with _preparing:
        triton_hash_with_backend()


def _after_fork() -> None:
    """Frees the lock: a forked process does not have the thread that held it."""
    global _preparing
    _preparing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


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
