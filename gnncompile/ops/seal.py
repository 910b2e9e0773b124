"""The op ``gnncompile::seal``: a number for a layout and the graph that it belongs to, which later calls compare.

The number is a sum of all entries as bits, each times an odd number that depends on its position, modulo 2^64. So
another graph, or the tensors in another order, almost surely have another number.

``gnncompile::same_layout(layout, found, expected)`` returns the tensors of a layout, and lets the call fail if the two
seals differ. In a package for a GPU, nothing reads the layout before the seals are compared. A package for a CPU
compares seals with its other checks, before the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile._compat import aoti, aoti_checks
from gnncompile._compat.inductor_call import Call, Result, contiguous, lends_arguments, lent, tensor_of
from gnncompile.exc import ArgumentError
from gnncompile.ops.region import LIBRARY

_own = torch.ops.gnncompile

LIBRARY.define("seal(Tensor[] tensors, SymInt[] sizes) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

_FIRST, _SECOND, _PART = -0x61C8864680B583EB, -0x3B314601E57A13AD, 1 << 40
"""Two odd numbers that mix the bits of positions, those of SplitMix64 and of MurmurHash3, and the most entries of a
tensor. :func:`seal_of` in aoti_cpu.h has the same numbers."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _weights(start: int, count: int, device: torch.device) -> Tensor:
    mixed = (torch.arange(count, device=device) + start + 1) * _FIRST
    return (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * _SECOND | 1


def _run(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    device = tensors[0].device
    total = torch.zeros(1, dtype=torch.int64, device=device)
    counts = torch.tensor([*sizes, *(one.numel() for one in tensors)], dtype=torch.int64, device=device)
    for at, values in enumerate([counts, *tensors]):
        bits = values.reshape(-1).view(_BITS[values.element_size()]).long()
        total += (bits * _weights(at * _PART, bits.numel(), device)).sum()
    return total


def _fake(tensors: Sequence[Tensor], sizes: Sequence[Any]) -> Tensor:
    return tensors[0].new_empty((1,), dtype=torch.int64)


LIBRARY.impl("seal", _run, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::seal", _fake, lib=LIBRARY)


def _run_same(layout: Sequence[Tensor], found: Tensor, expected: Tensor) -> list[Tensor]:
    if not torch.equal(found, expected):
        raise ArgumentError(
            "layout: found the layout of another graph, or tensors in another order. Make the layout of this graph, "
            "and pass its tensors as they are."
        )
    return [one.clone() for one in layout]


def _fake_same(layout: Sequence[Tensor], found: Tensor, expected: Tensor) -> list[Tensor]:
    return [torch.empty_like(one) for one in layout]


_SIGNATURE = "same_layout(Tensor[] layout, Tensor found, Tensor expected) -> Tensor[]"
LIBRARY.define(_SIGNATURE, tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("same_layout", _run_same, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::same_layout", _fake_same, lib=LIBRARY)


class _SealCall(Call):
    """The call that computes a seal.

    Args:
        inputs: The tensors, realized and contiguous.
        result: The seal.
        sizes: Numbers that the seal depends on as well.
    """

    def __init__(self, inputs: Sequence[Any], result: Result, sizes: Sequence[Any]) -> None:
        self.sizes = sizes
        super().__init__(inputs, [result])

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into a package's code."""
        aoti.declare_support(wrapper)
        sizes = ", ".join(aoti.size_text(wrapper, size) for size in self.sizes)
        tensors = ", ".join(self.references())
        (out,) = self.filled(wrapper)
        wrapper.writeline(f"gnncompile::write_seal({{{tensors}}}, {{{sizes}}}, {out});")


def _lower(tensors: Sequence[Any], sizes: Sequence[Any]) -> Any:
    given = [contiguous(one) for one in tensors]
    result = Result([1], torch.int64, given[0].get_device())
    _SealCall(given, result, sizes)
    return tensor_of(result)


class _SameLayoutCall(Call):
    """The comparison of two seals on a GPU, before which nothing reads the layout.

    Args:
        layout: The tensors of the layout, inputs of the model. Inductor takes them for written by the call.
        found: The seal of the layout and of the call's graph.
        expected: The seal that the caller passed.
    """

    def __init__(self, layout: Sequence[Any], found: Any, expected: Any) -> None:
        super().__init__([*layout, found, expected], written=layout)

    def codegen(self, wrapper: Any) -> None:
        """Writes the comparison into a package's code."""
        aoti_checks.write_same_layout(wrapper, *self.references()[-2:])


def _lower_same(layout: Sequence[Any], found: Any, expected: Any) -> list[Any]:
    given = [contiguous(one) for one in layout]
    _SameLayoutCall(given, contiguous(found), contiguous(expected))
    return [tensor_of(lent(one, at)) for at, one in enumerate(given)]  # the caller keeps the layout for later calls


def install() -> None:
    """Registers the lowerings with Inductor. They apply to packages alone."""
    aoti.install_in_packages(_own.seal.default, _lower)
    aoti.install_in_packages(_own.same_layout.default, _lower_same)
    lends_arguments(_own.same_layout.default)
