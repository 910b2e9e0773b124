"""The marker of an operation with graphs of its own: ``nested(tensors, numbers, which)``.

It stands for a higher-order op (``autograd.Function``, a hook of a tensor, ``torch.cond``) while the passes work on the
graph around it, and makes way for that op afterwards (:mod:`gnncompile.capture.higher_order`). It is marked as
depending on chance, so that no pass shares it, moves it out of the step or drops it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from gnncompile.exc import InternalError
from gnncompile.ops.region import LIBRARY

LIBRARY.define(
    "nested(Tensor[] tensors, SymInt[] numbers, int which) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,)
)


@dataclass(frozen=True)
class Original:
    """What a marker stands for.

    Attributes:
        target: The higher-order op.
        leaves: Its arguments, flattened: :data:`TENSOR`, :data:`NUMBER`, a graph, or a constant.
        spec: How they are put together.
        results: What it returned while Dynamo traced: a fake tensor, or a sequence of these.
    """

    target: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    results: Any

    def arguments(self, tensors: Sequence[Any], numbers: Sequence[Any], graph: Callable[[Any], Any]) -> Any:
        """Arguments by position and by name, with a graph for each of :attr:`leaves` that is one."""
        tensor, number = iter(tensors), iter(numbers)

        def leaf(kind: Any) -> Any:
            if isinstance(kind, fx.GraphModule):
                return graph(kind)
            return next(tensor) if kind is TENSOR else next(number) if kind is NUMBER else kind

        return pytree.tree_unflatten([leaf(kind) for kind in self.leaves], self.spec)

    @property
    def is_single(self) -> bool:
        """Whether it returns one tensor."""
        return isinstance(self.results, Tensor)


TENSOR, NUMBER = object(), object()

known: dict[int, Original] = {}
"""Originals by the number of their markers, while the passes are at work."""

_numbers = itertools.count()


def remember(original: Original) -> int:
    """A number for the marker of an original."""
    which = next(_numbers)
    known[which] = original
    return which


def call(tensors: list[Tensor], numbers: list[Any], which: int) -> list[Tensor]:
    """Runs the original."""
    original = known[which]
    args, kwargs = original.arguments(tensors, numbers, lambda graph: graph)
    found = original.target(*args, **kwargs)
    return [found] if original.is_single else list(found)


def _fake(tensors: list[Tensor], numbers: list[Any], which: int) -> list[Tensor]:
    original = known[which]
    results = [original.results] if original.is_single else original.results
    return [torch.empty_strided(r.shape, r.stride(), dtype=r.dtype, device=r.device) for r in results]


def _never(*_: Any) -> Any:
    raise InternalError("a marker of a nested graph was run; it must make way for it first, please report it")


LIBRARY.impl("nested", _never, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::nested", _fake, lib=LIBRARY)
