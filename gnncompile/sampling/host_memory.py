"""Makes host memory readable by kernels of a GPU: registers it with CUDA where it lies, without a copy."""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from gnncompile.device import device_of
from gnncompile.exc import HostMemoryError

logger = logging.getLogger(__name__)

SMALL = 2**22
"""Tensors of fewer bytes are copied to pinned memory, since CUDA registers whole pages."""

_FOR_ALL_CONTEXTS = 1
"""``cudaHostRegisterPortable``."""


class PinnedRows:
    """A tensor in host memory that kernels may read, as long as this object lives.

    Attributes:
        tensor: The given tensor, or a copy of it in pinned memory.
    """

    def __init__(self, tensor: Tensor, registration: _Registration | None) -> None:
        self.tensor, self._registration = tensor, registration


def pinned(x: Tensor, device: torch.device) -> PinnedRows:
    """Returns a tensor in host memory so that kernels of `device` may read it.

    CUDA registers the memory of `x` in place. It is copied if it is small, or if CUDA refuses to register it, as it
    does for some files that are mapped into memory: then the log says so.

    Raises:
        MemoryError: The host has not enough memory that can be pinned.
    """
    if not device_of(device).has_streams:
        return PinnedRows(x, None)  # Triton's interpreter reads any memory.
    registration = _Registration.of(x)
    if registration is not None:
        return PinnedRows(x, registration)
    if x.is_pinned():
        return PinnedRows(x, None)
    if x.nbytes < SMALL:
        return PinnedRows(x.pin_memory(), None)
    made = _Registration.make(x, device)
    if made is None:
        logger.warning(
            "features: %.1f GB are copied to pinned memory, since CUDA can't pin them in place", x.nbytes / 1e9
        )
        x = x.clone()
        made = _Registration.make(x, device)
    if made is None:
        raise HostMemoryError(
            f"place: found {x.nbytes / 1e9:.1f} GB of features that CUDA can't pin on the host, expected memory that "
            "can be pinned; raise the limit of locked memory (ulimit -l), or keep fewer features on the host."
        )
    return PinnedRows(x, made)


class _Registration:
    """Memory that is registered with CUDA until the last user of this object is gone."""

    def __init__(self, x: Tensor, device: torch.device) -> None:
        self._keeps = x
        weakref.finalize(self, _unregister, x.data_ptr(), device).atexit = False

    @classmethod
    def of(cls, x: Tensor) -> _Registration | None:
        """Returns the registration of a tensor's memory, if there is one."""
        begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
        for one in list(_current.values()):
            start = one._keeps.data_ptr()
            if start <= begin and end <= start + one._keeps.nbytes:
                return one
        return None

    @classmethod
    def make(cls, x: Tensor, device: torch.device) -> _Registration | None:
        """Registers a tensor's memory; returns None if CUDA refuses."""
        with _lock, torch.cuda.device(device):
            if int(torch.cuda.cudart().cudaHostRegister(x.data_ptr(), x.nbytes, _FOR_ALL_CONTEXTS)):
                _forget_error(device)
                return None
            made = _current[x.data_ptr()] = cls(x, device)
            return made


_current: weakref.WeakValueDictionary[int, _Registration] = weakref.WeakValueDictionary()
"""The registrations by the first address of their memory."""

_lock = threading.Lock()


def _unregister(pointer: int, device: torch.device) -> None:
    """Waits for the kernels that may read the memory, and gives it back."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(pointer)


def _forget_error(device: torch.device) -> None:
    """CUDA reports a refused registration once more at the next call, which may be anyone's."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
