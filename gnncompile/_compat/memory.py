"""The memory of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data._utils.pin_memory import pin_memory

__all__ = [
    "StorageWeakRef",
    "buffer_in",
    "copy_each",
    "empty_vector",
    "pinned",
    "same_memory",
    "shared_bytes",
    "storage_address",
    "storage_users",
    "users_at",
]

_EMPTY: dict[str, Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]] = {
    "cpu": torch._C._dynamo.guards._empty_strided_cpu,  # type: ignore[attr-defined]
    "cuda": torch._C._dynamo.guards._empty_strided_cuda,  # type: ignore[attr-defined]
}
"""Functions that make a new tensor of a shape, strides and a dtype, as Inductor's code does, by type of device."""


def empty_vector(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Returns a new tensor ``[size]`` on the device of another tensor, which is the current one of its type.

    It takes a fraction of the time of ``new_empty``.
    """
    make = _EMPTY.get(like.device.type)
    return like.new_empty((size,), dtype=dtype) if make is None else make((size,), (1,), dtype)


buffer_in: Callable[[Tensor, Sequence[int], Sequence[int], int], Tensor] = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
"""Returns a tensor of a shape and strides that begins so many elements after the first element of another tensor.

The result is no view: autograd does not know that both share memory.
"""

users_at: Callable[[int], int] = torch._C._storage_Use_Count
"""Does the same as :func:`storage_users` for the storage at an address."""


def shared_bytes(length: int) -> Tensor:
    """Returns memory that other processes get without a copy, uint8 ``[length]``; ``share_memory_`` would copy it."""
    storage = torch.UntypedStorage._new_shared(length, device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def pinned(value: Any) -> Any:
    """Returns a nest of tensors in pinned memory, as a loader with ``pin_memory=True`` does."""
    return pin_memory(value)


def storage_address(tensor: Tensor) -> int:
    """Returns a number that identifies the storage of a tensor.

    No other storage has the number while the storage is alive, or while a ``StorageWeakRef`` refers to it.
    """
    return int(tensor.untyped_storage()._cdata)


def storage_users(tensor: Tensor) -> int:
    """Returns how many tensors and other objects hold the storage of a tensor, up to a constant."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies tensors of one dtype to tensors of the same sizes. Contiguous tensors on a GPU take one launch."""
    torch._foreach_copy_(targets, sources)


def same_memory(tensor: Tensor, of: Tensor | None = None) -> Tensor:
    """Returns a tensor over the same memory, with a storage that begins at the tensor's first element. It is no view.

    The result keeps the memory alive. It has the version counter of the tensor, or of `of`, whose memory it is. So
    autograd notices a write to a tensor that it saved.
    """
    found = (tensor if of is None else of).detach()
    # Not to_dlpack(found): its memory would keep `found` itself alive, a cycle that is never freed.
    found.data = torch._C._from_dlpack(torch._C._to_dlpack(tensor.detach()))
    return found
