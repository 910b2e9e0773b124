"""Which parts of a kept layout regions read, and how, in a package for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gnncompile.serving.program import Captured, layout_of

_REGIONS = (torch.ops.gnncompile.region.default, torch.ops.gnncompile.region_kernel.default)


@dataclass(frozen=True)
class Walked:
    """A layout that regions walk.

    Attributes:
        rowptr: The position of its rowptr among the tensors of the graph's structure.
        col: The position of its col.
    """

    rowptr: int
    col: int


def walked(captured: Captured) -> list[Walked]:
    """Returns the layouts that the regions of a captured graph walk, each once."""
    places = _places(captured)
    found: dict[Walked, None] = {}
    for node in _regions(captured):
        rowptr, col = (places.get(one) for one in node.args[1][:2])
        if rowptr is not None and col is not None and all(rowptr != one.rowptr for one in found):
            found[Walked(rowptr, col)] = None
    return list(found)


def guarded(captured: Captured) -> list[int]:
    """Returns the positions of the tensors of the layout that must not be read if they belong to another graph.

    Regions read the columns and numbers of edges only as far as the rowptr tells. Floats are no positions.
    """
    places = _places(captured)
    harmless: dict[fx.Node, int] = {}
    for node in _regions(captured):
        layout: Sequence[Any] = node.args[1]
        for at, one in enumerate(layout):
            rowptr = layout[at - at % 3]
            harmless[one] = harmless.get(one, 0) + (one is not rowptr and rowptr in places)
    given = layout_of(captured)[0]
    found = [
        at for node, at in places.items() if not given[at].is_floating_point() and _uses(node) > harmless.get(node, 0)
    ]
    # The comparison of the seal must have a result that something reads.
    return found or list(range(len(given)))


def _uses(node: fx.Node) -> int:
    """Returns how often other nodes read a node."""
    found = 0
    for user in node.users:
        arguments: list[Any] = []
        fx.map_arg((user.args, user.kwargs), arguments.append)
        found += arguments.count(node)
    return found


def _regions(captured: Captured) -> list[Any]:
    return [node for node in captured.rest.graph.nodes if node.target in _REGIONS]


def _places(captured: Captured) -> dict[fx.Node, int]:
    """Returns the position in the layout of each node that stands for a tensor of the layout."""
    placeholders = [node for node in captured.rest.graph.nodes if node.op == "placeholder"]
    return {node: at for at, node in enumerate(placeholders[len(captured.sources) :])}
