"""Which parts of a kept layout regions read, and how, in a package for a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gnncompile.ir.region import parse
from gnncompile.serving.program import Captured, layout_of

_REGIONS = (torch.ops.gnncompile.region.default, torch.ops.gnncompile.region_kernel.default)


@dataclass(frozen=True)
class HubList:
    """A list of hubs that regions read.

    Attributes:
        rowptr: The position of the rowptr in the layout.
        col: The position of the col.
        fewest: The fewest pieces of a large hub.
    """

    rowptr: int
    col: int
    fewest: int


def hub_lists(captured: Captured) -> list[HubList]:
    """Returns the lists of hubs that the regions of a captured graph read, each once.

    The edges per row are those of the captured call, as for the tiles of regions.
    """
    from gnncompile.codegen.triton.sized import read_lists

    sizes = [one.size(0) for one in layout_of(captured)[0]]
    found: dict[HubList, None] = {}
    for layout, spec in _walks(captured):
        if layout[0] is None or layout[1] is None:
            continue
        rows, edges = sizes[layout[0]] - 1, sizes[layout[1]]
        degree = edges // rows if rows > 0 else 0
        found |= {HubList(layout[0], layout[1], fewest): None for fewest in sorted(read_lists(parse(spec), degree))}
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


def _walks(captured: Captured) -> Iterator[tuple[list[int | None], str]]:
    """Yields the positions of the layout that each region walks, None for other tensors, and the region."""
    places = _places(captured)
    for node in _regions(captured):
        layout: Sequence[Any] = node.args[1]
        yield [places.get(one) for one in layout[:3]], str(node.args[2])


def _regions(captured: Captured) -> list[Any]:
    return [node for node in captured.rest.graph.nodes if node.target in _REGIONS]


def _places(captured: Captured) -> dict[fx.Node, int]:
    """Returns the position in the layout of each node that stands for a tensor of the layout."""
    placeholders = [node for node in captured.rest.graph.nodes if node.op == "placeholder"]
    return {node: at for at, node in enumerate(placeholders[len(captured.sources) :])}
