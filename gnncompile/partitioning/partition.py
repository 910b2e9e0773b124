"""``gnncompile.partition``: cuts a graph into parts, balanced by edges, and counts the rows that parts exchange."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gnncompile.device import device_of
from gnncompile.exc import ArgumentError, ArgumentTypeError, IndexOutOfRangeError
from gnncompile.partitioning.assign import assign
from gnncompile.partitioning.part import HOMOGENEOUS, Exchange, Part


def partition(data: Data | HeteroData, n: int, method: str = "contiguous") -> Partition:
    """Cuts a graph into parts of nodes with their in-edges, one for each process.

    Each edge belongs to the part of its destination. Parts have about equal numbers of edges; a node counts as one edge
    more. The input is not changed.

    Args:
        data: The graph, with ``edge_index`` ``[2, num_edges]`` on the CPU. Node and edge attributes go to the parts,
            other attributes to every part.
        n: The number of parts.
        method: ``"contiguous"`` keeps the order of nodes, for graphs whose order has locality; ``"rcm"`` cuts the
            reverse Cuthill-McKee order, for meshes (needs scipy); ``"metis"`` cuts few edges, for any graph (needs
            pymetis).

    Returns:
        A :class:`Partition`, whose parts are made when they are asked for.

    Raises:
        TypeError: `data` is neither a ``Data`` nor a ``HeteroData``.
        ValueError: `n` is below 1, the method is unknown, edges are no ``edge_index``, an attribute other than
            ``edge_index`` holds indices of nodes, or the number of nodes of a type is unknown.
        IndexError: ``edge_index`` has nodes that the graph does not have.
        ImportError: ``"metis"`` without pymetis, or ``"rcm"`` without scipy.
    """
    if not isinstance(data, (Data, HeteroData)):
        raise ArgumentTypeError(f"data: found {type(data).__name__}, expected a Data or HeteroData of PyG.")
    if type(n) is not int or n < 1:
        raise ArgumentError(f"n: found {n!r}, expected the number of parts, 1 or more.")
    _check(data)
    kinds = {_node_type(store): _num_nodes(store) for store in data.node_stores}
    starts = [0]
    for size in kinds.values():
        starts.append(starts[-1] + size)
    first = dict(zip(kinds, starts, strict=False))
    pairs = {}
    for store in data.edge_stores:
        if "edge_index" in store:
            source, destination = _ends(store)
            edge_index = torch.as_tensor(store.edge_index).as_subclass(Tensor)
            _check_range(edge_index, kinds.get(source, 0), kinds.get(destination, 0), _edge_type(store))
            shift = torch.tensor([[first.get(source, 0)], [first.get(destination, 0)]])
            pairs[_edge_type(store)] = edge_index + shift
    edges = torch.cat([torch.empty(2, 0, dtype=torch.int64), *pairs.values()], dim=1)
    part, order = assign(edges, starts, n, method)
    return Partition(data, n, method, part, order, kinds, first, pairs)


@dataclass(frozen=True)
class HaloReport:
    """The sizes of the parts of a partition.

    Attributes:
        nodes: The number of own nodes of each part.
        edges: The number of edges of each part.
        halo: The number of rows that each part receives for each exchange.
        sent: The number of rows that each part sends for each exchange.
        cut: The share of edges whose source belongs to another part, 0 to 1.
    """

    nodes: list[int]
    edges: list[int]
    halo: list[int]
    sent: list[int]
    cut: float

    @property
    def largest(self) -> int:
        """The most rows that a part sends or receives, which bounds the time of an exchange."""
        return max([*self.halo, *self.sent])

    @property
    def balance(self) -> float:
        """The number of edges of the largest part, over the mean of all parts; 1 without edges."""
        return max(self.edges) * len(self.edges) / sum(self.edges) if sum(self.edges) else 1.0

    def seconds(self, channels: int, bandwidth: float, bytes_per_value: int = 4) -> float:
        """Returns the time of one exchange of rows ``[nodes, channels]``, from bytes over bandwidth.

        Args:
            channels: The width of a row.
            bandwidth: The bandwidth of each process in one direction, in bytes per second.
            bytes_per_value: The size of a value in bytes.
        """
        return self.largest * channels * bytes_per_value / bandwidth

    def __str__(self) -> str:
        lines = [
            f"{len(self.nodes)} parts, {self.cut:.1%} of the edges lead from one part to another, "
            f"the largest part has {self.balance:.2f} times the mean number of edges",
            f"{'part':>6} {'nodes':>10} {'edges':>11} {'halo rows':>10} {'rows sent':>10}",
        ]
        rows = list(zip(self.nodes, self.edges, self.halo, self.sent, strict=True))
        lines += [f"{k:>6} {a:>10,} {b:>11,} {c:>10,} {d:>10,}" for k, (a, b, c, d) in enumerate(rows[:16])]
        if len(rows) > 16:
            lines.append(f"   ... {len(rows) - 16} more")
        return "\n".join(lines)


class Partition:
    """A graph that is cut into parts: a sequence of :class:`Part`. :func:`partition` makes it.

    Attributes:
        num_parts: The number of parts.
        method: How the graph was cut.
    """

    def __init__(
        self,
        data: Data | HeteroData,
        num_parts: int,
        method: str,
        part: Tensor,
        order: Tensor,
        kinds: dict[str, int],
        first: dict[str, int],
        pairs: dict[Any, Tensor],
    ) -> None:
        self.num_parts, self.method = num_parts, method
        self._data, self._kinds, self._first, self._pairs = data, kinds, first, pairs
        self._owner = part
        # Own nodes part by part, in order: the place of a node here orders it by owner, then by row.
        by_part = order[torch.argsort(part[order], stable=True)]
        kind = torch.zeros_like(part)
        for k, start in enumerate(first.values()):
            kind[start:] = k
        self._sorted = by_part[torch.argsort(part[by_part] * len(kinds) + kind[by_part], stable=True)]
        self._row, self._place = torch.empty_like(part), torch.empty_like(part)
        self._place[self._sorted] = torch.arange(part.numel())
        cell = part[self._sorted] * len(kinds) + kind[self._sorted]
        self._own = torch.bincount(cell, minlength=num_parts * len(kinds))
        begins = self._own.cumsum(0) - self._own
        self._row[self._sorted] = torch.arange(part.numel()) - begins[cell]
        self._begins = begins

    def __len__(self) -> int:
        return self.num_parts

    def __iter__(self) -> Iterator[Part]:
        return (self[rank] for rank in range(self.num_parts))

    def __getitem__(self, rank: int) -> Part:
        """Returns the part of a rank. Raises IndexError if there is no such part."""
        if not 0 <= rank < self.num_parts:
            raise IndexOutOfRangeError(f"rank: found {rank}, expected 0 to {self.num_parts - 1}.")
        nodes = {kind: self._nodes(rank, k) for k, kind in enumerate(self._kinds)}
        edges = {kind: self._edges(kind, rank) for kind in self._pairs}
        halo, exchanges = {}, {}
        for kind, pairs in self._crossing.items():
            wanted = pairs[:, pairs[0] == rank][1]
            others = pairs[:, self._owner[pairs[1]] == rank]
            others = others[:, torch.argsort(others[0], stable=True)]
            halo[kind] = wanted - self._first[kind]
            exchanges[kind] = Exchange(self._row[others[1]], self._per_part(others[0]), self._from(wanted))
        return Part(
            self._cut_data(rank, nodes, edges), rank, self.num_parts, nodes, edges, halo, exchanges, self.fingerprint
        )

    def save(self, folder: str | Path) -> list[Path]:
        """Writes a file for each part, which :func:`gnncompile.load_part` reads; returns the paths."""
        return [part.save(folder) for part in self]

    def gather(self, results: list[Tensor], kind: str = HOMOGENEOUS) -> Tensor:
        """Puts rows of all parts back in the order of the whole graph.

        Args:
            results: For each part, rows of its own nodes ``[own, ...]``.
            kind: The node type; leave it out for a ``Data``.

        Returns:
            The rows ``[num_nodes, ...]``.

        Raises:
            ValueError: There is no such node type, or a part has another number of own nodes.
        """
        if kind not in self._kinds:
            raise ArgumentError(f"kind: found {kind!r}, expected a node type: {', '.join(map(repr, self._kinds))}.")
        k = list(self._kinds).index(kind)
        found, expected = [rows.size(0) for rows in results], self._own.view(self.num_parts, -1)[:, k].tolist()
        if found != expected:
            raise ArgumentError(
                f"results: found tensors of {found} rows, expected {expected}. Pass rows of own nodes of all parts, in "
                "the order of ranks."
            )
        nodes = torch.cat([self._nodes(rank, k) for rank in range(self.num_parts)])
        rows = torch.cat(results)
        return torch.empty_like(rows).index_copy(0, nodes.to(rows.device), rows)

    def report(self) -> HaloReport:
        """Counts the nodes, edges and halo rows of all parts; makes no part."""
        halo = sum((self._counted(pairs[0]) for pairs in self._crossing.values()), torch.zeros(self.num_parts))
        sent = sum(
            (self._counted(self._owner[pairs[1]]) for pairs in self._crossing.values()), torch.zeros(self.num_parts)
        )
        all_edges = torch.cat([torch.empty(2, 0, dtype=torch.int64), *self._pairs.values()], dim=1)
        owners = self._owner[all_edges]
        crossing = int((owners[0] != owners[1]).sum())
        return HaloReport(
            self._own.view(self.num_parts, -1).sum(1).tolist(),
            self._per_part(owners[1]),
            halo.long().tolist(),
            sent.long().tolist(),
            crossing / max(all_edges.size(1), 1),
        )

    @cached_property
    def fingerprint(self) -> str:
        """Names the partition: a hash of the edges and of the part of each node."""
        digest = hashlib.sha256(f"{self.num_parts} {self._kinds}".encode())
        for found in (self._sorted, self._owner, *self._pairs.values()):
            digest.update(found.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def _crossing(self) -> dict[str, Tensor]:
        """By node type, the pairs of a part and a node of another part that it reads, by part, then by owner."""
        found = {}
        for kind in self._kinds:
            pairs = [edges for name, edges in self._pairs.items() if _source_of(name) == kind]
            if not pairs:
                continue
            source, destination = torch.cat(pairs, dim=1)
            reader = self._owner[destination]
            crosses = reader != self._owner[source]
            total = self._owner.numel()
            key = torch.unique(reader[crosses] * total + self._place[source[crosses]])
            found[kind] = torch.stack([key // max(total, 1), self._sorted[key % max(total, 1)]])
        return found

    def _nodes(self, rank: int, k: int) -> Tensor:
        """Returns the own nodes of a part, of the type at position `k`, as indices of that type."""
        cell = rank * len(self._kinds) + k
        begin = int(self._begins[cell])
        return self._sorted[begin : begin + int(self._own[cell])] - list(self._first.values())[k]

    def _edges(self, kind: Any, rank: int) -> Tensor:
        return (self._owner[self._pairs[kind][1]] == rank).nonzero().squeeze(1)

    def _counted(self, parts: Tensor) -> Tensor:
        return torch.bincount(parts, minlength=self.num_parts)

    def _per_part(self, parts: Tensor) -> list[int]:
        return self._counted(parts).tolist()

    def _from(self, nodes: Tensor) -> list[int]:
        return self._per_part(self._owner[nodes])

    def _edge_index(self, kind: Any, rank: int, edges: Tensor) -> Tensor:
        """Returns the edges of a part, with sources numbered as own rows, then halo rows."""
        source, destination = self._pairs[kind][:, edges]
        pairs = self._crossing[_source_of(kind)]
        wanted = self._place[pairs[:, pairs[0] == rank][1]]
        own = int(self._own[rank * len(self._kinds) + list(self._kinds).index(_source_of(kind))])
        local = torch.where(
            self._owner[source] == rank, self._row[source], torch.searchsorted(wanted, self._place[source]) + own
        )
        return torch.stack([local, self._row[destination]])

    def _cut_data(self, rank: int, nodes: dict[str, Tensor], edges: dict[Any, Tensor]) -> Data | HeteroData:
        made = copy.copy(self._data) if isinstance(self._data, Data) else HeteroData()
        if isinstance(made, HeteroData):
            made._global_store.update(self._data._global_store.to_dict())
        for store in self._data.node_stores:
            out, kind = made[store._key] if store._key is not None else made, _node_type(store)
            for name, held in store.items():
                if store.is_node_attr(name) and isinstance(held, Tensor):
                    out[name] = held[nodes[kind]]
                elif store._key is not None:
                    out[name] = held
            out.num_nodes = nodes[kind].numel()
        for store in self._data.edge_stores:
            if "edge_index" not in store:
                continue
            out, kind = made[store._key] if store._key is not None else made, _edge_type(store)
            for name, held in store.items():
                if name == "edge_index":
                    out[name] = self._edge_index(kind, rank, edges[kind])
                elif store.is_edge_attr(name) and isinstance(held, Tensor):
                    out[name] = held[edges[kind]]
                elif store._key is not None:
                    out[name] = held
        return made


def _check(data: Data | HeteroData) -> None:
    """Raises ArgumentError for attributes that can't be cut."""
    for store in data.stores:
        for name, held in store.items():
            if name in ("adj", "adj_t"):
                raise ArgumentError(
                    f"data: found {name}, expected edges as edge_index. Leave out the transform ToSparseTensor."
                )
            if isinstance(held, Tensor) and device_of(held.device).host_waits:
                raise ArgumentError(
                    f"data: found {name} on {held.device}, expected it on the CPU. Cut data.cpu(), and move parts with "
                    "part.to(device)."
                )
            if isinstance(held, Tensor) and name != "edge_index" and ("index" in name or name == "face"):
                raise ArgumentError(
                    f"data: found {name}, which holds indices of nodes, expected none but edge_index. Delete it "
                    f"(del data.{name}) before you cut the graph."
                )
            if isinstance(held, Tensor) and name in ("batch", "ptr"):
                raise ArgumentError(
                    f"data: found {name}, so it is a batch of graphs, expected one graph. Give each process graphs of "
                    "its own instead, with DistributedDataParallel."
                )


def _num_nodes(store: Any) -> int:
    """Returns the number of nodes of a type. Raises ArgumentError if it is unknown."""
    if store.num_nodes is None:
        raise ArgumentError(
            f"data: found no number of nodes{_of(_node_type(store))}, expected attributes of nodes or num_nodes. Set "
            "num_nodes."
        )
    return int(store.num_nodes)


def _check_range(edge_index: Tensor, num_sources: int, num_destinations: int, kind: Any) -> None:
    """Raises IndexOutOfRangeError for edges of nodes that the graph does not have."""
    for row, (side, size) in enumerate((("source", num_sources), ("destination", num_destinations))):
        low, high = map(int, edge_index[row].aminmax()) if edge_index.size(1) else (0, -1)
        if low < 0 or high >= size:
            raise IndexOutOfRangeError(
                f"data: found {side} {low if low < 0 else high} in edge_index{_of(kind)}, expected 0 to {size - 1}. "
                "Correct edge_index, or num_nodes."
            )


def _of(kind: Any) -> str:
    return "" if kind == HOMOGENEOUS else f" of {kind}"


def _node_type(store: Any) -> str:
    return HOMOGENEOUS if store._key is None else store._key


def _edge_type(store: Any) -> Any:
    return HOMOGENEOUS if store._key is None else store._key


def _source_of(edge_type: Any) -> str:
    return edge_type[0] if isinstance(edge_type, tuple) else HOMOGENEOUS


def _ends(store: Any) -> tuple[str, str]:
    return (HOMOGENEOUS, HOMOGENEOUS) if store._key is None else (store._key[0], store._key[-1])
