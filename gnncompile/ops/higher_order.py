"""The marker of a higher-order op: ``nested(tensors, numbers, which)``.

The marker takes the place of a higher-order op (``autograd.Function``, a tensor's hook, ``torch.cond``) while the
passes rewrite the graph around it. Afterwards the op is put back (:mod:`gnncompile.capture.higher_order`). The marker
is tagged as random, so no pass merges two of them, moves one out of the step or drops one.
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
    """The call of a higher-order op that a marker stands for.

    Attributes:
        target: The higher-order op.
        leaves: The flattened arguments: each is :data:`TENSOR`, :data:`NUMBER`, a graph, or a constant.
        spec: The tree in which the arguments are nested.
        results: The op's result while Dynamo traced: a fake tensor, or a sequence of fake tensors.
    """

    target: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    results: Any

    def arguments(self, tensors: Sequence[Any], numbers: Sequence[Any], graph: Callable[[Any], Any]) -> Any:
        """The op's arguments, by position and by name.

        Args:
            tensors: The values of the leaves :data:`TENSOR`, in order.
            numbers: The values of the leaves :data:`NUMBER`, in order.
            graph: Returns the argument for a leaf that is a graph.
        """
        tensor, number = iter(tensors), iter(numbers)

        def leaf(kind: Any) -> Any:
            if isinstance(kind, fx.GraphModule):
                return graph(kind)
            return next(tensor) if kind is TENSOR else next(number) if kind is NUMBER else kind

        return pytree.tree_unflatten([leaf(kind) for kind in self.leaves], self.spec)

    @property
    def is_single(self) -> bool:
        """Whether the op returns one tensor, not a sequence."""
        return isinstance(self.results, Tensor)


TENSOR, NUMBER = object(), object()

known: dict[int, Original] = {}
"""Originals by the argument `which` of their markers, while the passes run."""

_numbers = itertools.count()


def remember(original: Original) -> int:
    """Registers an original, and returns the argument `which` of its marker."""
    which = next(_numbers)
    known[which] = original
    return which


def call(tensors: list[Tensor], numbers: list[Any], which: int) -> list[Tensor]:
    """Runs the original of a marker, and returns its results as a list."""
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
