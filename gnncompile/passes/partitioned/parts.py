"""What is known of a graph that runs over one part: its exchange plans, and the space of each index."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import aten, is_tensor, own, value

REMEDY = "Leave it out of the compiled model, or run the model in one process."


class Space(Enum):
    """What the entries of an index name."""

    OWN = "rows of own nodes"
    SEVERAL = "rows of a table with several rows for each own node"
    SELECTED = "local rows that a mask selects"


@dataclass(frozen=True)
class Halo:
    """The space of own rows, then halo rows, of one node type.

    Attributes:
        send: The input that holds :attr:`gnncompile.layout.halo.HaloPlan.send`.
        halo: The input that holds :attr:`gnncompile.layout.halo.HaloPlan.halo`.
        times: The number of rows of each node, as in a table with a row per node and relation.
    """

    send: fx.Node
    halo: fx.Node
    times: int = 1


@dataclass
class Parts:
    """The partition that a captured graph runs over.

    Attributes:
        group: The name of the process group.
        size: The number of processes.
        sources: By the sources of an edge list, the halo of their node type.
        destinations: The destinations of edge lists.
    """

    group: str
    size: int
    sources: dict[fx.Node, Halo] = field(default_factory=dict)
    destinations: set[fx.Node] = field(default_factory=set)

    def space(self, node: Any) -> Halo | Space | None:
        """Returns what an index names: own rows and a halo, a space of rows, or None if it is unknown."""
        if not is_tensor(node) or value(node).is_floating_point():
            return None
        if node in self.sources:
            return self.sources[node]
        if node in self.destinations:
            return Space.OWN
        if node.op != "call_function":
            return None
        if node.target in _COUNTS:
            starts = node.target is aten.arange.default or node.args[0] == 0
            starts = starts and (node.target is not aten.arange.start_step or node.args[2:] in ((), (1,)))
            return Space.OWN if starts and isinstance(value(node).shape[0], torch.SymInt) else None
        if node.target is aten.nonzero.default:
            return Space.SELECTED
        if node.target is aten.cat.default:
            return _joined([self.space(part) for part in node.args[0]])
        if node.target in _SAME:
            return self.space(node.args[0])
        computes = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _CHOICES
        if computes and value(node).dtype != torch.bool:
            return self._computed(node)
        return None

    def _computed(self, node: fx.Node) -> Halo | Space | None:
        """Returns the space of an index that is computed from others, as ``source * relations + relation`` is."""
        args: Any = node.args
        found = {space for n in node.all_input_nodes if (space := self.space(n)) is not None}
        space = found.pop() if len(found) == 1 else None
        if space in (None, Space.SELECTED) or value(node).dtype not in (torch.int64, torch.int32):
            return None
        if node.target is aten.mul.Tensor and isinstance(args[1], int) and args[1] > 0:
            return replace(space, times=space.times * args[1]) if isinstance(space, Halo) else Space.SEVERAL
        several = space.times > 1 if isinstance(space, Halo) else space is Space.SEVERAL
        if node.target is aten.add.Tensor and several and self.space(args[0]) == space and not node.kwargs:
            return None if self.space(args[1]) == space else space  # one of the rows of the node
        if node.target is aten.clamp.default and space is Space.SEVERAL:
            to_table = args[1] == 0 and len(args) > 2 and isinstance(args[2], fx.Node)
            return space if to_table else None  # a row that is out of range raises an error elsewhere
        return space if node.target in _CHOICES else None


_CHOICES = {aten.where.self, aten.where.ScalarOther}
"""Operations that put a number without a row in place of some entries."""

_COUNTS = {aten.arange.default, aten.arange.start, aten.arange.start_step}

_SAME = {
    own.mark_dead.default,
    own.live_edges.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.to.dtype,
    aten.to.device,
    aten._to_copy.default,
    aten.lift_fresh.default,
    aten.view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.repeat.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.index_select.default,
}
"""Operations whose result has entries of the first argument."""


def _joined(spaces: list[Halo | Space | None]) -> Halo | Space | None:
    found = set(spaces)
    if len(found) == 1:
        return spaces[0]
    halos = found - {Space.OWN}
    if len(halos) == 1 and isinstance(one := next(iter(halos)), Halo):
        return one  # own rows come first in the numbering of a halo
    return None
