"""Substitutes for parts of PyG's ``Data`` and ``Batch`` that Dynamo can't trace: ``super()``, ``fset``, a new class."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.storage import N_KEYS, BaseStorage, NodeStorage

from gnncompile._compat import EDGE_INDEX, copy_of, kept_with
from gnncompile.substitutes.registry import substitute

_num_nodes = copy_of(NodeStorage.num_nodes.fget)
_data_setattr = copy_of(Data.__setattr__)
_store_setattr = copy_of(BaseStorage.__setattr__)


@substitute(Data.num_nodes.fget, HeteroData.num_nodes.fget)
def num_nodes(self: Any) -> Any:
    """See :attr:`torch_geometric.data.Data.num_nodes`, which calls ``super()``: Dynamo finds no property there."""
    counts = [store.num_nodes for store in self.node_stores]
    return None if any(count is None for count in counts) else sum(counts)


@substitute(NodeStorage.num_nodes.fget)
def store_num_nodes(self: Any) -> Any:
    """See ``torch_geometric.data.storage.NodeStorage.num_nodes``; without node features, an ``EdgeIndex`` is asked."""
    tables = kept_with(self._mapping.get("edge_index"), EDGE_INDEX)
    named = [key for key in self._mapping if key in N_KEYS or "node" in key or key in ("adj", "adj_t")]
    if tables is None or named or (tables[0] is None and tables[1] is None):
        return _num_nodes(self)
    return tables[0].size(0) if tables[0] is not None else tables[1].size(0)


@torch.compiler.assume_constant_result
def _is_pygs_own(kind: type, name: str) -> bool:
    """Whether an attribute is a property that PyG defines and keeps in the store."""
    setter = getattr(getattr(kind, name, None), "fset", None)
    return setter is not None and setter.__module__.startswith("torch_geometric.data.")


@substitute(Data.__setattr__)
def data_setattr(self: Any, key: str, value: Any) -> None:
    """See ``torch_geometric.data.Data.__setattr__``."""
    if _is_pygs_own(type(self), key):
        setattr(self._store, key, value)
    else:
        _data_setattr(self, key, value)


@substitute(BaseStorage.__setattr__)
def store_setattr(self: Any, key: str, value: Any) -> None:
    """See ``torch_geometric.data.storage.BaseStorage.__setattr__``."""
    if _is_pygs_own(type(self), key):
        self[key] = value
    else:
        _store_setattr(self, key, value)


@torch.compiler.assume_constant_result
def _class_of_batches(kind: type) -> Any:
    """The class of the objects that ``kind()`` makes, if `kind` is ``Batch`` or ``Batch``'s class for ``Data``.

    None for any other class.
    """
    made = type(Batch())
    return made if kind in (Batch, made) else None


def new_batch(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """See :class:`torch_geometric.data.Batch`. Its metaclass makes a class, which is made outside the trace here."""
    made = _class_of_batches(kind)
    if made is None or "_base_cls" in kwargs:
        return torch._dynamo.graph_break(msg="a Batch of other objects than Data is made")
    batch = made.__new__(made)
    Data.__init__(batch, *args, **kwargs)
    return batch
