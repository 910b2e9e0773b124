"""The two models of a package whose caller keeps the layout of a graph: one returns the layout, the other takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from gnncompile._compat.aoti import Sealed
from gnncompile.exc import ArgumentError, CaptureError
from gnncompile.ops.launch import launch
from gnncompile.serving.program import Program
from gnncompile.serving.read_layout import Walked

LAYOUT, WITH_LAYOUT = "layout", "with_layout"
"""The names of the two models in a package."""

_own = torch.ops.gnncompile


class Layout(nn.Module):
    """Takes the model's arguments, and returns the layout of their graph: a seal, and the tensors of the layout.

    The seal is a number that depends on the graph and on the tensors.

    Args:
        program: The captured model, traced with `only_structure`.
        walked: The layouts that regions walk on a GPU. The lists of their hubs are kept as well.
    """

    def __init__(self, program: Program, walked: Sequence[Walked] = ()) -> None:
        super().__init__()
        self.program, self.walked = program, walked

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Returns the seal ``[1]`` (int64), and the tensors of the layout."""
        leaves = pytree.tree_leaves((args, kwargs))
        self.program.check_sizes(leaves)
        tensors = self.program.layout(leaves)
        tensors += [one for which in self.walked for one in _lists(tensors[which.rowptr], tensors[which.col])]
        return [_seal(self.program, leaves, tensors), *tensors]


def _lists(rowptr: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    from gnncompile.codegen.triton.hub_lists import list_exact_hubs

    return list_exact_hubs(rowptr, col.size(0), launch)


class WithLayout(nn.Module):
    """Takes a layout and the model's arguments, and returns the model's results.

    Args:
        program: The captured model.
        guarded: On a GPU, the positions of tensors of the layout that must not be read if they belong to another graph.
            On a CPU None: the package compares the seal before it runs the model.
        walked: The layouts that regions walk on a GPU. The lists of their hubs are at the end of the kept layout.
    """

    def __init__(self, program: Program, guarded: Sequence[int] | None, walked: Sequence[Walked] = ()) -> None:
        super().__init__()
        self.program, self.guarded, self.walked = program, guarded, walked

    def forward(self, layout: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Computes the model's results without sorting an edge."""
        leaves = pytree.tree_leaves((args, kwargs))
        self.program.check_sizes(leaves)
        expected, *kept = layout
        # Only their shapes are read, so the trace drops the operations that make them.
        made = self.program.layout(leaves)
        if self.guarded is not None:
            kept = self._safe(leaves, kept, made, expected, self.guarded)
        given = [one.as_strided(shaped.shape, shaped.stride()) for one, shaped in zip(kept, made, strict=False)]
        for which, hubs, pieces in zip(self.walked, kept[len(made) :: 2], kept[len(made) + 1 :: 2], strict=True):
            given[which.rowptr] = _own.with_hubs(given[which.rowptr], hubs, pieces)
        return self.program.results_of(leaves, given)

    def _safe(
        self,
        leaves: Sequence[Any],
        layout: Sequence[Tensor],
        made: Sequence[Tensor],
        expected: Tensor,
        guarded: Sequence[int],
    ) -> list[Tensor]:
        """Returns the tensors of a layout, those of a graph without edges if the layout belongs to another graph."""
        sizes = [[size for one in tensors for size in one.shape] for tensors in (layout[: len(made)], made)]
        kept = list(_own.same_sizes(layout, *sizes))
        tensors, numbers = _sealed(self.program, leaves, kept)
        copied = {at: 0 for at in guarded}
        for at in range(len(made), len(layout), 2):
            copied |= {at: 0, at + 1: -1}  # no hub has a piece, and no piece a hub
        first = len(tensors) - len(kept)
        places, fills = [first + at for at in copied], list(copied.values())
        for at, one in zip(copied, _own.same_or_empty(tensors, numbers, expected, places, fills), strict=True):
            kept[at] = one
        return kept


def _sealed(program: Program, leaves: Sequence[Any], layout: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Returns the tensors and the sizes of the seal of a layout and of the graph of a call."""
    read, sizes = program.structural_parts()
    return [*(leaves[at] for at in read), *layout], [leaves[at].size(axis) for at, axis in sizes]


def _seal(program: Program, leaves: Sequence[Any], layout: Sequence[Tensor]) -> Tensor:
    sealed: Tensor = _own.seal(*_sealed(program, leaves, layout))
    return sealed


def sealed_inputs(program: Program, count: int) -> Sealed:
    """Returns which inputs of :class:`WithLayout` its seal depends on.

    Args:
        program: The captured model.
        count: The number of tensors of the layout, without the seal.
    """
    read, sizes = program.structural_parts()
    first = 1 + count
    tensors = (*(first + at for at in read), *range(1, first))
    return Sealed(0, tensors, tuple((first + at, axis) for at, axis in sizes))


def refuse_to_keep(program: Program) -> None:
    """Raises ArgumentError if the model has no layout to keep."""
    if program.structure is None:
        raise ArgumentError(
            "keep_layout: the model sorts no edges, so there is no layout to keep. Leave the argument out."
        )


def refuse_layout_made_anew(exported: ExportedProgram) -> None:
    """Raises CaptureError if the model that takes a layout would still make a part of the layout in each call."""
    exported.graph.eliminate_dead_code()
    for node in exported.graph.nodes:
        if node.target in (_own.csr.default, _own.csr_with_loops.default):
            raise CaptureError(
                "keep_layout: a size of the layout depends on the entries of a tensor, so the layout would be made in "
                "each call. Leave the argument out."
            )
