"""The backward of a compiled model on a GPU runs in the thread that asks for it.

Autograd gives nodes that work on a GPU to a thread of its own, one per GPU. To wake that one, and at the end the one
that asked, takes longer than all launches of a small step. ``torch.autograd.set_multithreading_enabled(False)`` turns
this off for the thread that calls it; here it is off as long as there is a result of a compiled model in this thread
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
    """What one thread waits for.

    Attributes:
        waiting: Identities of what :func:`in_caller` has left at nodes that are alive.
        ours: Whether it was turned off here, and not by the user.
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
        # In a backward, torch would undo it at its end; of another thread it can't be set.
        here = self.identity == threading.get_ident() and not _compat.in_backward()
        if self.ours and here and not self.waiting:
            torch.autograd.set_multithreading_enabled(True)
            self.ours = False

    def hand_over(self, module: ModuleType) -> None:
        """From now on the code in C++ counts, and turns on what was turned off here."""
        if self.ours:
            self.ours = False
            module.Awaited.take_over()


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


class _Awaited:
    """One backward that may come; ends with the node that would be run."""

    __slots__ = ("_thread",)

    def __init__(self, thread: _Thread) -> None:
        self._thread = thread
        thread.begin(id(self))

    def __del__(self) -> None:
        self._thread.end(id(self))


_local = _Local()


def in_caller(run: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph, the backward of whose results runs in the thread that asks for it, if they are on a GPU."""

    def call(*args: Any) -> Any:
        made = run(*args)
        await_backward(made)
        return made

    return call


def await_backward(made: Iterable[Any]) -> None:
    """Has the backward of results run in the thread that asks for it, if they are on a GPU."""
    for one in made:
        node: Any = one.grad_fn if isinstance(one, Tensor) else None
        if node is not None and has_thread(one):
            if not _compat.in_backward():
                module = native.module()  # what recordings count is counted there
                if module is None:
                    node.metadata[_KEY] = _Awaited(_local.thread)
                else:
                    hand_over(module)
                    node.metadata[_KEY] = module.Awaited()
            return


def hand_over(module: ModuleType) -> None:
    """Leaves it to the code in C++ to count, in this thread."""
    _local.thread.hand_over(module)


def has_thread(tensor: Tensor) -> bool:
    """Whether autograd has a thread for nodes that work where a tensor is."""
    return tensor.is_cuda
