"""Remembers what was made from tensors, by the tensors' identity and version.

An in-place change raises a tensor's version counter and is noticed; freed memory that is used again is another
storage object and is noticed too. What changes values without the counter (``tensor.data``, a NumPy view) is not.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from gnncompile._compat import StorageWeakRef

Key = tuple[Any, ...]


class _Thread(threading.local):
    kept: list[tuple[Sequence[Any], list[Tensor]]] | None = None


_thread = _Thread()


@contextmanager
def keeping() -> Iterator[list[tuple[Sequence[Any], list[Tensor]]]]:
    """Collects what caches give out in this thread, and for which tensors: for someone who needs it for longer than
    they may keep it.
    """
    outer, _thread.kept = _thread.kept, []
    try:
        yield _thread.kept
    finally:
        _thread.kept = outer


_LOOKED_AT = 4
"""How many entries are looked at whenever one is added: fewer are added than may go, and mini-batches come often."""


@dataclass(frozen=True)
class _Entry:
    owners: list[StorageWeakRef]
    made: list[Tensor]
    size: int


class IdentityCache:
    """Least recently used first; bounded in entries and bytes; forgets what belongs to freed tensors."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.misses = 0
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._last: tuple[list[Any], list[Tensor]] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, inputs: Sequence[Any], make: Callable[..., list[Tensor]]) -> list[Tensor]:
        """What ``make(*inputs)`` returned for these tensors and numbers, or returns now."""
        made = self._find(inputs, make)
        if _thread.kept is not None:
            _thread.kept.append((inputs, made))
        return made

    def _find(self, inputs: Sequence[Any], make: Callable[..., list[Tensor]]) -> list[Tensor]:
        last = self._last
        if last is not None and _unchanged(last[0], inputs):
            return last[1]
        key, owners = identify(inputs)
        if key is not None:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None:
                    self._entries.move_to_end(key)
                    self._last = _remember(inputs), entry.made
                    return entry.made
        self.misses += 1
        made = make(*inputs)
        if key is not None:
            self._last = _remember(inputs), made
            with self._lock:
                self._entries[key] = _Entry(owners, made, sum(t.numel() * t.element_size() for t in made))
                self._trim()
        return made

    def _trim(self) -> None:
        """Drops what belongs to freed tensors, a few at a time, then the least recently used beyond the bounds."""
        for key, entry in list(islice(self._entries.items(), _LOOKED_AT)):
            if any(owner.expired() for owner in entry.owners):
                del self._entries[key]
        total = sum(entry.size for entry in self._entries.values())
        while len(self._entries) > 1 and (len(self._entries) > self.max_entries or total > self.max_bytes):
            total -= self._entries.popitem(last=False)[1].size


def _remember(inputs: Sequence[Any]) -> list[Any]:
    """What tells quickly that the very same objects came again."""
    return [(weakref.ref(v), v._version, v.data_ptr(), v.shape) if isinstance(v, Tensor) else v for v in inputs]


def _unchanged(known: list[Any], inputs: Sequence[Any]) -> bool:
    for old, new in zip(known, inputs, strict=True):
        if not isinstance(new, Tensor):
            if old != new:
                return False
        elif (
            not isinstance(old, tuple)
            or old[0]() is not new
            or old[1] != new._version
            or old[2] != new.data_ptr()
            or old[3] != new.shape
        ):
            return False
    return True


def identify(inputs: Sequence[Any]) -> tuple[Key | None, list[StorageWeakRef]]:
    """A key that no other tensor value can have while the returned references are held.

    None for tensors without a version counter (made under ``torch.inference_mode``).
    """
    parts: list[Any] = []
    owners = []
    for value in inputs:
        if not isinstance(value, Tensor):
            parts.append(value)
            continue
        if value.is_inference():
            return None, []
        owner = StorageWeakRef(value.untyped_storage())
        owners.append(owner)
        parts.append((owner.cdata, value._version, value.storage_offset(), value.shape, value.stride(), value.dtype))
    return tuple(parts), owners
