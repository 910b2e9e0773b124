"""Remembers what was made from tensors, by the tensors' identity and version.

An in-place change raises a tensor's version counter and is noticed; freed memory that is used again is another
storage object and is noticed too, and so is other memory behind the same tensor. What changes values without the
counter (``tensor.data.add_()``, a NumPy view, another process that shares the memory) is not.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from gnncompile._compat import StorageWeakRef, storage_address
from gnncompile.layout.streams import Ordered

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
    """What was made.

    Attributes:
        key: Of what it was made from.
        owners: Keep the addresses in the key from being used again.
        made: The tensors.
        size: Their bytes.
        order: Lets streams other than the one they were made on wait for them.
    """

    key: Key
    owners: list[StorageWeakRef]
    made: list[Tensor]
    size: int
    order: Ordered | None


class IdentityCache:
    """Least recently used first; bounded in entries and bytes; forgets what belongs to freed tensors."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.hits, self.misses = 0, 0
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._last: _Entry | None = None
        with _caches_lock:
            _caches.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered."""
        with self._lock:
            return sum(entry.size for entry in self._entries.values())

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._entries.clear()
            self._last = None

    def get(self, inputs: Sequence[Any], make: Callable[..., list[Tensor]]) -> list[Tensor]:
        """What ``make(*inputs)`` returned for these tensors and numbers, or returns now."""
        made = self._find(inputs, make)
        if _thread.kept is not None:
            _thread.kept.append((inputs, made))
        return made

    def _find(self, inputs: Sequence[Any], make: Callable[..., list[Tensor]]) -> list[Tensor]:
        key = identify(inputs)
        entry = None
        if key is not None:
            entry = self._last
            if entry is None or entry.key != key:
                with self._lock:
                    entry = self._entries.get(key)
                    if entry is not None:
                        self._entries.move_to_end(key)
                        self._last = entry
        if entry is None:
            return self._make(key, inputs, make)
        self.hits += 1
        if entry.order is not None:
            entry.order.follow()
        return entry.made

    def _make(self, key: Key | None, inputs: Sequence[Any], make: Callable[..., list[Tensor]]) -> list[Tensor]:
        self.misses += 1
        # References first: while they are held nothing else can get these addresses.
        owners = [_owner(v) for v in inputs if isinstance(v, Tensor)]
        made = make(*inputs)
        # Another thread may have changed an input by now: what was made is of neither value then.
        if key is not None and identify(inputs) == key:
            entry = _Entry(key, owners, made, sum(t.numel() * t.element_size() for t in made), Ordered.after(made))
            with self._lock:
                self._entries[key] = self._last = entry
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


def identify(inputs: Sequence[Any]) -> Key | None:
    """A key that no other tensor value can have while the storages of these are referenced, weakly or not.

    None if there are tensors without a version counter (made under ``torch.inference_mode``).
    """
    parts: list[Any] = []
    for value in inputs:
        if not isinstance(value, Tensor):
            parts.append(value)
            continue
        if value.is_inference():
            return None
        original = _original(value) if _copies else None
        parts.append(_part(value) if original is None else original.of_part)
    return tuple(parts)


def _part(value: Tensor) -> Key:
    return storage_address(value), value._version, value.storage_offset(), value.shape, value.stride(), value.dtype


class _Copy(NamedTuple):
    """A copy, and what it is a copy of."""

    part: Key
    owner: StorageWeakRef
    of_part: Key
    of_owner: StorageWeakRef


_copies: OrderedDict[int, _Copy] = OrderedDict()
"""By the address of their storages."""
_MAX_COPIES = 256


def is_copy_of(copy: Tensor, original: Tensor) -> Tensor:
    """Returns a copy; until it is written to, caches find for it what they know of the original."""
    if not (copy.is_inference() or original.is_inference()) and copy.stride() == original.stride():
        owners = [StorageWeakRef(t.untyped_storage()) for t in (copy, original)]
        address = storage_address(copy)
        with _caches_lock:
            _copies[address] = _Copy(_part(copy), owners[0], _part(original), owners[1])
            _copies.move_to_end(address)
            if len(_copies) > _MAX_COPIES:
                _copies.popitem(last=False)
    return copy


def _original(value: Tensor) -> _Copy | None:
    """What is known of a tensor that is a copy, and was not written to."""
    found = _copies.get(storage_address(value))
    if found is None or found.owner.expired() or found.of_owner.expired() or found.part != _part(value):
        return None
    return found


def _owner(value: Tensor) -> StorageWeakRef:
    """Keeps the address in the key of a tensor from being used again."""
    original = _original(value) if _copies else None
    return StorageWeakRef(value.untyped_storage()) if original is None else original.of_owner


class CacheInfo(NamedTuple):
    """What is remembered of graphs: see :func:`cache_info`.

    Attributes:
        entries: Graphs, and parts of them, that something is remembered of.
        bytes: Memory that it takes, on all devices.
        hits: How often something was found.
        misses: How often something was made: for a graph that is new, was changed or was forgotten.
    """

    entries: int
    bytes: int
    hits: int
    misses: int


_caches: weakref.WeakSet[IdentityCache] = weakref.WeakSet()
"""Those of all compiled models that are still there."""
_caches_lock = threading.Lock()


def _all() -> list[IdentityCache]:
    with _caches_lock:
        return list(_caches)


def cache_info() -> CacheInfo:
    """What compiled models remember of the graphs that they were called with: layouts, degrees, self loops.

    Each captured graph keeps at most ``options={"structure_cache_entries": n, "structure_cache_bytes": n}``; the least
    recently used goes first.
    """
    found = _all()
    return CacheInfo(
        sum(map(len, found)), sum(c.nbytes for c in found), sum(c.hits for c in found), sum(c.misses for c in found)
    )


def clear_cache() -> None:
    """Forgets what compiled models remember of graphs, and frees its memory; the next call with each makes it anew.

    Compiled code, recordings (and the structure that they replay with) and the folder of kernels stay.
    """
    for cache in _all():
        cache.clear()


def _after_fork() -> None:
    """A thread that is not there any more may have held a lock."""
    global _caches_lock
    _caches_lock = threading.Lock()
    for cache in list(_caches):
        cache._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
