"""Computes and compares the seal of a layout by launches, in a program that is traced for a package. Imports Triton.

:mod:`gnncompile.ops.seal` says what a seal is. Those here are other numbers than those of a CPU: a package compares a
seal with its own alone. A kernel takes all sealed tensors at once, so its code is generated for their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.hub_lists import Launch
from gnncompile.codegen.triton.module import load_module

BLOCK = 1024
"""The entries that a program reads at once."""

MOST = 1024
"""The most programs, a power of two."""

FEW = 16 * BLOCK
"""The most entries whose seal each program of the comparison adds up itself. It then takes one launch, not two."""

_HEAD = """import triton
import triton.language as tl

from gnncompile.codegen.triton.layout_kernels import copy, share

"""


def seal(tensors: Sequence[Tensor], sizes: Sequence[Any], launch: Launch) -> Tensor:
    """Returns the seal of tensors, int64 ``[1]``.

    Args:
        tensors: The tensors, contiguous.
        sizes: Numbers that the seal depends on as well.
        launch: Launches a kernel.
    """
    sealed = _Sealed(tensors, sizes)
    return sealed.shares(torch.sym_max(sealed.programs, 1), launch).sum(0, keepdim=True)


def same_or_empty(
    tensors: Sequence[Tensor], sizes: Sequence[Any], expected: Tensor, copied: dict[int, int], launch: Launch
) -> list[Tensor]:
    """Returns copies of some of the sealed tensors. Another seal is an error of the call, and then nothing is copied.

    Args:
        tensors: The sealed tensors, contiguous.
        sizes: Numbers that the seal depends on as well.
        expected: The seal, int64 ``[1]``.
        copied: The positions of the tensors to copy, and the number that fills the copy if the seal is another one.
        launch: Launches a kernel.
    """
    sealed = _Sealed(tensors, sizes)
    are_many = torch.sym_min(sealed.entries // (FEW + 1), 1)
    shares = sealed.shares(are_many * sealed.programs, launch)
    copies = [tensors[at].new_empty(tensors[at].shape) for at in copied]
    programs = torch.sym_min(-(-sum(one.numel() for one in copies) // BLOCK), MOST)
    return launch(
        sealed.comparison(copied),
        [*sealed.values, shares, expected, *copies],
        [*sealed.numbers, shares.size(0)],
        torch.sym_max(programs, 1),
        [len(sealed.values) + 2 + at for at in range(len(copies))],
    )


class _Sealed:
    """Tensors and sizes of a seal.

    Attributes:
        values: The tensors. Further sizes have empty ones.
        numbers: For each tensor the number of its entries, and a size.
        entries: The entries of all tensors.
        programs: The programs that add up the seal, 0 if there is no entry.
    """

    def __init__(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> None:
        nothing = tensors[0].new_empty((0,))
        pairs = list(zip_longest(tensors, sizes))
        self.values = [nothing if one is None else one for one, _ in pairs]
        self.numbers: list[Any] = []
        for one, (_, size) in zip(self.values, pairs, strict=True):
            self.numbers += [one.numel(), 0 if size is None else size]
        self.entries: Any = sum(one.numel() for one in self.values)
        self.programs: Any = torch.sym_min(-(-self.entries // BLOCK), MOST)
        self._types = tuple(one.dtype for one in self.values)
        self._names = [f"v{at}" for at in range(len(self.values))]
        self._counts = [f"{kind}{at}" for at in range(len(self.values)) for kind in ("number", "size")]

    def shares(self, programs: Any, launch: Launch) -> Tensor:
        """Returns the shares of programs, int64 ``[programs]``, which add up to the seal."""
        shares = self.values[0].new_empty((programs,), dtype=torch.int64)
        body = [
            "program = tl.program_id(0)",
            "programs = tl.num_programs(0)",
            "found = tl.zeros([1], tl.int64)",
            *self._sum(),
            "tl.store(shares + program + tl.arange(0, 1), found)",
        ]
        entry = self._entry("add_up", [*self._names, "shares"], (*self._types, torch.int64), self._counts, body)
        return launch(entry, [*self.values, shares], self.numbers, programs, [len(self.values)])[0]

    def comparison(self, copied: dict[int, int]) -> Entry:
        """Returns the kernel that compares the seal with the expected one, and copies tensors if they are the same."""
        copies = [f"safe{at}" for at in copied]
        body = [
            "program = tl.program_id(0) * 0",  # each program adds up all
            "programs = program + 1",
            "found = tl.zeros([1], tl.int64)",
            "if parts > 0:",
            f"    part = tl.arange(0, {MOST})",
            "    found += tl.sum(tl.load(shares + part, mask=part < parts, other=0), 0)",
            "else:",
            *(f"    {line}" for line in self._sum()),
            "same = found == tl.load(expected)",
            *(f"copy(v{at}, safe{at}, number{at}, same, FILL={fill}, BLOCK={BLOCK})" for at, fill in copied.items()),
            "wrong = (same == 0) & (tl.program_id(0) == 0)",
            "tl.store(bad + tl.arange(0, 1), wrong, mask=wrong)",
        ]
        types = *self._types, torch.int64, torch.int64, *(self._types[at] for at in copied), torch.bool
        names = [*self._names, "shares", "expected", *copies, "bad"]
        return self._entry("compare", names, types, [*self._counts, "parts"], body, flag="layout")

    def _sum(self) -> list[str]:
        """The lines that add up a program's part of the seal. All tensors' blocks are dealt to programs in turn."""
        lines, shares = ["turn = program"], []
        for at, dtype in enumerate(self._types):
            bits = 8 * dtype.itemsize if dtype.is_floating_point else 0
            constants = f"PART={at}, BITS={bits}, BLOCK={BLOCK}"
            lines += [
                f"share{at} = share(v{at}, number{at}, size{at}, turn, programs, {constants})",
                f"turn = (turn + programs - tl.cdiv(number{at}, {BLOCK}) % programs) % programs",
            ]
            shares.append(f"share{at}")
        return [*lines, f"found += tl.sum({' + '.join(shares)}, 0)"]

    def _entry(
        self,
        name: str,
        names: Sequence[str],
        types: tuple[torch.dtype, ...],
        counts: Sequence[str],
        body: Sequence[str],
        flag: str | None = None,
    ) -> Entry:
        head = f"@triton.jit(do_not_specialize={list(counts)})\ndef {name}({', '.join([*names, *counts])}):"
        text = "\n".join([_HEAD, head, *(f"    {line}" for line in body)]) + "\n"
        function = getattr(load_module(text), name)
        options = {"num_warps": tuning.TILES.short_warps}
        return Entry(text, function, tuple(names), types, len(counts), options=options, flag=flag)
