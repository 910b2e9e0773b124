"""Runs the backward of a compiled model on a GPU in the thread that asks for the backward.

Autograd runs nodes that work on a GPU in a thread of its own, one per GPU. To wake that thread, and at the end the
asking thread, takes longer than all launches of a small step. ``torch.autograd.set_multithreading_enabled(False)``
turns this off for the thread that calls it. Here it is off while there is a result of a compiled model in this thread
whose backward may come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.cudagraphs import native

_KEY = "gnncompile: its backward may come"


class _Thread:
    """The backwards that one thread waits for.

    Attributes:
        waiting: The ids of objects that :func:`in_caller` has left at autograd nodes that are alive.
        ours: Whether this class turned multithreading off, and not the user.
    """

    def __init__(self) -> None:
        self.identity, self.waiting, self.ours = threading.get_ident(), set[int](), False

    def begin(self, awaited: int) -> None:
        self.waiting.add(awaited)
        if torch.autograd.is_multithreading_enabled():
            torch.autograd.set_multithreading_enabled(False)
            self.ours = True

    def end(self, awaited: int) -> None:
        self.waiting.discard(awaited)
        # In a backward, torch would undo the setting at the end. For another thread, the setting can't be changed.
        here = self.identity == threading.get_ident() and not _compat.in_backward()
        if self.ours and here and not self.waiting:
            torch.autograd.set_multithreading_enabled(True)
            self.ours = False

    def hand_over(self, module: ModuleType) -> None:
        """Lets the C++ code count from now on. It also turns multithreading on again if this class turned it off."""
        if self.ours:
            self.ours = False
            module.Awaited.take_over()


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


class _Awaited:
    """A backward that may come. It ends with the autograd node that the backward would run."""

    __slots__ = ("_thread",)

    def __init__(self, thread: _Thread) -> None:
        self._thread = thread
        thread.begin(id(self))

    def __del__(self) -> None:
        self._thread.end(id(self))


_local = _Local()


def in_caller(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled graph whose results have their backward run in the thread that asks for it.

    This applies to results on a GPU.
    """

    def call(*args: Any) -> Any:
        made = run(*args)
        await_backward(made)
        return made

    return call


def await_backward(made: Iterable[Any]) -> None:
    """Makes the backward of results run in the thread that asks for it, if the results are on a GPU."""
    for one in made:
        node: Any = one.grad_fn if isinstance(one, Tensor) else None
        if node is not None and has_thread(one):
            if not _compat.in_backward():
                module = native.module()  # it also counts the backwards of recordings
                if module is None:
                    node.metadata[_KEY] = _Awaited(_local.thread)
                else:
                    hand_over(module)
                    node.metadata[_KEY] = module.Awaited()
            return


def hand_over(module: ModuleType) -> None:
    """Lets the C++ code count the backwards of this thread."""
    _local.thread.hand_over(module)


def has_thread(tensor: Tensor) -> bool:
    """Whether autograd has a thread of its own for nodes on the device of a tensor."""
    return tensor.is_cuda
