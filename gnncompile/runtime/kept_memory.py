"""Memory of large buffers on a CPU, which compiled models keep for their next calls.

The C library gives large memory back to the system when a buffer is freed. The next buffer then gets new pages, which
the system clears first: in a training step this can take as long as the kernels. So a buffer of a compiled graph lives
in a *block*, which stays.

No buffer that reaches the caller may live in a block. It would hold more memory than it needs. Above all, caches tell
tensors apart by storage and version (:mod:`gnncompile.layout.identity_cache`), and the next buffer has the same ones.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.forks import after_fork

_SIMILAR = 0.75
"""A buffer fits well in a block if it takes this share of it. A new block stands for a free one of this share."""

_LEAST_SHARE = 0.25
"""The least share of a block that a buffer may take, so that small buffers do not keep large blocks in use."""

_STALE, _LEAST_STALE = 16, 1024
"""A free block is out of use if none of the last buffers was in it: so many for each block, and no fewer."""

_EVERY = 256
"""Blocks that are out of use are looked for whenever so many buffers were made, and before a block is made."""


class _Block:
    """Memory that one buffer at a time lives in.

    Torch counts the tensors that share a storage, in Python and in autograd. If these are the block's own, it is free.
    """

    __slots__ = ("_bytes", "_typed", "address", "last_used", "own", "size")

    def __init__(self, size: int) -> None:
        self.size, self.last_used = size, 0
        self._typed: dict[torch.dtype, Tensor] = {}
        with torch.inference_mode(False):  # autograd can't save a buffer of an inference tensor
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.address = _compat.storage_address(self._bytes)
        self.own = _compat.users_at(self.address)

    @property
    def is_usable(self) -> bool:
        """Whether no buffer is in the block, and nobody freed it: a saved-tensor hook may resize a tensor's storage."""
        is_free = _compat.users_at(self.address) == self.own
        return is_free and self._bytes.untyped_storage().nbytes() == self.size

    def buffer(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor in the block, which is not free as long as a tensor shares the memory."""
        typed = self._typed.get(dtype)
        if typed is None:
            with torch.inference_mode(False):
                typed = torch.empty(0, dtype=dtype, device="cpu").set_(self._bytes.untyped_storage())
            self._typed[dtype] = typed
            self.own = _compat.users_at(self.address)
        return _compat.buffer_in(typed, size, stride, 0)


class _Blocks:
    """The blocks of a process. Each buffer gets the smallest free block that it fits in."""

    def __init__(self) -> None:
        self._free: list[_Block] = []  # the smallest first
        self._others: list[_Block] = []  # in use when they were last looked at
        self._buffers = 0
        self._lock = threading.RLock()  # a finalizer may run a compiled model while its thread holds the lock

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        with self._lock:
            return sum(block.size for block in (*self._free, *self._others))

    def buffer(self, nbytes: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a buffer of `nbytes` bytes."""
        with self._lock:
            block = self._taken(nbytes, _SIMILAR)
            if block is None:
                self._find_free()
                block = self._taken(nbytes, _LEAST_SHARE) or self._new(nbytes)
            found = block.buffer(size, stride, dtype)  # from here on, torch counts a tensor in the block
            self._buffers += 1
            block.last_used = self._buffers
            self._others.append(block)
            if self._buffers % _EVERY == 0:
                self._find_free()
                self._drop()
            return found

    def _taken(self, nbytes: int, share: float) -> _Block | None:
        """Takes the smallest block that is known to be free, if the buffer needs so much of it."""
        at = bisect_left(self._free, nbytes, key=_size)
        while at < len(self._free) and share * self._free[at].size <= nbytes:
            block = self._free.pop(at)
            if block.is_usable:  # a call within a call may have taken it in the meantime
                return block
        return None

    def _find_free(self) -> None:
        users = _compat.users_at
        found = [block for block in self._others if users(block.address) == block.own]
        if found:
            known = set(found)
            self._others = [block for block in self._others if block not in known]
            self._free = sorted((*self._free, *found), key=_size)

    def _new(self, nbytes: int) -> _Block:
        self._drop(nbytes)
        try:
            return _Block(nbytes)
        except RuntimeError:  # no memory is left; what is free here may be enough
            self._free = []
            return _Block(nbytes)

    def _drop(self, nbytes: int = 0) -> None:
        """Drops free blocks: those that are out of use, and the one that a new block of `nbytes` bytes stands for."""
        count = len(self._free) + len(self._others)
        oldest = self._buffers - max(_STALE * count, _LEAST_STALE)
        at = bisect_left(self._free, nbytes, key=_size) - 1
        if at >= 0 and self._free[at].size >= _SIMILAR * nbytes:
            del self._free[at]
        self._free = [block for block in self._free if block.last_used >= oldest]


def _size(block: _Block) -> int:
    return block.size


_blocks = _Blocks()


def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a buffer for the code of a compiled graph: a tensor on the CPU, whose values are not set.

    Args:
        size: The shape, with at least one element.
        stride: The strides, in elements; none is negative.
        dtype: The dtype.
    """
    last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return _blocks.buffer((last + 1) * dtype.itemsize, size, stride, dtype)


def kept_bytes() -> int:
    """Returns the bytes that compiled models keep on the CPU for their next calls, in use or not."""
    return _blocks.nbytes


def release_memory() -> None:
    """Frees the memory that compiled models keep on a CPU for their next calls.

    New memory costs time in every call, so a compiled model keeps the memory of its large intermediate results. That is
    about as much as one call needs at a time, and it stays when the model is deleted. Call this function if the process
    needs the memory for something else. No result changes, and any thread may call it at any time. The next call takes
    new memory. ``torch.cuda.empty_cache()`` does the same on a GPU. A model that is compiled with
    ``options={"keep_memory": False}`` keeps none.
    """
    global _blocks
    _blocks = (
        _Blocks()
    )  # without the lock, so that a signal handler may call this; what is in use is freed with its buffers


after_fork(release_memory)
"""Another thread may have held the lock in the moment of a fork."""
