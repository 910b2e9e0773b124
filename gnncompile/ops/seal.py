"""The op ``gnncompile::seal``: a number for a layout and the graph that it belongs to, which later calls compare.

The number is a sum of all entries as bits, each times an odd number that depends on its position, modulo 2^64. So
another graph, or the tensors in another order, almost surely have another number.

A package for a CPU compares seals with its other checks, before the model runs. A package for a GPU does not wait for
the seal:

``gnncompile::same_or_empty(tensors, sizes, expected, copied, fills)`` returns copies of some of the sealed tensors. If
the seal is another one, the call fails when its results are complete, and until then the copies are filled with numbers
that stand for a graph without edges. ``gnncompile::same_sizes(layout, found, expected)`` returns the tensors of a
layout. The call fails at once if two lists of sizes differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile._compat import aoti
from gnncompile._compat.inductor_call import Call, Result, contiguous, lends_arguments, lent, tensor_of
from gnncompile.ops.launch import found_error
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


def _run_same_or_empty(
    tensors: Sequence[Tensor], sizes: Sequence[int], expected: Tensor, copied: Sequence[int], fills: Sequence[int]
) -> list[Tensor]:
    if not torch.equal(_run(tensors, sizes), expected):
        raise found_error("layout")
    return [tensors[at].clone() for at in copied]


def _fake_same_or_empty(
    tensors: Sequence[Tensor], sizes: Sequence[Any], expected: Tensor, copied: Sequence[int], fills: Sequence[int]
) -> list[Tensor]:
    return [torch.empty_like(tensors[at]) for at in copied]


_SIGNATURE = "same_or_empty(Tensor[] tensors, SymInt[] sizes, Tensor expected, int[] copied, int[] fills) -> Tensor[]"
LIBRARY.define(_SIGNATURE, tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("same_or_empty", _run_same_or_empty, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::same_or_empty", _fake_same_or_empty, lib=LIBRARY)


def _run_same_sizes(layout: Sequence[Tensor], found: Sequence[int], expected: Sequence[int]) -> list[Tensor]:
    if list(found) != list(expected):
        raise found_error("layout")
    return [one.clone() for one in layout]


def _fake_same_sizes(layout: Sequence[Tensor], found: Sequence[Any], expected: Sequence[Any]) -> list[Tensor]:
    return [torch.empty_like(one) for one in layout]


_SIGNATURE = "same_sizes(Tensor[] layout, SymInt[] found, SymInt[] expected) -> Tensor[]"
LIBRARY.define(_SIGNATURE, tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("same_sizes", _run_same_sizes, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::same_sizes", _fake_same_sizes, lib=LIBRARY)


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


class _SameSizesCall(Call):
    """The comparison of the sizes of a layout with those of the call's graph. Nothing reads the layout before.

    Args:
        layout: The tensors of the layout, inputs of the model. Inductor takes them for written by the call.
        found: The sizes of the layout.
        expected: The sizes of the layout of the call's graph.
    """

    def __init__(self, layout: Sequence[Any], found: Sequence[Any], expected: Sequence[Any]) -> None:
        self.sizes = found, expected
        super().__init__(layout, written=layout)

    def codegen(self, wrapper: Any) -> None:
        """Writes the comparison into a package's code."""
        aoti.declare_support(wrapper)
        found, expected = (", ".join(aoti.size_text(wrapper, one) for one in sizes) for sizes in self.sizes)
        wrapper.writeline(f"gnncompile::compare_sizes({{{found}}}, {{{expected}}});")


def _lower_same_sizes(layout: Sequence[Any], found: Sequence[Any], expected: Sequence[Any]) -> list[Any]:
    given = [contiguous(one) for one in layout]
    _SameSizesCall(given, found, expected)
    return [tensor_of(lent(one, at)) for at, one in enumerate(given)]  # the caller keeps the layout for later calls


def install() -> None:
    """Registers the lowerings with Inductor. They apply to packages alone."""
    aoti.install_in_packages(_own.seal.default, _lower)
    aoti.install_in_packages(_own.same_sizes.default, _lower_same_sizes)
    lends_arguments(_own.same_sizes.default)
