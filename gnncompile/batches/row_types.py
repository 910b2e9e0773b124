"""Finds the row type of each tensor of a mini-batch: whether its rows belong to nodes, edges or graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import EdgeStorage, NodeStorage
from torch_geometric.loader import LinkLoader, NodeLoader

from gnncompile.batches.hops import HopPrefix

EDGE_INDEX, BATCH, PTR, SEEDS = "edge_index", "batch", "ptr", "batch_size"

NODES, EDGES, GRAPHS = "nodes", "edges", "graphs"


@dataclass(frozen=True)
class RowTypes:
    """The row types of a mini-batch. A row type is an index into `names` and `counts`.

    Attributes:
        names: ``nodes`` and ``edges`` (of each node and edge type), and ``graphs``.
        counts: The number of rows of each row type.
        rows: For each store, the row type of each attribute; attributes of unknown row type are missing.
        ends: For each edge store, the row types of its sources and destinations; else None.
        certain: Whether every tensor fits at most one row type.
        hop_prefixes: The hop prefixes of a sampled mini-batch. They add row types after the others: the nodes and the
            edges of each hop prefix, then the sources of the last.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    rows: tuple[dict[str, int], ...]
    ends: tuple[tuple[int, int] | None, ...]
    certain: bool
    hop_prefixes: tuple[HopPrefix, ...] = ()

    @property
    def things(self) -> int:
        """The number of row types that do not belong to a hop prefix."""
        return len(self.names) - (2 * len(self.hop_prefixes) + 1 if self.hop_prefixes else 0)

    def hop_prefix(self, at: int) -> tuple[int, int, int]:
        """Returns the row types of a hop prefix's nodes, edges and sources."""
        first = self.things + 2 * at
        return first, first + 1, first + 2

    def with_hop_prefixes(self, hop_prefixes: tuple[HopPrefix, ...]) -> RowTypes:
        """Returns these row types with those of hop prefixes appended."""
        if not hop_prefixes:
            return self
        names, counts = list(self.names), list(self.counts)
        for at, hop_prefix in enumerate(hop_prefixes):
            names += [f"{NODES} of front {at}", f"{EDGES} of front {at}"]
            counts += [hop_prefix.nodes, hop_prefix.edges]
        names.append(f"{NODES} of front {len(hop_prefixes)}")
        counts.append(hop_prefixes[-1].sources)
        return replace(self, names=tuple(names), counts=tuple(counts), hop_prefixes=hop_prefixes)

    @property
    def graphs(self) -> int | None:
        """The row type of graphs; None if the mini-batch has no graphs."""
        return self.names.index(GRAPHS) if GRAPHS in self.names else None


def tensors(store: Any) -> dict[str, Tensor]:
    """Returns the dense tensors of a store."""
    return {key: v for key, v in store.items() if type(v) is Tensor and v.layout == torch.strided}


Levels = Mapping[tuple[Any, str], str | tuple[int, ...]]
"""What PyG takes the tensors of a graph for, by store and name: :data:`NODES` or :data:`EDGES`. A tensor without a row
for each node or edge, such as weights of classes, has its shape here. It is not padded.
"""


def levels_of(source: Any) -> Levels:
    """Returns the levels of the attributes of the graph that a loader of nodes or links samples from.

    The rule is PyG's, ``is_node_attr`` and ``is_edge_attr``, by the sizes of the graph. By the sizes of a mini-batch,
    the weights of 47 classes would be rows of nodes wherever there are 47 nodes. The result is empty where the graph
    is not known.
    """
    data = source.data if isinstance(source, (NodeLoader, LinkLoader)) else None
    if not isinstance(data, (Data, HeteroData)):
        return {}
    found: dict[tuple[Any, str], str | tuple[int, ...]] = {}
    for store in data.stores:
        of_nodes, of_edges = getattr(store, "is_node_attr", None), getattr(store, "is_edge_attr", None)
        for key, value in tensors(store).items():
            at = getattr(store, "_key", None), key
            if of_nodes is not None and of_nodes(key):
                found[at] = NODES
            else:
                found[at] = EDGES if of_edges is not None and of_edges(key) else tuple(value.shape)
    return found


def is_shared(levels: Levels, store: Any, key: str, value: Tensor) -> bool:
    """Whether a tensor of a mini-batch is one that all mini-batches of its graph have."""
    return levels.get((getattr(store, "_key", None), key)) == tuple(value.shape)


def unprepared_edges(store: Any) -> str | None:
    """Returns the name of a store's adjacency that is no ``edge_index`` of plain numbers; None if there is none.

    It is ``adj_t``, or an ``edge_index`` of a class of its own such as PyG's ``EdgeIndex``.
    """
    for key in (EDGE_INDEX, "adj_t", "adj"):
        value = store.get(key)
        if value is not None and (type(value) is not Tensor or value.layout != torch.strided):
            return key
    return None


def kept_by_batch(data: BaseData, name: str) -> Any:
    """Returns a private attribute of a ``Batch``, such as ``_slice_dict``; None if the batch has no such attribute.

    ``getattr`` would raise a KeyError: ``HeteroData`` collects an attribute of all types for a name in ``_dict``.
    """
    return next((vars(store)[name] for store in data.stores if name in vars(store)), None)


def row_types_of(data: BaseData, levels: Levels = MappingProxyType({})) -> RowTypes:
    """Returns the row types of a mini-batch, and the row type of each tensor."""
    finder = _Finder(data, levels)
    rows = tuple(finder.rows(store) for store in data.stores)
    ends = tuple(finder.ends(store) for store in data.stores)
    return RowTypes(tuple(finder.names), tuple(finder.counts), rows, ends, finder.certain)


class _Finder:
    def __init__(self, data: BaseData, levels: Levels) -> None:
        self.data, self.levels, self.certain = data, levels, True
        self.names: list[str] = []
        self.counts: list[int] = []
        self.nodes: dict[Any, int] = {}
        self.edges: dict[Any, int] = {}
        for store in data.stores:
            self.certain &= unprepared_edges(store) is None
            if isinstance(store, NodeStorage) and store.num_nodes is not None:
                self.nodes[store._key] = self._add(NODES, store._key, store.num_nodes)
            if isinstance(store, EdgeStorage) and type(store.get(EDGE_INDEX)) is Tensor:
                self.edges[store._key] = self._add(EDGES, store._key, store[EDGE_INDEX].size(1))
        self.graph = self._add(GRAPHS, None, data.num_graphs) if isinstance(data, Batch) else None

    def _add(self, name: str, key: Any, number: int) -> int:
        self.names.append(name if key is None else f"{name} {key}")
        self.counts.append(int(number))
        return len(self.names) - 1

    def ends(self, store: Any) -> tuple[int, int] | None:
        """Returns the row types of the sources and destinations of a store's edges."""
        if store._key not in self.edges:
            return None
        keys = (store._key[0], store._key[2]) if isinstance(store._key, tuple) else (None, None)
        found = self.nodes.get(keys[0]), self.nodes.get(keys[1])
        return None if found[0] is None or found[1] is None else (found[0], found[1])

    def rows(self, store: Any) -> dict[str, int]:
        """Returns the row type of each attribute of a store, where exactly one fits."""
        found = {}
        for key, value in tensors(store).items():
            dim = self.data.__cat_dim__(key, value, store)
            if key == PTR or value.dim() == 0 or not isinstance(dim, int):
                continue
            if dim % value.dim() != (1 if key == EDGE_INDEX else 0):
                continue
            if is_shared(self.levels, store, key, value):
                continue
            candidates = [k for k in self._kinds_in(store, key) if self.counts[k] == value.size(dim)]
            candidates = self._sliced_alike(candidates, key, store)
            if len(candidates) > 1:
                candidates = self._tell_apart(candidates, key, store)
            if len(candidates) > 1:
                self.certain = False
            elif candidates:
                found[key] = candidates[0]
        return found

    def _kinds_in(self, store: Any, key: str) -> list[int]:
        """Returns the row types that an attribute may have: the one that the graph tells, or any of its store."""
        edges, nodes = self.edges.get(store._key), self.nodes.get(store._key)
        level = self.levels.get((store._key, key))
        kinds = {NODES: (nodes,), EDGES: (edges,)}.get(level, (edges, nodes, self.graph))  # type: ignore[arg-type]
        return [k for k in kinds if k is not None]

    def _sliced_alike(self, candidates: list[int], key: str, store: Any) -> list[int]:
        """Keeps the row types whose rows are split among the graphs of the batch like the attribute's rows.

        A row type whose split is unknown is kept too.
        """
        slices = self._slices(store)
        own = slices.get(key) if slices is not None else None
        if own is None:
            return candidates
        edges, nodes = self.edges.get(store._key), self.nodes.get(store._key)
        steps = {edges: slices.get(EDGE_INDEX), nodes: store.get(PTR), self.graph: torch.arange(len(own))}
        return [k for k in candidates if steps[k] is None or torch.equal(steps[k].cpu(), own.cpu())]

    def _tell_apart(self, candidates: list[int], key: str, store: Any) -> list[int]:
        """Chooses by the attribute's name among several row types with the same count."""
        edges, nodes = self.edges.get(store._key), self.nodes.get(store._key)
        if "edge" in key or key.startswith("adj"):
            return [edges] if edges in candidates else candidates
        if key in ("x", "pos", BATCH) and nodes in candidates:
            return [nodes]
        # A single graph has nodes and edges only: PyG's own rule takes such rows for nodes.
        alone = self._slices(store) is None and nodes in candidates and set(candidates) <= {edges, nodes}
        return [nodes] if alone else candidates  # type: ignore[list-item]

    def _slices(self, store: Any) -> Any:
        slices = kept_by_batch(self.data, "_slice_dict")
        return slices.get(store._key) if slices is not None and store._key is not None else slices
