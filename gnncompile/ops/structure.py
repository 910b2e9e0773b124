"""The ops that compute graph structure: ``gnncompile::csr``, ``csr_with_loops`` and ``inverse_degree``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnncompile.layout import csr
from gnncompile.ops import counting_sort, device_layouts
from gnncompile.ops.region import LIBRARY

LIBRARY.define(
    "csr(Tensor index, Tensor other, SymInt num_rows, SymInt num_columns, Tensor? alive, "
    "bool wrap_rows=False, bool wrap_columns=False) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "csr_with_loops(Tensor rowptr, Tensor col, Tensor edge, Tensor index, Tensor? alive) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define("inverse_degree(Tensor rowptr, str dtype) -> Tensor")


def _fake_csr(index: Tensor, other: Tensor, num_rows: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    edges = index.size(0)
    return (
        index.new_empty((num_rows + 1,), dtype=torch.int32),
        index.new_empty((edges,), dtype=torch.int32),
        index.new_empty((edges,), dtype=torch.int32),
    )


def _fake_csr_with_loops(
    rowptr: Tensor, col: Tensor, edge: Tensor, index: Tensor, alive: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    size = edge.size(0) + rowptr.size(0) - 1
    return rowptr.new_empty((rowptr.size(0),)), col.new_empty((size,)), edge.new_empty((size,))


def _fake_inverse_degree(rowptr: Tensor, dtype: str) -> Tensor:
    return rowptr.new_empty((rowptr.size(0) - 1,), dtype=getattr(torch, dtype))


LIBRARY.impl("csr", csr.csr, "CompositeExplicitAutograd")
LIBRARY.impl("csr_with_loops", csr.with_loops, "CompositeExplicitAutograd")
LIBRARY.impl("csr", counting_sort.csr, "CPU")
LIBRARY.impl("csr_with_loops", counting_sort.with_loops, "CPU")
LIBRARY.impl("csr", device_layouts.csr, "CUDA")
LIBRARY.impl("csr_with_loops", device_layouts.with_loops, "CUDA")
LIBRARY.impl("inverse_degree", device_layouts.inverse_degree, "CUDA")
LIBRARY.impl("inverse_degree", csr.inverse_degree, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::csr", _fake_csr, lib=LIBRARY)
torch.library.register_fake("gnncompile::csr_with_loops", _fake_csr_with_loops, lib=LIBRARY)
torch.library.register_fake("gnncompile::inverse_degree", _fake_inverse_degree, lib=LIBRARY)
