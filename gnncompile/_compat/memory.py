"""The memory behind tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.dlpack import from_dlpack

__all__ = ["StorageWeakRef", "copy_each", "pinned", "same_memory", "shared_bytes", "storage_address"]


def shared_bytes(length: int) -> Tensor:
    """Memory that goes to another process as it is, uint8 ``[length]``; ``share_memory_`` would copy it."""
    storage = torch.UntypedStorage._new_shared(length, device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def pinned(value: Any) -> Any:
    """A nest of tensors in pinned memory, as a loader with ``pin_memory=True`` makes it."""
    return pin_memory(value)


def storage_address(tensor: Tensor) -> int:
    """Tells the storage of a tensor from all others that are there, or to which there is a ``StorageWeakRef``."""
    return int(tensor.untyped_storage()._cdata)


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies tensors of one type to others of their sizes; contiguous ones on a GPU by one launch."""
    torch._foreach_copy_(targets, sources)


def same_memory(tensor: Tensor) -> Tensor:
    """A tensor with a storage that begins at the first element of another one, which it keeps; it is no view.

    Both count the same changes, so that autograd notices where one that it keeps was written to.
    """
    found = tensor.detach()
    # Not of itself: what its memory keeps would be itself, for ever, and nobody the memory.
    found.data = from_dlpack(torch._C._to_dlpack(tensor.detach()))
    return found
