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
from gnncompile.serving.program import Program

LAYOUT, WITH_LAYOUT = "layout", "with_layout"
"""The names of the two models in a package."""

_own = torch.ops.gnncompile


class Layout(nn.Module):
    """Takes the model's arguments, and returns the layout of their graph: a seal, and the tensors of the layout.

    The seal is a number that depends on the graph and on the tensors.

    Args:
        program: The captured model, traced with `only_structure`.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Returns the seal ``[1]`` (int64), and the tensors of the layout."""
        leaves = pytree.tree_leaves((args, kwargs))
        self.program.check_sizes(leaves)
        tensors = self.program.layout(leaves)
        return [_seal(self.program, leaves, tensors), *tensors]


class WithLayout(nn.Module):
    """Takes a layout and the model's arguments, and returns the model's results.

    Args:
        program: The captured model.
        compares: Whether the model itself compares the seal, as on GPUs. On CPUs the package does, before it runs the
            model.
    """

    def __init__(self, program: Program, compares: bool) -> None:
        super().__init__()
        self.program, self.compares = program, compares

    def forward(self, layout: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Computes the model's results without sorting an edge."""
        leaves = pytree.tree_leaves((args, kwargs))
        self.program.check_sizes(leaves)
        expected, *kept = layout
        if self.compares:
            kept = _own.same_layout(kept, _seal(self.program, leaves, kept), expected)
        # Only their shapes are read, so the trace drops the operations that make them.
        made = self.program.layout(leaves)
        given = [one.as_strided(shaped.shape, shaped.stride()) for one, shaped in zip(kept, made, strict=True)]
        return self.program.results_of(leaves, given)


def _seal(program: Program, leaves: Sequence[Any], layout: Sequence[Tensor]) -> Tensor:
    """Returns the seal of a layout and of the graph of a call."""
    read, sizes = program.structural_parts()
    sealed: Tensor = _own.seal([*(leaves[at] for at in read), *layout], [leaves[at].size(axis) for at, axis in sizes])
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
