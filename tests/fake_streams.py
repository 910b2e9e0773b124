"""Streams of a device that has none: every operation runs at once, and the rule of :mod:`gnncompile.layout.streams` is
checked. A tensor is read on the stream that it was made on, or is recorded on the stream that reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnncompile import _compat
from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.device import device_of
from gnncompile.layout import streams

MODULES = (
    "gnncompile.batches.device_loader", "gnncompile.batches.loader", "gnncompile.batches.memories",
    "gnncompile.layout.streams", "gnncompile.sampling.ahead", "gnncompile.sampling.drawing",
)  # fmt: skip
"""The modules that ask whether a device has streams, and are told so."""


class Event:
    """An event, with the work of its stream so far."""

    def __init__(self, **_: Any) -> None:
        self.after: set[int] = set()

    def record(self, stream: Stream) -> None:
        self.after = set(stream.done)

    def synchronize(self) -> None:
        """All work runs at once."""


class Stream:
    """A stream: `done` has the numbers of the operations that it has run or waited for."""

    def __init__(self, name: str) -> None:
        self.name, self.done = name, set[int]()

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.done |= event.after

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def synchronize(self) -> None:
        """All work runs at once."""

    def __repr__(self) -> str:
        return self.name


class Streams(TorchDispatchMode):
    """The streams, and what is known of each memory: its stream, the last operation that wrote to it, its readers.

    Attributes:
        side: The stream on which loaders copy and sample ahead.
        now: The current stream.
        problems: The operations that broke the rule.
        of_side: The operations that have read memory of the side stream, which the side stream has to wait for.
        seen_by_host: The operations that the host has waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.side, self._first, self._thread = Stream("side"), Stream("first"), threading.local()
        self.problems: list[str] = []
        self.owners: dict[int, Stream] = {}
        self.readers: dict[int, set[Stream]] = {}
        self.written: dict[int, int] = {}
        self.host: set[int] = set()
        self.number = 0
        self.kept: list[Any] = []
        self.of_side, self.seen_by_host = set[int](), set[int]()

    @property
    def now(self) -> Stream:
        return getattr(self._thread, "now", self._first)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._thread.now = self.now, stream
        try:
            yield
        finally:
            self._thread.now = before

    def read(self, what: str, tensors: list[Tensor], writes: list[Tensor]) -> None:
        """Notes an operation on the current stream, and checks the tensors that were there before."""
        self.number += 1
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            owner = self.owners.get(key)
            if owner is None or key in self.host or not tensor.numel():
                continue
            if owner is self.side and owner is not self.now:
                self.of_side.add(self.number)
            elif owner is not self.now and self.now not in self.readers.get(key, ()):
                self.problems.append(f"{what}: {list(tensor.shape)} of {owner} is not recorded on {self.now}")
            if self.written.get(key, 0) not in {*self.now.done, *self.seen_by_host, 0}:
                self.problems.append(f"{what}: {self.now} does not wait for {list(tensor.shape)} of {owner}")
        for tensor in writes:
            self.written[tensor.untyped_storage()._cdata] = self.number
        self.now.done.add(self.number)

    def own(self, tensor: Tensor) -> int:
        """Notes that a tensor was made on the current stream. Returns the key of its memory."""
        key = tensor.untyped_storage()._cdata
        self.owners[key] = self.now
        self.kept.append(_compat.StorageWeakRef(tensor.untyped_storage()))  # so that no other storage gets the key
        return key

    def record(self, tensor: Tensor, stream: Stream) -> None:
        self.readers.setdefault(tensor.untyped_storage()._cdata, set()).add(stream)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pins = kwargs.pop("pin_memory", None)
        result = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in given}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        new = [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
        for tensor in new:
            key = self.own(tensor)
            self.readers.pop(key, None)
            (self.host.add if pins else self.host.discard)(key)
        written = [
            leaf
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]
        if torch.Tag.inplace_view not in func.tags and not func.is_view and not str(func).startswith("aten.detach"):
            out = [value for value in tree_leaves(kwargs.get("out")) if isinstance(value, Tensor)]
            self.read(str(func), given, [*new, *written, *out])
        if func is torch.ops.aten._local_scalar_dense.default:  # the host waits for a number
            self.seen_by_host |= self.now.done
        return result


def install(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Gives the CPU streams, until the test ends. The result is a context manager that checks the rule."""
    fake = Streams()
    real = functools.lru_cache(lambda place: dataclasses.replace(device_of(place), has_streams=True))
    for module in MODULES:
        monkeypatch.setattr(f"{module}.device_of", real)
    for name, value in {
        "current_stream": lambda *_: fake.now,
        "default_stream": lambda *_: fake.now,
        "stream": fake.on,
        "Event": Event,
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("zeros", "empty"):
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, functools.partial(_unpinned, fake, plain))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: fake.record(self, stream))
    monkeypatch.setattr(streams, "copying", lambda _: fake.side)
    monkeypatch.setattr("gnncompile.batches.loader.copying", lambda _: fake.side)
    monkeypatch.setattr(_compat, "current_stream", lambda _: id(fake.now))
    launch = Kernel.__call__

    def watched(self: Kernel, programs: int, tensors: Any, *more: Any) -> None:
        given = list(tensors)
        fake.read(getattr(self._kernel, "__name__", "a kernel"), given, [])  # what a kernel writes is not known
        with torch.utils._python_dispatch._disable_current_modes():
            launch(self, programs, tensors, *more)

    monkeypatch.setattr(Kernel, "__call__", watched)
    return fake


def _unpinned(fake: Streams, make: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    """Makes a tensor. This machine may have no memory to pin, so it is only noted that the host owns the tensor."""
    made: Tensor = make(*args, **kwargs)
    if pin_memory:
        fake.host.add(made.untyped_storage()._cdata)
    return made
