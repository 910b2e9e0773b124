"""The ops that compute graph structure: ``gnncompile::csr``, ``csr_with_loops`` and ``inverse_degree``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


_NAMES = {getattr(torch.ops.gnncompile, name).default: name for name in _BY_DEVICE}
_NEW_EMPTY = torch.ops.aten.new_empty.default


def without_dispatcher(program: fx.GraphModule) -> Callable[..., Any]:
    """Returns a function that does the same as a structure program, in less time.

    Torch's dispatcher takes about 5 microseconds for each op that is written in Python, which counts if a small graph
    is new in each call. So ops of graph structure are called as Python functions. The dispatcher runs them if a
    ``TorchDispatchMode`` is to see them, or if an input is of a subclass: some subclasses, such as ``EdgeIndex``, have
    no memory of their own to read.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    for node in graph.nodes:
        name = _NAMES.get(node.target)
        if name is not None:
            node.target = _by_device(name)
        elif node.target is _NEW_EMPTY:
            node.target = _made_once() if list(node.args[1]) == [0] else Tensor.new_empty
    direct: Callable[..., Any] = fx.GraphModule(program, graph).forward

    def run(*inputs: Any) -> Any:
        special = any([type(one) is not Tensor and isinstance(one, Tensor) for one in inputs])
        return (program if special or _compat.is_in_dispatch_mode() else direct)(*inputs)

    return run


def _by_device(name: str) -> Callable[..., Any]:
    """Returns a function that runs an op as the device of its first argument does."""
    found, elsewhere = _BY_DEVICE[name], _ON_OTHER_DEVICES[name]

    def run(first: Tensor, *others: Any, **named: Any) -> Any:
        return found.get(first.device.type, elsewhere)(first, *others, **named)

    return run


def _made_once() -> Callable[..., Tensor]:
    """Returns a function that does the same as ``new_empty`` of the size ``[0]``. Its results are shared."""
    made: dict[torch.device, Tensor] = {}

    def new_empty(like: Tensor, size: Sequence[int], **options: Any) -> Tensor:
        if like.device not in made:
            made[like.device] = like.new_empty(size, **options)
        return made[like.device]

    return new_empty
