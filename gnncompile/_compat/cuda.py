"""The current GPU, the current stream, and the load and launch of Triton's kernels, at the least cost to the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._triton import triton_hash_with_backend

from gnncompile.forks import after_fork

_preparing = threading.Lock()


def prepare_triton() -> None:
    """Does what Triton does once in a process before it compiles: it builds its driver, and hashes its own files.

    This takes half a second. Triton has no lock here, so each of several threads that begin together would do it all.
    """
    with _preparing:
        triton_hash_with_backend()


@after_fork
def _after_fork() -> None:
    """Frees the lock: a forked process does not have the thread that held it."""
    global _preparing
    _preparing = threading.Lock()


_MOST_TENSOR_MEMORY = 512
"""Columns of tensor memory that a kernel may take, as in Triton."""


def triton_function(compiled: Any) -> Any:
    """Loads a kernel that Triton compiled on the current GPU, and returns the handle of its function.

    Triton 3.6 would also build a launcher from C, one for each list of types. Each takes a tenth of a second of the
    first step. So the kernel is loaded here, if it fits. Triton 3.7 has no such launchers.
    """
    if compiled.function is not None:  # Triton has loaded it
        return compiled.function
    if compiled.metadata.target.backend == "cuda" and hasattr(_nvidia_driver(), "make_launcher"):
        function = _loaded(compiled, current_device())
        if function is not None:
            return function
    _ = compiled.run  # loads the kernel, or raises Triton's error
    return compiled.function


def _nvidia_driver() -> Any:
    from triton.backends.nvidia import driver

    return driver


def _loaded(compiled: Any, device: int) -> int | None:
    """Loads a kernel without a launcher; returns None if it needs more of the GPU than there is."""
    from triton.runtime import driver

    utils, told = driver.active.utils, compiled.metadata
    fits = told.shared <= utils.get_device_properties(device)["max_shared_mem"]
    if not fits or (getattr(told, "tmem_size", None) or 0) > _MOST_TENSOR_MEMORY:
        return None
    _, function, *_, most_threads = utils.load_binary(compiled.name, compiled.kernel, told.shared, device)
    return int(function) if 32 * told.num_warps <= most_threads else None


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
