"""Copies of small matrices that share a launch, for passes after differentiation."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import fx

from gnncompile.codegen.matrix_view import View
from gnncompile.passes.analysis import own, value

LARGEST = 2**18
"""The most elements of a tensor in memory that is copied. A copy of a larger one takes longer than its launch."""
_MOST = 16
"""The most copies of one launch."""


class Copy(NamedTuple):
    """A copy of a view.

    Attributes:
        root: The node whose memory is read.
        view: The view of its memory.
        dtype: The dtype of the copy.
    """

    root: fx.Node
    view: View
    dtype: torch.dtype


def insert(graph: fx.Graph, copies: Iterable[Copy], place: fx.Node) -> dict[Copy, fx.Node]:
    """Inserts calls that make copies before the node `place`. Returns the node of each copy that is made.

    A copy that no other one shares a launch with is not made, since that would save nothing.
    """
    made: dict[Copy, fx.Node] = {}
    for group in _groups(list(dict.fromkeys(copies))):
        made.update(_insert(graph, group, place))
    return made


def _groups(copies: list[Copy]) -> list[list[Copy]]:
    """Returns the copies that share a launch."""
    found = []
    for kind in dict.fromkeys((copy.dtype, value(copy.root).device) for copy in copies):
        alike = [copy for copy in copies if (copy.dtype, value(copy.root).device) == kind]
        found += [alike[at : at + _MOST] for at in range(0, len(alike), _MOST)]
    return [group for group in found if len(group) > 1]


def _insert(graph: fx.Graph, group: list[Copy], place: fx.Node) -> dict[Copy, fx.Node]:
    made = {}
    with graph.inserting_before(place):
        numbers = [number for copy in group for number in copy.view]
        call = graph.call_function(own.matrix_copies.default, ([copy.root for copy in group], numbers, group[0].dtype))
        call.meta["val"] = [value(copy.root).new_empty(copy.view[:2], dtype=copy.dtype) for copy in group]
        for k, copy in enumerate(group):
            made[copy] = graph.call_function(operator.getitem, (call, k))
            made[copy].meta["val"] = call.meta["val"][k]
    return made
