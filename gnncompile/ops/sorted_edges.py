"""The op ``gnncompile::sorted_edges``: the layout of edges in a package for a GPU.

It takes the arguments of :func:`gnncompile.layout.csr.csr`, and returns rowptr, col and edge. An index out of range is
an error. A package raises it when its results are complete, and until then takes the edge for masked out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnncompile._compat import aoti, aoti_checks
from gnncompile._compat.inductor_call import Call, Result, contiguous, tensor_of
from gnncompile.ops.launch import compile_entry, found_error, link_entry
from gnncompile.ops.region import LIBRARY

if TYPE_CHECKING:
    from gnncompile.codegen.triton.entry import Entry

LIBRARY.define(
    "sorted_edges(Tensor index, Tensor other, Tensor? alive, SymInt num_rows, SymInt num_columns, bool wrap_rows, "
    "bool wrap_columns) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _run(
    index: Tensor,
    other: Tensor,
    alive: Tensor | None,
    num_rows: int,
    num_columns: int,
    wrap_rows: bool,
    wrap_columns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from gnncompile.codegen.triton.sorting import sort_edges

    kept = None if alive is None else alive.contiguous()
    wraps = wrap_rows, wrap_columns
    *layout, bad = sort_edges(index.contiguous(), other.contiguous(), kept, num_rows, num_columns, wraps)
    if bool(bad):
        raise found_error("index")
    rowptr, col, edge = layout
    return rowptr, col, edge


def _fake(
    index: Tensor,
    other: Tensor,
    alive: Tensor | None,
    num_rows: Any,
    num_columns: Any,
    wrap_rows: bool,
    wrap_columns: bool,
) -> tuple[Tensor, ...]:
    edges = index.size(0)
    return tuple(index.new_empty((size,), dtype=torch.int32) for size in (num_rows + 1, edges, edges))


LIBRARY.impl("sorted_edges", _run, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::sorted_edges", _fake, lib=LIBRARY)


class _SortCall(Call):
    """The launches that sort edges.

    Args:
        entries: The kernels: see :func:`gnncompile.codegen.triton.sorting.entries`. The struct Sort of ``aoti_cuda.h``
            has them in this order, then the numbers.
        inputs: index, other and perhaps alive, realized and contiguous.
        results: rowptr, col and edge.
        sizes: The numbers of edges, rows and columns.
    """

    def __init__(
        self, entries: Sequence[Entry], inputs: Sequence[Any], results: Sequence[Result], sizes: Sequence[Any]
    ) -> None:
        self.entries, self.sizes = entries, sizes
        super().__init__(inputs, results)

    def codegen(self, wrapper: Any) -> None:
        """Writes the launches into a package's code."""
        from gnncompile.codegen.triton.sorting import NUMBERS

        index, other, *alive = self.references()
        layout = self.filled(wrapper)
        flags = aoti_checks.flags_text(wrapper)
        kernels = [link_entry(wrapper, entry) for entry in self.entries]
        sort = ", ".join([*kernels, *map(str, NUMBERS.values())])
        sizes = ", ".join(aoti.size_text(wrapper, size) for size in self.sizes)
        tensors = ", ".join([index, other, *(alive or [index]), *layout])  # without a mask, no kernel reads `alive`
        wrapper.writeline(f"gnncompile::sort_edges({{{sort}}}, stream, {{{sizes}}}, {tensors}, {flags});")


def _lower(
    index: Any, other: Any, alive: Any, num_rows: Any, num_columns: Any, wrap_rows: bool, wrap_columns: bool
) -> list[Any]:
    from gnncompile.codegen.triton.sorting import entries

    wraps = wrap_rows, wrap_columns
    used = [*entries(index.get_dtype(), other.get_dtype(), alive is not None, wraps).values()]
    given = [contiguous(one) for one in (index, other, alive) if one is not None]
    edges, device = index.get_size()[0], index.get_device()
    results = [Result([size], torch.int32, device) for size in (num_rows + 1, edges, edges)]
    _SortCall(used, given, results, (edges, num_rows, num_columns))
    for entry in used:
        compile_entry(entry, device)
    return [tensor_of(one) for one in results]


def install() -> None:
    """Registers the lowering with Inductor. It applies to packages alone."""
    aoti.install_in_packages(torch.ops.gnncompile.sorted_edges.default, _lower)
