"""Our ops as C++ code inside of a package, which a process without gnncompile runs.

A region becomes an object file and a call of its function. ``gnncompile::csr`` and ``gnncompile::csr_with_loops``
become counting sorts, which refuse edges outside of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gnncompile._compat import aoti
from gnncompile._compat.inductor_call import Call, Result, contiguous, tensor_of
from gnncompile.codegen.cpp.layout_source import CSR, LOOPS
from gnncompile.codegen.cpp.objects import entry_name, start_object
from gnncompile.codegen.cpp.rows import positions
from gnncompile.codegen.cpp.source import source
from gnncompile.codegen.cpp.tiled_source import tiled_source
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.region import Region
from gnncompile.layout import csr

_own = torch.ops.gnncompile

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {_own.inverse_degree.default: csr.inverse_degree}
"""Our ops that a package computes with torch's."""

HELD = {
    *DECOMPOSITIONS,
    *(
        getattr(_own, name).default
        for name in (
            "region",
            "csr",
            "csr_with_loops",
            "stored",
            "rounded",
            "embedding_gradient",
            "add_product",
            "seal",
        )
    ),
}
"""Our ops that a package can hold."""


def _source_of(region: Region) -> str:
    return tiled_source(region, own_products=False) if region.tiled else source(region)


def start(region: Region) -> str:
    """Starts to compile a region's kernel for the current package. Returns the name of its function.

    Raises:
        UnsupportedRegion: The region has no C++ form.
    """
    return _start(_source_of(region), region.contracts)


def _start(text: str, contract: bool) -> str:
    build, name = aoti.current_build(), entry_name(text)
    assert build is not None
    if name not in build.objects:
        build.objects[name] = start_object(text, contract, build.folder, build.cpu)
    return name


def write_region(call: Any, wrapper: Any, region: Region) -> None:
    """Writes the call of a region's kernel into a package's code, in place of :meth:`RegionCall.codegen`."""
    given, outputs = call.references(), call.filled(wrapper)
    rowptr, layout = call.inputs[call.count], given[call.count :]
    name = entry_name(_source_of(region))
    for result, reference, out in zip(call.results, outputs, region.outputs, strict=True):
        bytes_ = [aoti.size_text(wrapper, size) for size in result.get_size()]
        bytes_.append(str(tensor_type(out.dtype).itemsize))
        zero = "true" if region.cleared(out) else "false"
        wrapper.writeline(f"gnncompile::fresh({reference}, {' * '.join(bytes_)}, {zero});")
    rows = f"{aoti.size_text(wrapper, rowptr.get_size()[0])} - 1"
    tensors = [given[at] for at in positions(region)]
    arguments = [rows, "gnncompile::threads()", *map(aoti.address, (*layout, *tensors, *outputs))]
    if region.tiled:
        arguments.append(f"gnncompile::products_{'double' if region.double else 'float'}()")
        aoti.declare_products(wrapper)
    aoti.call_kernel(wrapper, name, arguments, "a message-passing layer")


class _LayoutCall(Call):
    """The call of the kernel that sorts edges.

    Args:
        inputs: index, other and perhaps alive, realized and contiguous.
        results: rowptr, col and edge.
        rows: The number of rows.
        columns: The number of columns.
        wraps: Whether negative rows and columns count from the end.
    """

    def __init__(
        self, inputs: Sequence[Any], results: Sequence[Result], rows: Any, columns: Any, wraps: tuple[bool, bool]
    ) -> None:
        self.rows, self.columns, self.wraps = rows, columns, wraps
        super().__init__(inputs, results)

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into a package's code."""
        index, other, *alive = self.references()
        results = ", ".join(self.filled(wrapper))
        name = entry_name(CSR)
        aoti.link(wrapper, name)
        sizes = (self.results[1].get_size()[0], self.rows, self.columns)
        numbers = [*(aoti.size_text(wrapper, size) for size in sizes), *(str(one).lower() for one in self.wraps)]
        kept = aoti.address(alive[0]) if alive else "0"
        wrapper.writeline(f"gnncompile::sort({name}, {{{', '.join(numbers)}}}, {index}, {other}, {kept}, {results});")


class _LoopsCall(Call):
    """The call of the kernel that adds self loops to a layout."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into a package's code."""
        rowptr, col, edge, *alive = self.references()
        inputs: Sequence[Any] = self.inputs
        pointers, edges = inputs[0].get_size()[0], inputs[1].get_size()[0]
        arguments = [aoti.size_text(wrapper, edges), f"{aoti.size_text(wrapper, pointers)} - 1"]
        arguments += map(aoti.address, (rowptr, col, edge))
        arguments.append(aoti.address(alive[0]) if alive else "0")
        arguments += map(aoti.address, self.filled(wrapper))
        aoti.call_kernel(wrapper, entry_name(LOOPS), arguments, "self loops")


def _layout_results(rows: Any, edges: Any, device: torch.device) -> list[Result]:
    return [Result([size], torch.int32, device) for size in (rows + 1, edges, edges)]


def _lower_csr(
    index: Any,
    other: Any,
    num_rows: Any,
    num_columns: Any,
    alive: Any,
    wrap_rows: bool = False,
    wrap_columns: bool = False,
) -> list[Any]:
    _start(CSR, False)
    given = [contiguous(one) for one in (index, other, alive) if one is not None]
    results = _layout_results(num_rows, index.get_size()[0], index.get_device())
    _LayoutCall(given, results, num_rows, num_columns, (wrap_rows, wrap_columns))
    return [tensor_of(one) for one in results]


def _lower_loops(rowptr: Any, col: Any, edge: Any, index: Any, alive: Any) -> list[Any]:
    _start(LOOPS, False)
    given = [contiguous(one) for one in (rowptr, col, edge, alive) if one is not None]
    rows = rowptr.get_size()[0] - 1
    results = _layout_results(rows, edge.get_size()[0] + rows, rowptr.get_device())
    _LoopsCall(given, results)
    return [tensor_of(one) for one in results]


class _BoundedCall(Call):
    """The call that copies an index and refuses entries out of range.

    Args:
        index: The index, realized and contiguous.
        result: The copy.
        rows: The number of rows that the index chooses from.
        wraps: Whether negative entries count from the end.
    """

    def __init__(self, index: Any, result: Result, rows: Any, wraps: bool) -> None:
        self.rows, self.wraps = rows, wraps
        super().__init__([index], [result])

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into a package's code."""
        aoti.declare_support(wrapper)
        (index,), (copy,) = self.references(), self.filled(wrapper)
        rows, wraps = aoti.size_text(wrapper, self.rows), str(self.wraps).lower()
        wrapper.writeline(f"gnncompile::bound({index}, {rows}, {wraps}, {copy});")


def _lower_bounded(index: Any, size: Any, wraps: bool) -> Any:
    result = Result(index.get_size(), index.get_dtype(), index.get_device())
    _BoundedCall(contiguous(index), result, size, wraps)
    return tensor_of(result)


def install() -> None:
    """Registers the lowerings with Inductor. They apply to packages alone."""
    aoti.install_in_packages(_own.bounded.default, _lower_bounded)
    aoti.install_in_packages(_own.csr.default, _lower_csr)
    aoti.install_in_packages(_own.csr_with_loops.default, _lower_loops)
