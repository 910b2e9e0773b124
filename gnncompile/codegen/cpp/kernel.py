"""The CPU kernel of a region: checks its arguments, packs their addresses and calls the machine code."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.codegen.cpp.compiler import load
from gnncompile.codegen.cpp.phases import phases
from gnncompile.codegen.cpp.plan import plan
from gnncompile.codegen.cpp.rows import positions
from gnncompile.codegen.cpp.source import source
from gnncompile.codegen.cpp.tiled_source import tiled_source
from gnncompile.exc import ArgumentError, KernelMemoryError, UnsupportedRegion
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region

HEADER = 5
"""Number of arguments before the tensors: the number of rows, the number of threads, rowptr, col, edge."""

FRESH_BYTES = 1 << 25
"""From this size on, glibc's malloc returns pages that were never touched, at every call."""


class CppKernel:
    """The CPU kernel of one region. The constructor compiles it, or finds it in the cache; calls are thread-safe.

    Args:
        region: The region to compute.

    Raises:
        UnsupportedRegion: The region has no C++ form, or there is no working C++ compiler.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.source = tiled_source(region) if region.tiled else source(region)
        self._positions = positions(region)
        kinds = {int(n.value or 0): n.dtype for n in region.inputs}
        self._dtypes = tuple(tensor_type(kinds[at]) for at in self._positions)
        self._dtypes += tuple(tensor_type(out.dtype) for out in region.outputs)
        self._library = load(self.source, contract=region.contracts)
        try:
            self._entry = self._library.run
        except AttributeError as error:
            raise UnsupportedRegion(f"C++ kernel: {error}; check the compiler or set CXX") from error
        self._products = _products(region) if region.tiled else None
        # Passing bytes made by struct is several times faster than passing a ctypes array.
        self._pack = struct.Struct(f"{HEADER + len(self._dtypes) + region.tiled}q").pack
        self._entry.argtypes = (ctypes.c_char_p,)
        self._entry.restype = ctypes.c_int

    def __call__(self, tensors: Sequence[Tensor], layout: Layout, outputs: Sequence[Tensor]) -> None:
        """Runs the kernel on ``torch.get_num_threads()`` threads.

        The result does not depend on the number of threads, bit for bit.

        Args:
            tensors: The region's tensors ``[rows, ...]`` with ``heads * channels`` elements per row, contiguous.
            layout: The edges ordered by row, int32 on the CPU.
            outputs: One contiguous tensor ``[rows, *trailing]`` to write per output of the region. An output per edge
                must hold zeros already, unless every edge is walked.

        Raises:
            ValueError: A tensor is not a contiguous CPU tensor of the region's dtype.
            MemoryError: There is no memory for scratch. A softmax needs a few numbers for each edge of the longest
                row; gradients of weights need some dozens of partial sums.
        """
        rowptr, col, edge = layout.rowptr, layout.col, layout.edge
        addresses = [rowptr.size(0) - 1, torch.get_num_threads(), rowptr.data_ptr(), col.data_ptr(), edge.data_ptr()]
        given = chain((tensors[at] for at in self._positions), outputs)
        for tensor, dtype in zip(given, self._dtypes, strict=True):
            if tensor.dtype is not dtype or not tensor.is_cpu or not tensor.is_contiguous():
                raise ArgumentError(_complaint(tensor, dtype))
            addresses.append(tensor.data_ptr())
        for index in (rowptr, col, edge):
            if index.dtype is not torch.int32 or not index.is_cpu:
                raise ArgumentError(_complaint(index, torch.int32))
        if self._products is not None:
            addresses.append(ctypes.addressof(self._products))
        for output in outputs:
            if output.nbytes >= FRESH_BYTES:
                _prefer_huge_pages(output)
        if self._entry(self._pack(*addresses)):
            raise KernelMemoryError(
                "C++ kernel: no memory for scratch (softmax of the widest row, or sums of weights); split the graph"
            )

    generator = "cpp"
    overwritable: Mapping[int, tuple[int, ...]] = {}

    @property
    def listing(self) -> str:
        """The generated code."""
        return self.source

    @property
    def gathered(self) -> tuple[tuple[int, ...], ...]:
        """For each loop over the edges of a row, the inputs that the loop reads per edge or at the edge's other end."""
        if self.region.tiled:
            return tuple(_gathered(self.region, phase.region) for phase in phases(self.region).phases)
        return plan(self.region).gathered

    def compile_ahead(self, degree: int) -> None:
        """Does nothing: the constructor has compiled the code."""

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The same as a call, checks included. They cost little next to a kernel that runs on the same processor."""
        self(tensors, Layout(*layout), outputs)


def _products(region: Region) -> ctypes.Array[ctypes.c_int64]:
    """Returns torch's functions for products of matrices, for the type that a region computes in."""
    try:
        return _compat.products_table(getattr(torch, region.compute))
    except (AttributeError, OSError) as error:
        raise UnsupportedRegion(f"C++ kernel: torch's products of matrices are not found: {error}") from error


def _gathered(region: Region, phase: Region) -> tuple[int, ...]:
    """Returns the nodes of a tiled region that one of its phases reads per edge or at the edge's other end."""
    places = {(n.value, n.space): at for at, n in enumerate(region.nodes) if n.op == "input"}
    read = [phase.nodes[i] for loop in plan(phase).gathered for i in loop]
    return tuple(sorted(places[n.value, n.space] for n in read if (n.value, n.space) in places))


def _find_madvise() -> Callable[[int, int, int], int] | None:
    """Returns the C library's ``madvise``, or None where huge pages can't be requested."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


_madvise = _find_madvise()


def _prefer_huge_pages(tensor: Tensor) -> None:
    """Asks the operating system for huge pages for a tensor. Faulting in small pages takes longer than writing them."""
    if _madvise is None:
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(first, last - first, mmap.MADV_HUGEPAGE)


def _complaint(tensor: Tensor, dtype: torch.dtype) -> str:
    layout = "contiguous" if tensor.is_contiguous() else f"strides {tensor.stride()}"
    found = f"{tensor.dtype} on {tensor.device}, {layout}, shape {tuple(tensor.shape)}"
    return f"C++ kernel: found a tensor {found}; expected {dtype} on cpu, contiguous; call .to() and .contiguous()"
