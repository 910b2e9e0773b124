"""Caches results that were made from tensors, by the identity and version of the tensors.

An in-place change raises the version counter of a tensor and is noticed. Freed memory that is used again is another
storage object, and is noticed. So is other memory under the same tensor. Changes without the counter are not noticed:
``tensor.data.add_()``, a NumPy view, or another process that shares the memory.

A tensor that is never written to has a name instead (:func:`never_written`), which is found in less time.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from gnncompile._compat import StorageWeakRef, storage_address
from gnncompile.forks import after_fork
from gnncompile.layout.side_table import SideTable
from gnncompile.layout.streams import Ordered

Key = tuple[Any, ...]


class _Name:
    """Stands for a tensor in keys.

    Attributes:
        met: The ids of the caches that made a result for the tensor without keeping it.
    """

    __slots__ = ("met",)

    def __init__(self) -> None:
        self.met: set[int] = set()


_names: SideTable[_Name] = SideTable()
"""The names of tensors that are never written to."""
_Owner = StorageWeakRef | weakref.ref[Tensor]
"""A reference that tells whether a tensor was freed."""


def never_written(tensor: Tensor) -> Tensor:
    """Returns a tensor, whose values must not change from now on. Caches know it by itself, not by its memory."""
    _names.set(tensor, _Name())
    return tensor


Kept = tuple[Sequence[Any], list[Tensor]]
"""A result, after the inputs that it was made from."""


class _Thread(threading.local):
    """What :func:`keeping` collects in this thread.

    Attributes:
        kept: The results that caches returned, each with its inputs; None outside of :func:`keeping`.
        added: The entries that were added to caches, each with its cache.
    """

    def __init__(self) -> None:
        self.kept: list[Kept] | None = None
        self.added: list[tuple[IdentityCache, _Entry]] = []


_thread = _Thread()


@contextmanager
def keeping() -> Iterator[list[Kept]]:
    """A context manager: collects the results that caches return in this thread, each with its inputs.

    A caller may need the results for longer than the caches keep them. If the block raises, the caches forget what was
    made inside: a capture that fails has recorded the work that makes these results, but nothing has run it.
    """
    outer = _thread.kept, _thread.added
    kept: list[Kept] = []
    added: list[tuple[IdentityCache, _Entry]] = []
    _thread.kept, _thread.added = kept, added
    try:
        yield kept
    except BaseException:
        for cache, entry in added:
            cache.forget(entry)
        added.clear()
        raise
    finally:
        _thread.kept, _thread.added = outer
        if _thread.kept is not None:
            _thread.added += added


_LOOKED_AT = 4
"""The number of entries that are checked whenever an entry is added.

It is above 1, so that entries can be dropped faster than they are added: mini-batches come often.
"""

_UNREAD = 16
"""After this many results that were read by nobody, a result is kept when it is made for the second time.

If each call has a new graph, that saves the time to add entries and to drop them, and their memory. One result that is
read again ends it.
"""


class _Entry(NamedTuple):
    """One cached result.

    Attributes:
        key: The key of the inputs.
        owners: References that keep the addresses in the key from being used again, and tell of freed tensors.
        made: The resulting tensors.
        size: The size of the tensors in bytes.
        order: Lets streams wait for the tensors, other than the stream on which they were made.
    """

    key: Key
    owners: list[_Owner]
    made: list[Tensor]
    size: int
    order: Ordered | None


class IdentityCache:
    """A cache bounded in entries and bytes.

    The least recently used entry goes first; entries of freed tensors are dropped.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.hits, self.misses = 0, 0
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._nbytes = 0
        self._unread = 0
        self._lock = threading.Lock()
        self._last: _Entry | None = None
        with _caches_lock:
            _caches.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """The size of all cached tensors in bytes."""
        return self._nbytes

    def clear(self) -> None:
        """Drops all entries."""
        with self._lock:
            self._entries.clear()
            self._nbytes = 0
            self._last = None

    def forget(self, entry: _Entry) -> None:
        """Drops one entry, if it is still there."""
        with self._lock:
            if self._entries.get(entry.key) is entry:
                self._drop(entry.key)

    def get(self, inputs: Sequence[Any], make: Callable[..., list[Tensor]]) -> list[Tensor]:
        """Returns the cached result of ``make(*inputs)`` for these tensors and numbers, or calls `make` now."""
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
        self._unread = 0
        if entry.order is not None:
            entry.order.follow()
        return entry.made

    def _make(self, key: Key | None, inputs: Sequence[Any], make: Callable[..., list[Tensor]]) -> list[Tensor]:
        self.misses += 1
        if self._unread >= _UNREAD and key is not None and self._meets_first(key):
            if self._entries and self.misses % _LOOKED_AT == 0:
                with self._lock:  # a few entries at a time, and all in turn
                    self._drop_freed(self.misses % max(len(self._entries), 1))
            return make(*inputs)
        # References first: while they are held nothing else can get these addresses.
        owners = [_owner(v) for v in inputs if isinstance(v, Tensor)]
        made = make(*inputs)
        # Another thread may have changed an input by now. The result then belongs to neither value, and is not cached.
        if key is not None and identify(inputs) == key:
            entry = _Entry(key, owners, made, sum([t.nbytes for t in made]), Ordered.after(made))
            with self._lock:
                if key in self._entries:  # another thread has made it as well
                    self._drop(key)
                self._entries[key] = self._last = entry
                self._nbytes += entry.size
                self._unread += 1
                self._trim()
            if _thread.kept is not None:
                _thread.added.append((self, entry))
        return made

    def _meets_first(self, key: Key) -> bool:
        """Whether this is the first result for a tensor that has a name, and remembers now that it was met."""
        for part in key:
            if type(part) is _Name:
                is_first = id(self) not in part.met
                part.met.add(id(self))
                return is_first
        return False

    def _drop_freed(self, first: int) -> None:
        """Drops entries of freed tensors among a few entries, from the one at a position on."""
        for key, entry in list(islice(self._entries.items(), first, first + _LOOKED_AT)):
            if any(map(_is_freed, entry.owners)):
                self._drop(key)

    def _trim(self) -> None:
        """Drops entries of freed tensors, a few at a time, then the least recently used entries beyond the bounds."""
        self._drop_freed(0)
        while len(self._entries) > 1 and (len(self._entries) > self.max_entries or self._nbytes > self.max_bytes):
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._nbytes -= entry.size
        if self._last is entry:
            self._last = None


def identify(inputs: Sequence[Any]) -> Key | None:
    """Returns a key that no other tensors can have while the storages of these are referenced, weakly or not.

    Returns None if a tensor has no version counter (made under ``torch.inference_mode``).
    """
    parts: list[Any] = []
    for value in inputs:
        if not isinstance(value, Tensor):
            parts.append(value)
            continue
        name = _names.get(value)
        if name is not None:
            parts.append(name)
            continue
        if value.is_inference():
            return None
        original = _original(value) if _copies else None
        parts.append(_part(value) if original is None else original.of_part)
    return tuple(parts)


def _part(value: Tensor) -> Key:
    return storage_address(value), value._version, value.storage_offset(), value.shape, value.stride(), value.dtype


class _Copy(NamedTuple):
    """A copy and its original: the key part of each, and a reference to the storage of each."""

    part: Key
    owner: StorageWeakRef
    of_part: Key
    of_owner: StorageWeakRef


_copies: OrderedDict[int, _Copy] = OrderedDict()
"""Copies, by the address of their storages."""
_MAX_COPIES = 256


def is_copy_of(copy: Tensor, original: Tensor) -> Tensor:
    """Returns a copy. Until the copy is written to, caches return for it the results for the original."""
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
    """Returns the entry of a tensor that is a copy; None if it is no copy, or was written to."""
    found = _copies.get(storage_address(value))
    if found is None or found.owner.expired() or found.of_owner.expired() or found.part != _part(value):
        return None
    return found


def _owner(value: Tensor) -> _Owner:
    """Returns a reference that keeps the address in the key of a tensor from being used again."""
    if _names.get(value) is not None:
        return weakref.ref(value)
    original = _original(value) if _copies else None
    return StorageWeakRef(value.untyped_storage()) if original is None else original.of_owner


def _is_freed(owner: _Owner) -> bool:
    return owner.expired() if isinstance(owner, StorageWeakRef) else owner() is None


class Seen:
    """Remembers which tensors were seen, by identity and version. It keeps no memory alive.

    Args:
        most: The most tensors that are remembered, at least one. The least recently seen one is forgotten first.
    """

    def __init__(self, most: int) -> None:
        self._most = max(most, 1)
        self._owners: OrderedDict[Key, _Owner] = OrderedDict()

    def add(self, value: Tensor) -> bool:
        """Remembers a tensor. Returns whether it is new."""
        key = identify((value,))
        if key is None:
            return True
        known = self._owners.pop(key, None)
        # The reference keeps the address in the key from being used again.
        self._owners[key] = _owner(value) if known is None else known
        if len(self._owners) > self._most:
            with suppress(KeyError):  # other threads may have dropped all others
                self._owners.popitem(last=False)
        return known is None


class CacheInfo(NamedTuple):
    """The state of the caches of graph structure: see :func:`cache_info`.

    Attributes:
        entries: The number of graphs, and of parts of graphs, with a cached result.
        bytes: The memory of the cached results, on all devices.
        hits: The number of calls that found a cached result.
        misses: The number of calls that made a result: for a graph that is new, was changed or was forgotten.
    """

    entries: int
    bytes: int
    hits: int
    misses: int


_caches: weakref.WeakSet[IdentityCache] = weakref.WeakSet()
"""The caches of all compiled models that are alive."""
_caches_lock = threading.Lock()


def _all() -> list[IdentityCache]:
    with _caches_lock:
        return list(_caches)


def cache_info() -> CacheInfo:
    """Returns the state of compiled models' caches of graph structure: layouts, degrees, self loops.

    Each captured graph keeps at most ``options={"structure_cache_entries": n, "structure_cache_bytes": n}``; the least
    recently used entry goes first.
    """
    found = _all()
    return CacheInfo(
        sum(map(len, found)), sum(c.nbytes for c in found), sum(c.hits for c in found), sum(c.misses for c in found)
    )


def clear_cache() -> None:
    """Drops all cached graph structure of compiled models, and frees its memory.

    The next call with each graph makes it anew.

    Compiled code, recordings (and the structure that they replay with) and the folder of kernels stay.
    """
    for cache in _all():
        cache.clear()


@after_fork
def _after_fork() -> None:
    """Replaces the locks. A thread that does not exist in the child process may have held a lock."""
    global _caches_lock
    _caches_lock = threading.Lock()
    for cache in list(_caches):
        cache._lock = threading.Lock()
        cache._nbytes = sum(entry.size for entry in cache._entries.values())
