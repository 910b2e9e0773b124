"""One part of a graph: the rows and in-edges of its own nodes, and the rows that it reads of other parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gnncompile.exc import ArgumentError
from gnncompile.layout.edge_memory import with_aligned_rows
from gnncompile.layout.halo import attach_plan, make_plan, with_room

HOMOGENEOUS = ""
"""Stands for the node type of a ``Data``."""

FORMAT = 1
"""The version of the files of parts."""


@dataclass(frozen=True)
class Exchange:
    """The rows of one node type that a part exchanges with others.

    Attributes:
        send: The own rows that others read, by the part that reads them, int64 ``[num_sent]``.
        sent: The number of rows that go to each part.
        received: The number of rows that come from each part.
    """

    send: Tensor
    sent: list[int]
    received: list[int]


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a partition, as a process needs it.

    The tensors of `data` hold the rows of own nodes, and the edges that lead to own nodes. In ``edge_index``,
    destinations are own rows. A source below the number of own rows is an own row; the others are halo rows, in the
    order of :attr:`halo`.

    Attributes:
        data: The part of the graph, for a model compiled with ``gnncompile.compile(model, mesh=mesh)``. Pass its edge
            list as it is: a copy belongs to no part. On a GPU its two rows may have a gap between them in memory, so
            ``.contiguous()`` makes a copy.
        rank: The index of the part, which is the rank of its process.
        num_parts: The number of parts.
        nodes: By node type (``""`` for a ``Data``), the index in the whole graph of each own node, int64 ``[own]``.
        edges: By edge type (``""`` for a ``Data``), the index in the whole graph of each edge, int64 ``[num_edges]``.
        halo: By node type, the index in the whole graph of each halo row, by owner, int64 ``[num_halo]``.
        exchanges: By node type, the rows to send and to receive.
        partition: Names the partition. Only parts of one partition work together.
    """

    data: Data | HeteroData
    rank: int
    num_parts: int
    nodes: Mapping[str, Tensor]
    edges: Mapping[Any, Tensor]
    halo: Mapping[str, Tensor]
    exchanges: Mapping[str, Exchange]
    partition: str

    def __post_init__(self) -> None:
        sizes = frozenset(rows.numel() for rows in (*self.nodes.values(), *self.edges.values()))
        plans = {}
        for kind, found in self.exchanges.items():
            own = self.nodes[kind].numel()
            plans[kind] = make_plan(found.send, found.sent, found.received, own, self.partition, self.rank, sizes)
        for store in self.data.edge_stores:
            if "edge_index" in store:
                kind = HOMOGENEOUS if store._key is None else store._key[0]
                store.edge_index = with_aligned_rows(store.edge_index)  # so layers need no copy of its second row
                attach_plan(store.edge_index, plans[kind])
        for store in self.data.node_stores:
            halo = self.halo.get(HOMOGENEOUS if store._key is None else store._key)
            for name, held in list(store.items()):
                takes_room = isinstance(held, Tensor) and held.is_floating_point() and held.dim() == 2
                if takes_room and store.is_node_attr(name) and halo is not None:
                    store[name] = with_room(held, halo.numel())  # so layers that read features need no copy of them

    def to(self, device: torch.device | str) -> Part:
        """Returns the part with its data and its exchanges on a device.

        The indices in the whole graph (:attr:`nodes`, :attr:`edges`, :attr:`halo`) stay where they are: the whole graph
        is not on the device, and the indices of edges would take 8 bytes for each edge. ``part.data.to(device)`` would
        lose the exchange.
        """
        exchanges = {kind: replace(found, send=found.send.to(device)) for kind, found in self.exchanges.items()}
        return replace(self, data=self.data.clone().to(device), exchanges=exchanges)

    def save(self, folder: str | Path) -> Path:
        """Writes the part to ``folder/part-<rank>-of-<num_parts>.pt``, and returns the path.

        The file holds tensors and plain Python values only.
        """
        path = part_file(folder, self.rank, self.num_parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        held = {
            "format": FORMAT,
            "hetero": isinstance(self.data, HeteroData),
            "data": self.data.clone().to_dict(),  # clones have no room for halo rows
            "exchanges": {kind: (e.send, e.sent, e.received) for kind, e in self.exchanges.items()},
        }
        for name in ("rank", "num_parts", "partition"):
            held[name] = getattr(self, name)
        for name in ("nodes", "edges", "halo"):
            held[name] = dict(getattr(self, name))
        torch.save(held, path)
        return path


def part_file(folder: str | Path, rank: int, num_parts: int) -> Path:
    """Returns the path of a part's file."""
    return Path(folder) / f"part-{rank}-of-{num_parts}.pt"


def load_part(folder: str | Path, rank: int, num_parts: int) -> Part:
    """Loads the part of one rank, which :meth:`Partition.save` or :meth:`Part.save` has written.

    Args:
        folder: The folder of the parts.
        rank: The rank of the process, such as ``torch.distributed.get_rank()``.
        num_parts: The number of parts, such as ``torch.distributed.get_world_size()``.

    Returns:
        The part, on the CPU.

    Raises:
        ValueError: There is no such part in the folder, or another version of gnncompile wrote it.
    """
    path = part_file(folder, rank, num_parts)
    if not path.exists():
        there = sorted(found.name for found in Path(folder).glob("part-*-of-*.pt"))
        raise ArgumentError(
            f"folder: found no {path.name} in {folder}, but {', '.join(there) or 'no parts'}. Make the parts with "
            f"gnncompile.partition(data, {num_parts}).save(folder)."
        )
    held = torch.load(path, map_location="cpu", weights_only=True)
    if held.pop("format") != FORMAT:
        raise ArgumentError(f"folder: {path} was written by another version of gnncompile. Make the parts again.")
    kind = HeteroData if held.pop("hetero") else Data
    held["data"] = kind.from_dict(held["data"])
    held["exchanges"] = {kind: Exchange(*found) for kind, found in held["exchanges"].items()}
    return Part(**held)
