"""Moves pure operations to an earlier place in the graph."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from torch import fx

from gnncompile.passes.analysis import mutates


def to_move(
    nodes: Iterable[fx.Node], place: fx.Node, fixed: Set[fx.Node], written: Set[fx.Node]
) -> list[fx.Node] | None:
    """Returns what must move before `place`, in order, so that `nodes` are known there. None if something can't move.

    Args:
        nodes: The nodes.
        place: The place.
        fixed: Nodes that stay. What depends on them can't move.
        written: Nodes that are written to in place. They, and what reads them, stay.
    """
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node in fixed:
            return None
        if node in found or node < place:
            continue
        if not _movable(node) or any(n in written for n in (node, *node.all_input_nodes)):
            return None
        found.add(node)
        todo.extend(node.all_input_nodes)
    return sorted(found)


def _movable(node: fx.Node) -> bool:
    """Whether a node is known to give the same result at an earlier place: a pure operation without randomness."""
    target = node.target
    if node.op != "call_function" or mutates(node) or node.is_impure():
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", "") == "_operator"
    return torch.Tag.nondeterministic_seeded not in target.tags
