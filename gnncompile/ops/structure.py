"""The ops that compute graph structure: ``gnncompile::csr``, ``csr_with_loops`` and ``inverse_degree``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

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


_IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "csr": {"cpu": counting_sort.csr, "cuda": device_layouts.csr},
    "csr_with_loops": {"cpu": counting_sort.with_loops, "cuda": device_layouts.with_loops},
    "inverse_degree": {"cpu": counting_sort.inverse_degree, "cuda": device_layouts.inverse_degree},
}
"""What runs an op, by its name and the type of a device."""

_ELSEWHERE: dict[str, Callable[..., Any]] = {
    "csr": csr.csr,
    "csr_with_loops": csr.with_loops,
    "inverse_degree": csr.inverse_degree,
}

for _name, _elsewhere in _ELSEWHERE.items():
    LIBRARY.impl(_name, _elsewhere, "CompositeExplicitAutograd")
    for _type, _run in _IMPLEMENTATIONS[_name].items():
        LIBRARY.impl(_name, _run, _type.upper())
torch.library.register_fake("gnncompile::csr", _fake_csr, lib=LIBRARY)
torch.library.register_fake("gnncompile::csr_with_loops", _fake_csr_with_loops, lib=LIBRARY)
torch.library.register_fake("gnncompile::inverse_degree", _fake_inverse_degree, lib=LIBRARY)


def _run_csr(index: Tensor, *given: Any) -> Any:
    return _implementation("csr", index)(index, *given)


def _run_csr_with_loops(rowptr: Tensor, *given: Any) -> Any:
    return _implementation("csr_with_loops", rowptr)(rowptr, *given)


def _run_inverse_degree(rowptr: Tensor, dtype: str) -> Any:
    return _implementation("inverse_degree", rowptr)(rowptr, dtype)


def _implementation(name: str, tensor: Tensor) -> Callable[..., Any]:
    return _IMPLEMENTATIONS[name].get(tensor.device.type, _ELSEWHERE[name])


_DIRECT = {
    torch.ops.gnncompile.csr.default: _run_csr,
    torch.ops.gnncompile.csr_with_loops.default: _run_csr_with_loops,
    torch.ops.gnncompile.inverse_degree.default: _run_inverse_degree,
    torch.ops.aten.new_empty.default: Tensor.new_empty,
}
"""Functions that do the same as ops, but are called in less time."""


def without_dispatcher(program: fx.GraphModule) -> Callable[..., Any]:
    """Returns the function of a structure program, in which the ops of this file are plain calls of Python functions.

    The function takes real tensors only. Torch's dispatcher takes about 5 microseconds for each op that is written in
    Python, which counts if a small graph is new in each call.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    for node in graph.nodes:
        node.target = _DIRECT.get(node.target, node.target)
    forward: Callable[..., Any] = fx.GraphModule(program, graph).forward
    return forward
