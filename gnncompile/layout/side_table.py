"""Values that belong to tensors, by the identity of the tensors.

Compiled graphs and autograd pass plain tensors. What is known of such a tensor has no other way to get from the code
that makes the tensor to the code that reads it.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

T = TypeVar("T")


def version_of(tensor: Tensor) -> int:
    """Returns the number of writes to a tensor so far; -1 for an inference tensor, whose writes are not counted."""
    return -1 if tensor.is_inference() else tensor._version


class SideTable(Generic[T]):
    """One value for each of some tensors. A value lives as long as its tensor, and no longer.

    A tensor is found by identity. Its views, aliases, clones and unpickled copies are other tensors, without a value.

    The tensors are held by weak references. Autograd may be the only holder of a tensor that it saved for a backward.
    Such a tensor keeps its Python object: while C++ holds a tensor, torch holds the object. The weak reference stays
    valid, so the tensor still has its value when autograd returns it.

    A value must not refer to its own tensor: the table holds the value, so neither would ever be freed.

    Threads may read and write without a lock. Each method is one operation on a dictionary, and a callback that removes
    an entry runs before the id of its tensor can be used again.
    """

    def __init__(self) -> None:
        entries: dict[int, _Entry] = {}

        def remove(entry: weakref.ref[Tensor]) -> None:
            key = cast(_Entry, entry).key
            if entries.get(key) is entry:
                del entries[key]

        self._entries, self._remove = entries, remove

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tensor: Tensor) -> T | None:
        """Returns the value of a tensor, or None if it has none."""
        entry = self._entries.get(id(tensor))
        return entry.value if entry is not None and entry() is tensor else None

    def set(self, tensor: Tensor, value: T) -> None:
        """Gives a tensor a value, in place of an earlier one."""
        entry = _Entry(tensor, self._remove)
        entry.key, entry.value = id(tensor), value
        self._entries[entry.key] = entry


class _Entry(weakref.ref[Tensor]):
    """A weak reference to a tensor, with the id and the value of the tensor."""

    __slots__ = ("key", "value")

    key: int
    value: Any
