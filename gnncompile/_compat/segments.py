"""Memory of CUDA graphs with smaller gaps: torch's allocator takes it in segments that grow.

By default the allocator takes a segment for each large tensor, and a smaller tensor that comes later leaves a gap in
it. Torch has the setting ``expandable_segments`` for a whole process. Here it holds for one thread's capture; tensors
that other threads make meanwhile are in such segments too, which they do not notice.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.distributed as dist

from gnncompile.forks import after_fork

_SETTING = "expandable_segments"
_ENVIRONMENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_HAS_VIRTUAL_MEMORY = 102
"""The attribute of a GPU that CUDA's driver calls ``CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED``."""


class _Captures:
    """The number of captures that run, in all threads."""

    def __init__(self) -> None:
        self.lock, self.number = threading.Lock(), 0

    def add(self, number: int, configure: Callable[[str], None]) -> None:
        with self.lock:
            before, self.number = self.number, self.number + number
            if not (before and self.number):
                configure(f"{_SETTING}:{self.number > 0}")


_captures = _Captures()


@after_fork
def _after_fork() -> None:
    """Replaces the lock, which a thread that is not in this process may have held."""
    global _captures
    _captures = _Captures()


@contextmanager
def growing_segments(device: int) -> Iterator[None]:
    """A context manager: what is allocated inside is taken from segments that grow.

    It changes nothing if the user has settings of the allocator, which a change would reset; if there is a process
    group, since NCCL registers the memory of CUDA graphs; or if the driver can't grow memory.

    Args:
        device: The index of the GPU.
    """
    configure: Callable[[str], None] | None = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None or _has_own_settings() or _has_processes() or not _can_grow(device):
        yield
        return
    _captures.add(1, configure)
    try:
        yield
    finally:
        _captures.add(-1, configure)


def _has_own_settings() -> bool:
    if torch.cuda.get_allocator_backend() != "native" or any(os.environ.get(name) for name in _ENVIRONMENT):
        return True
    if _captures.number:  # these are our own
        return False
    return getattr(torch._C, "_accelerator_getAllocatorSettings", str)() not in ("", f"{_SETTING}:False")


def _has_processes() -> bool:
    return dist.is_available() and dist.is_initialized()


@lru_cache
def _can_grow(device: int) -> bool:
    """Whether a GPU has virtual memory that can be mapped piece by piece."""
    if not sys.platform.startswith("linux"):
        return False
    found, handle = ctypes.c_int(0), ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuDeviceGet(ctypes.byref(handle), device)
        failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(found), _HAS_VIRTUAL_MEMORY, handle)
    except (OSError, AttributeError):
        return False
    return not failed and bool(found.value)
