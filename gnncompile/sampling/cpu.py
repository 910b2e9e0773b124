"""Samples on the CPU: compiles neighbors.cpp and calls it. The structures mirror those of the C++ file."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnncompile.codegen.cpp.compiler import load
from gnncompile.exc import (
    ArgumentError,
    IndexOutOfRangeError,
    KernelMemoryError,
    MissingLibraryError,
    UnsupportedRegion,
)

_SOURCE = Path(__file__).with_name("neighbors.cpp")


@dataclass(frozen=True)
class Relation:
    """The edges between two node types, in CSC order. All tensors are contiguous and on the CPU.

    Attributes:
        name: What errors call the graph's arguments of this relation, such as ``row['paper', 'cites', 'paper']``,
            with ``{}`` in the place of the argument.
        source: The position of the source's node type.
        target: The position of the destination's node type.
        colptr: int32 or int64 ``[num_targets + 1]``.
        row: int32 or int64 ``[num_edges]``.
        fan_outs: For each hop, the most neighbours per node; a negative number takes all.
        node_time: int64 ``[num_sources]``.
        edge_time: int64 ``[num_edges]``.
        weight: float32 or float64 ``[num_edges]``.
    """

    name: str
    source: int
    target: int
    colptr: Tensor
    row: Tensor
    fan_outs: Sequence[int]
    node_time: Tensor | None = None
    edge_time: Tensor | None = None
    weight: Tensor | None = None


@dataclass(frozen=True)
class Seeds:
    """The seeds of all node types.

    Attributes:
        nodes: For each node type, int64 ``[num_seeds]``.
        first_batch: For each node type, the batch of its first seed.
        times: The time of each batch, int64 ``[num_batches]``.
    """

    nodes: Sequence[Tensor]
    first_batch: Sequence[int]
    times: Tensor | None


@dataclass(frozen=True)
class Settings:
    """How to sample: see :func:`gnncompile.sampling.neighbors.sample_neighbors`."""

    seed: int
    replace: bool
    disjoint: bool
    last: bool
    induced: bool


@dataclass(frozen=True)
class Sampled:
    """The sampled subgraph: lists over node types (`node`, `batch`, `nodes_per_hop`) and over relations (the rest)."""

    node: list[Tensor]
    batch: list[Tensor]
    row: list[Tensor]
    col: list[Tensor]
    edge: list[Tensor]
    nodes_per_hop: list[list[int]]
    edges_per_hop: list[list[int]]


class _Ints(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("is_wide", ctypes.c_int64))


class _Relation(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_int64),
        ("target", ctypes.c_int64),
        ("num_edges", ctypes.c_int64),
        ("colptr", _Ints),
        ("row", _Ints),
        ("fan_outs", ctypes.c_void_p),
        ("node_time", ctypes.c_void_p),
        ("edge_time", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("is_double", ctypes.c_int64),
    )


class _Request(ctypes.Structure):
    _fields_ = (
        ("num_types", ctypes.c_int64),
        ("num_relations", ctypes.c_int64),
        ("num_hops", ctypes.c_int64),
        ("num_batches", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("replace", ctypes.c_int64),
        ("disjoint", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("induced", ctypes.c_int64),
        ("relations", ctypes.c_void_p),
        ("num_nodes", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        ("num_seeds", ctypes.c_void_p),
        ("first_batch", ctypes.c_void_p),
        ("seed_times", ctypes.c_void_p),
    )


class _Column(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_int64), ("capacity", ctypes.c_int64))


class _Answer(ctypes.Structure):
    _fields_ = (
        ("node", ctypes.c_void_p),
        ("batch", ctypes.c_void_p),
        ("row", ctypes.c_void_p),
        ("col", ctypes.c_void_p),
        ("edge", ctypes.c_void_p),
        ("nodes_per_hop", ctypes.c_void_p),
        ("edges_per_hop", ctypes.c_void_p),
        ("relation", ctypes.c_int64),
        ("position", ctypes.c_int64),
    )


_NO_MEMORY, _ROW_OUT_OF_RANGE, _BAD_WEIGHT, _NO_WEIGHT, _TIMES_NOT_SORTED, _TOO_LARGE = range(1, 7)


_HUGE_PAGE, _LARGE = 2**21, 2**24
"""Bytes of a huge page, and of a tensor that is worth the move."""

_COLLAPSE = 25
"""``MADV_COLLAPSE``, which the module ``mmap`` does not name."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Returns the compiled sampler. The first call on a machine compiles it, which takes a few seconds.

    Raises:
        ImportError: There is no working C++ compiler.
    """
    try:
        made = load(_SOURCE.read_text(encoding="utf-8"), contract=False)
    except UnsupportedRegion as error:
        raise MissingLibraryError(
            f"sampler: it is compiled when it is first used, and that failed: {error}. Where pyg-lib is installed, "
            'gnncompile.loader(..., sampler="pyg") samples with it.'
        ) from error
    return declared(made)


def declared(made: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the arguments of the sampler's functions, and returns the library."""
    made.sample_neighborhood.argtypes = (ctypes.POINTER(_Request), ctypes.POINTER(_Answer))
    made.sample_neighborhood.restype = ctypes.c_int64
    made.release.argtypes = (ctypes.c_void_p,)
    made.release.restype = None
    return made


KEPT_BYTES = 2**28
"""The most memory that a process keeps for later calls. New memory would cost a page fault per 4 KiB in each call."""


class _Blocks:
    """Memory of earlier results, for the same columns of later results."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[int, int]]] = {}

    def take(self, at: int) -> _Column:
        """Returns an empty column, in memory of an earlier column at the same position if there is any."""
        try:
            address, capacity = self._free[at].pop()
        except (KeyError, IndexError):
            return _Column(None, 0, 0)
        return _Column(address, 0, capacity)

    def give(self, at: int, address: int, capacity: int) -> None:
        """Takes memory that nobody reads any more."""
        kept = sum(size for blocks in list(self._free.values()) for _, size in list(blocks))
        if 8 * (kept + capacity) > KEPT_BYTES:
            library().release(address)
        else:
            self._free.setdefault(at, []).append((address, capacity))


_blocks = _Blocks()


class _Memory:
    """Memory that the C++ code has allocated; NumPy reads it where it stands."""

    def __init__(self, at: int, column: _Column) -> None:
        self._block = at, column.data, column.capacity
        data = (column.data, False)
        self.__array_interface__ = {"version": 3, "typestr": "<i8", "shape": (column.size,), "data": data}

    def __del__(self) -> None:
        if _blocks is not None:  # it is None while Python shuts down
            _blocks.give(*self._block)


def sample(relations: Sequence[Relation], num_nodes: Sequence[int], seeds: Seeds, settings: Settings) -> Sampled:
    """Samples a subgraph on ``torch.get_num_threads()`` threads; their number does not change the result.

    Args:
        relations: The edges of the graph.
        num_nodes: An upper bound of the number of nodes, for each node type.
        seeds: The seeds, all of which exist.
        settings: How to sample.

    Raises:
        ImportError: There is no working C++ compiler.
        IndexError: A row is outside of its node type.
        MemoryError: There is no memory for the subgraph.
        ValueError: Weights are no weights, or times are not sorted.
    """
    types, hops = len(num_nodes), len(relations[0].fan_outs) if relations else 0
    fan_outs = [(ctypes.c_int64 * hops)(*relation.fan_outs) for relation in relations]
    given = (_Relation * len(relations))(*map(_given, relations, fan_outs))
    addresses = (ctypes.c_void_p * types)(*[nodes.data_ptr() for nodes in seeds.nodes])
    counts, numbers, first = (
        (ctypes.c_int64 * types)(*values)
        for values in ([nodes.numel() for nodes in seeds.nodes], num_nodes, seeds.first_batch)
    )
    request = _Request(
        num_types=types,
        num_relations=len(relations),
        num_hops=hops,
        num_batches=sum(counts) if settings.disjoint else 1,
        threads=torch.get_num_threads(),
        seed=settings.seed % 2**64,
        replace=settings.replace,
        disjoint=settings.disjoint,
        last=settings.last,
        induced=settings.induced,
        relations=_at(given),
        num_nodes=_at(numbers),
        seeds=_at(addresses),
        num_seeds=_at(counts),
        first_batch=_at(first),
        seed_times=None if seeds.times is None else seeds.times.data_ptr(),
    )
    node, batch, row, col, edge = columns = _columns(types, len(relations))
    nodes_per_hop = (ctypes.c_int64 * (types * (hops + 1)))()
    edges_per_hop = (ctypes.c_int64 * (len(relations) * hops))()
    per_column = [_at(column) for column in (node, batch, row, col, edge, nodes_per_hop, edges_per_hop)]
    answer = _Answer(*per_column, 0, 0)
    status = library().sample_neighborhood(ctypes.byref(request), ctypes.byref(answer))
    at = itertools.count()
    node_ids, batches, rows, cols, edges = ([_tensor(next(at), column) for column in found] for found in columns)
    if status:
        raise _problem(status, relations[answer.relation], answer.position)
    return Sampled(
        node_ids,
        batches,
        rows,
        cols,
        edges,
        [list(nodes_per_hop[k * (hops + 1) : (k + 1) * (hops + 1)]) for k in range(types)],
        [list(edges_per_hop[k * hops : (k + 1) * hops]) for k in range(len(relations))],
    )


def prefer_huge_pages(tensor: Tensor) -> None:
    """Moves a tensor of the graph into huge pages, where the system can (Linux 6.1 or later).

    Sampling reads it at random, and finding a small page takes about as long as reading from it. The move takes a small
    part of the time that sorting the edges takes. The tensor keeps its address and its values.
    """
    first = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    length = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE - first
    if sys.platform != "linux" or not tensor.is_cpu or length < _LARGE:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(first, length, _COLLAPSE)  # it may fail, which costs time only


def _columns(types: int, relations: int) -> list[ctypes.Array[_Column]]:
    """Returns empty columns: nodes and batches for each node type; rows, columns and edges for each relation."""
    at = itertools.count()
    sizes = (types, types, relations, relations, relations)
    return [(_Column * size)(*[_blocks.take(next(at)) for _ in range(size)]) for size in sizes]


def _at(array: ctypes.Array[Any]) -> int | None:
    return ctypes.addressof(array) if len(array) else None


def _given(relation: Relation, fan_outs: ctypes.Array[ctypes.c_int64]) -> _Relation:
    weight = relation.weight
    return _Relation(
        relation.source,
        relation.target,
        relation.row.numel(),
        _Ints(relation.colptr.data_ptr(), relation.colptr.dtype is torch.int64),
        _Ints(relation.row.data_ptr(), relation.row.dtype is torch.int64),
        _at(fan_outs),
        None if relation.node_time is None else relation.node_time.data_ptr(),
        None if relation.edge_time is None else relation.edge_time.data_ptr(),
        None if weight is None else weight.data_ptr(),
        weight is not None and weight.dtype is torch.float64,
    )


def _tensor(at: int, column: _Column) -> Tensor:
    """Returns a tensor in the column's memory, which is used again when the tensor is dead."""
    if not column.size:
        if column.data:
            _blocks.give(at, column.data, column.capacity)
        return torch.empty(0, dtype=torch.int64)
    return torch.from_numpy(np.asarray(_Memory(at, column)))


def _problem(status: int, relation: Relation, position: int) -> Exception:
    row, weight, time = (relation.name.format(name) for name in ("row", "weight", "time"))
    if status == _ROW_OUT_OF_RANGE:
        return IndexOutOfRangeError(
            f"{row}: found {int(relation.row[position])} at position {position}, expected a node of the source's type; "
            "check edge_index and num_nodes."
        )
    if status == _BAD_WEIGHT:
        found = float(relation.weight[position]) if relation.weight is not None else None
        return ArgumentError(
            f"{weight}: found {found} at position {position} in CSC order, expected finite numbers of 0 or more; "
            "change the weights."
        )
    if status == _NO_WEIGHT:
        return ArgumentError(
            f"{weight}: found only zeros for the node whose edges start at position {position} in CSC order, expected "
            "one weight above 0; drop edges of weight 0, or sample with replace=False."
        )
    if status == _TIMES_NOT_SORTED:
        return ArgumentError(
            f"{time}: found times of the neighbours of node {position} that are not sorted, expected ascending times "
            "within each neighbourhood; sort the edges by destination, then by time."
        )
    if status == _TOO_LARGE:
        return ArgumentError("seeds: found a subgraph of 2**31 or more rows, expected fewer; lower num_neighbors.")
    assert status == _NO_MEMORY
    return KernelMemoryError("sampler: no memory for the subgraph; lower num_neighbors, or give fewer seeds.")
