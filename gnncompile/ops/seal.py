"""The op ``gnncompile::seal``: a number for a layout and the graph that it belongs to, which later calls compare.

The number is a sum of all entries as bits, each times an odd number that depends on its position, modulo 2^64. So
another graph, or the tensors in another order, almost surely have another number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile._compat import aoti
from gnncompile._compat.inductor_call import Call, Result, contiguous, tensor_of
from gnncompile.ops.region import LIBRARY

LIBRARY.define("seal(Tensor[] tensors, SymInt[] sizes) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

_FIRST, _SECOND, _PART = -0x61C8864680B583EB, -0x3B314601E57A13AD, 1 << 40
"""Two odd numbers that mix the bits of positions, those of SplitMix64 and of MurmurHash3, and the most entries of a
tensor. :func:`seal_of` in aoti_support.h has the same numbers."""

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


def install() -> None:
    """Registers the lowering with Inductor. It applies to packages alone."""
    aoti.install_in_packages(torch.ops.gnncompile.seal.default, _lower)
