"""One Triton kernel of a region: builds the kernel from its generated text, and launches it with little host time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import itemgetter, or_
from typing import Any

import torch
import triton
from torch import Tensor

from gnncompile.codegen.triton.edge_linears import read_as_words
from gnncompile.codegen.triton.launcher import Launcher
from gnncompile.codegen.triton.module import load_module
from gnncompile.codegen.triton.plan import Part, Schedule
from gnncompile.codegen.triton.source import source
from gnncompile.codegen.triton.tile import Tile
from gnncompile.codegen.triton.writer import COUNTS, KERNEL, parameters
from gnncompile.exc import ArgumentError
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region

GIVEN = (*Layout._fields, "hubs", "rows", "pieces", "partial")
"""The arguments of a launch before the outputs and tensors: the edges, the hubs' rows, the row of each edge, the pieces
of hubs, and the partial results of pieces or programs."""


class Variant:
    """One kernel of a region, with everything that does not change between calls.

    Attributes:
        text: The generated module.
        compiled: The launcher for each device. Triton compiles for the alignment of pointers. So if some pointers are
            no multiples of 16, the key also has the positions of these pointers.
    """

    def __init__(self, region: Region, plan: Schedule, tile: Tile, part: Part) -> None:
        names = parameters(region, plan, tile, part)
        self.text = source(region, tile, part)
        self._kernel: Any = getattr(load_module(self.text), KERNEL)
        self._counts = [COUNTS.index(name) for name in names if name in COUNTS]
        self._arguments = _arguments(region, names)
        words = read_as_words(region)
        # positions of the arguments that are read in words of 64 bits, and so must be aligned
        self._words = [at for at, name in enumerate(names) if name[0] == "t" and int(name[1:]) in words]
        self._pick = itemgetter(*(at for at, _ in self._arguments))
        self._columns = tile.across(region.grid)
        self._options: dict[str, Any] = {}
        if isinstance(self._kernel, triton.JITFunction):  # the interpreter takes no compile options
            self._options = {"num_warps": tile.num_warps, "enable_fp_fusion": region.contracts}
        self.compiled: dict[int | tuple[int, ...], Launcher] = {}

    def __call__(self, given: Sequence[Tensor], counts: Sequence[int], device: int, programs: int) -> None:
        """Launches `programs` programs on the current device, whose index is -1 under Triton's interpreter.

        Args:
            given: The tensors named in :data:`GIVEN`, then the outputs, then the region's tensors. A tensor that the
                kernel does not read may be any tensor.
            counts: The numbers named in :data:`COUNTS`.
            device: The index of the device.
            programs: The number of programs, along the first axis of the grid.
        """
        arguments: list[Any] = [given[at] for at, _ in self._arguments]
        for k in self._words:
            if arguments[k].data_ptr() & 7:
                arguments[k] = arguments[k].clone()
        pointers: list[int] = []
        bits = 0
        for tensor, (_, dtype) in zip(arguments, self._arguments, strict=True):
            if tensor.dtype is not dtype or tensor.get_device() != device:
                raise ArgumentError(complaint(tensor, dtype, device))
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            bits |= pointer
        # A kernel that was compiled for aligned pointers serves every call whose pointers are all aligned.
        key = (device, *(k for k, p in enumerate(pointers) if p & 15)) if bits & 15 else device
        numbers = [counts[at] for at in self._counts]
        launcher = self.compiled.get(key)
        if launcher is not None:
            launcher(programs, self._columns, device, pointers + numbers)
            return
        compiled = self._kernel[programs, self._columns, 1](*arguments, *numbers, **self._options)
        if compiled is not None:  # the interpreter returns None
            self.compiled[key] = Launcher(compiled, "O" * len(arguments) + "i" * len(numbers))

    def trusted(self, given: Sequence[Tensor], counts: Sequence[int], device: int, programs: int) -> None:
        """The same without checks of dtypes and devices."""
        pointers = [tensor.data_ptr() for tensor in self._pick(given)]
        launcher = None if reduce(or_, pointers) & 15 else self.compiled.get(device)
        if launcher is None:
            self(given, counts, device, programs)
        else:
            pointers += [counts[at] for at in self._counts]
            launcher(programs, self._columns, device, pointers)


def _arguments(region: Region, names: Sequence[str]) -> list[tuple[int, torch.dtype]]:
    """Returns the position in `given` (see :meth:`Variant.__call__`) and the dtype of every pointer of a kernel."""
    types = {int(n.value or 0): n.dtype for n in region.inputs}
    found: list[tuple[int, torch.dtype]] = []
    for name in names:
        if name in GIVEN:
            found.append((GIVEN.index(name), tensor_type(region.compute) if name == "partial" else torch.int32))
        elif name.startswith("out"):
            at = int(name[3:])
            found.append((len(GIVEN) + at, tensor_type(region.outputs[at].dtype)))
        elif name not in COUNTS:
            at = int(name[1:])
            found.append((len(GIVEN) + len(region.outputs) + at, tensor_type(types[at])))
    return found


def complaint(tensor: Tensor, dtype: torch.dtype, device: int) -> str:
    """Returns the message about a tensor of another dtype or device than a kernel expects."""
    where = "cpu" if device < 0 else f"cuda:{device}"
    found = f"{tensor.dtype} on {tensor.device}, shape {tuple(tensor.shape)}"
    return f"Triton kernel: found a tensor {found}; expected {dtype} on {where}, where the outputs are; call .to()"
