"""Memory of large buffers on a CPU, which compiled models keep for their next calls.

The C library gives large memory back to the system when a buffer is freed. The next buffer then gets new pages, which
the system clears first: in a training step this can take as long as the kernels. So a buffer of a compiled graph lives
in a *block*, which stays. Only buffers that do not reach the caller do so.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.forks import after_fork

_STALE = 16
"""A free block is out of use if none of the last buffers was in it, of which there are so many for each block."""

_EVERY = 256
"""Blocks that are out of use are looked for whenever so many buffers were made, and before a block is made."""

_SIMILAR = 0.75
"""A new block stands for a free one with at least this share of its size: sizes of mini-batches vary a little."""


class _Block:
    """Memory that one buffer at a time lives in.

    Torch counts the tensors that share a storage, in Python and in autograd. If these are the block's own, it is free.
    """

    __slots__ = ("_address", "_bytes", "_holders", "_typed", "last_used", "size")

    def __init__(self, size: int) -> None:
        self.size, self.last_used = size, 0
        self._typed: dict[torch.dtype, Tensor] = {}
        with torch.inference_mode(False):  # autograd can't save a buffer of an inference tensor
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._address = _compat.storage_address(self._bytes)
        self._holders = _compat.users_at(self._address)

    @property
    def is_free(self) -> bool:
        return _compat.users_at(self._address) == self._holders

    def buffer(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor in the block, which is not free as long as a tensor shares the memory."""
        typed = self._typed.get(dtype)
        if typed is None:
            with torch.inference_mode(False):
                typed = torch.empty(0, dtype=dtype, device="cpu").set_(self._bytes.untyped_storage())
            self._typed[dtype] = typed
            self._holders = _compat.users_at(self._address)
        return _compat.buffer_in(typed, size, stride, 0)


class _Blocks:
    """The blocks of a process, the smallest first. Each buffer gets the smallest free block that it fits in."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._buffers = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        with self._lock:
            return sum(block.size for block in self._blocks)

    def buffer(self, nbytes: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a buffer of `nbytes` bytes."""
        with self._lock:
            block = self._free(nbytes) or self._new(nbytes)
            self._buffers += 1
            block.last_used = self._buffers
            if self._buffers % _EVERY == 0:
                self._drop()
            return block.buffer(size, stride, dtype)

    def release(self) -> None:
        """Drops the free blocks. Others are dropped too, and freed with the buffers in them."""
        with self._lock:
            self._blocks = []

    def _free(self, nbytes: int) -> _Block | None:
        first = bisect_left(self._blocks, nbytes, key=_size)
        return next((block for block in self._blocks[first:] if block.is_free), None)

    def _new(self, nbytes: int) -> _Block:
        self._drop(nbytes)
        try:
            made = _Block(nbytes)
        except RuntimeError:  # no memory is left; what is free here may be enough
            self._blocks = [block for block in self._blocks if not block.is_free]
            made = _Block(nbytes)
        insort(self._blocks, made, key=_size)
        return made

    def _drop(self, nbytes: int = 0) -> None:
        """Drops free blocks: those that are out of use, and the one that a new block of `nbytes` bytes stands for."""
        oldest = self._buffers - _STALE * len(self._blocks)
        free = [block for block in self._blocks if block.is_free]
        dropped = [block for block in free if block.last_used < oldest]
        dropped += [block for block in free[-1:] if _SIMILAR * nbytes <= block.size < nbytes]
        self._blocks = [block for block in self._blocks if block not in dropped]


def _size(block: _Block) -> int:
    return block.size


_blocks = _Blocks()


def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a buffer for the code of a compiled graph: a tensor on the CPU, whose values are not set.

    Args:
        size: The shape.
        stride: The strides, in elements; none is negative.
        dtype: The dtype.
    """
    last = 0
    for length, step in zip(size, stride, strict=True):
        if length == 0:
            return _compat.empty_cpu_buffer(size, stride, dtype)
        last += (length - 1) * step
    nbytes = (last + 1) * dtype.itemsize
    if nbytes < _compat.LEAST_KEPT:
        return _compat.empty_cpu_buffer(size, stride, dtype)
    return _blocks.buffer(nbytes, size, stride, dtype)


def kept_bytes() -> int:
    """Returns the bytes that compiled models keep on the CPU for their next calls, in use or not."""
    return _blocks.nbytes


def release_memory() -> None:
    """Frees the memory that compiled models keep on a CPU for their next calls.

    New memory costs time in every call, so a compiled model keeps the memory of its large intermediate results. That is
    about as much as one call needs at a time. Call this function if the process needs the memory for something else. No
    result changes, and any thread may call it at any time. The next call takes new memory. ``torch.cuda.empty_cache()``
    does the same on a GPU. ``options={"keep_memory": False}`` lets a model keep none.
    """
    _blocks.release()


@after_fork
def _after_fork() -> None:
    """Forgets the blocks: another thread may have held the lock in the moment of the fork."""
    global _blocks
    _blocks = _Blocks()
