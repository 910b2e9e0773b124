"""The ops that compute graph structure: ``gnncompile::csr``, ``csr_with_loops`` and ``inverse_degree``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from gnncompile import _compat
from gnncompile.layout import csr
from gnncompile.ops import cpu_layouts, device_layouts
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


_BY_DEVICE: dict[str, dict[str, Callable[..., Any]]] = {
    "csr": {"cpu": cpu_layouts.csr, "cuda": device_layouts.csr},
    "csr_with_loops": {"cpu": cpu_layouts.with_loops, "cuda": device_layouts.with_loops},
    "inverse_degree": {"cpu": cpu_layouts.inverse_degree, "cuda": device_layouts.inverse_degree},
}
"""What runs an op, by its name and the type of a device."""

_ON_OTHER_DEVICES: dict[str, Callable[..., Any]] = {
    "csr": csr.csr,
    "csr_with_loops": csr.with_loops,
    "inverse_degree": csr.inverse_degree,
}
"""What runs an op on all other devices, by its name."""

for _name, _elsewhere in _ON_OTHER_DEVICES.items():
    LIBRARY.impl(_name, _elsewhere, "CompositeExplicitAutograd")
    for _type, _function in _BY_DEVICE[_name].items():
        LIBRARY.impl(_name, _function, _type.upper())
torch.library.register_fake("gnncompile::csr", _fake_csr, lib=LIBRARY)
torch.library.register_fake("gnncompile::csr_with_loops", _fake_csr_with_loops, lib=LIBRARY)
torch.library.register_fake("gnncompile::inverse_degree", _fake_inverse_degree, lib=LIBRARY)


def _csr(*given: Any, **named: Any) -> Any:
    return _run("csr", given, named)


def _csr_with_loops(*given: Any, **named: Any) -> Any:
    return _run("csr_with_loops", given, named)


def _inverse_degree(*given: Any, **named: Any) -> Any:
    return _run("inverse_degree", given, named)


def _run(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Runs an op at once, unless a mode is to see it, or a tensor is of a subclass.

    Some subclasses, such as ``EdgeIndex``, have no memory of their own to read.
    """
    subclasses = any(isinstance(one, Tensor) and type(one) is not Tensor for one in (*given, *named.values()))
    if subclasses or _compat.is_in_dispatch_mode():
        return getattr(torch.ops.gnncompile, name)(*given, **named)
    return _BY_DEVICE[name].get(given[0].device.type, _ON_OTHER_DEVICES[name])(*given, **named)


_WITHOUT_DISPATCHER = {
    torch.ops.gnncompile.csr.default: _csr,
    torch.ops.gnncompile.csr_with_loops.default: _csr_with_loops,
    torch.ops.gnncompile.inverse_degree.default: _inverse_degree,
    torch.ops.aten.new_empty.default: Tensor.new_empty,
}
"""Functions that do the same as ops, but are called in less time."""


def without_dispatcher(program: fx.GraphModule) -> Callable[..., Any]:
    """Returns the function of a structure program, in which ops of graph structure are calls of Python functions.

    Torch's dispatcher takes about 5 microseconds for each op that is written in Python, which counts if a small graph
    is new in each call. A ``TorchDispatchMode`` still sees all ops.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    for node in graph.nodes:
        node.target = _WITHOUT_DISPATCHER.get(node.target, node.target)
    forward: Callable[..., Any] = fx.GraphModule(program, graph).forward
    return forward
