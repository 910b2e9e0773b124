"""The tensors of an item of a loader, wherever they are: in mini-batches, sparse matrices, lists and dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex, Index
from torch_geometric.data.data import BaseData
from torch_geometric.typing import SparseTensor

from gnncompile.device import device_of

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods that return the dense tensors of a sparse one, by layout."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the dense tensors that a value consists of. Objects of other kinds are not looked into."""
    if isinstance(value, (EdgeIndex, Index)):
        yield from tensors_in(list(vars(value).values()))
    elif isinstance(value, Tensor) and value.layout == torch.jagged:
        yield from (value.values(), value.offsets())  # type: ignore[attr-defined]
    elif isinstance(value, Tensor):
        parts = _PARTS.get(value.layout)
        yield from (value,) if parts is None else (getattr(value, part)() for part in parts)
    elif isinstance(value, SparseTensor):
        yield from tensors_in(vars(value.storage))
    elif isinstance(value, BaseData):
        for store in value.stores:
            yield from tensors_in(dict(store.items()))
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for one in value:
            yield from tensors_in(one)


def on_gpu(value: Any, known: Iterable[Tensor] = ()) -> list[Tensor]:
    """Returns a tensor in each memory of a GPU that a value reads, besides the memories of the `known` tensors."""
    found = {_memory(tensor): tensor for tensor in tensors_in(value) if device_of(tensor.device).has_streams}
    for tensor in known:
        found.pop(_memory(tensor), None)
    return list(found.values())


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
