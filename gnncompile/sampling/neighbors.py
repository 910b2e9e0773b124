"""``sample_neighbors`` and ``sample_neighbors_hetero``: check their arguments and choose the sampler of the device."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gnncompile.device import device_of
from gnncompile.exc import ArgumentError, ArgumentTypeError, IndexOutOfRangeError, UnsupportedSampling
from gnncompile.sampling import cpu
from gnncompile.sampling.arguments import (
    UNKNOWN,
    check_exclusive,
    check_hops,
    check_strategy,
    check_types,
    numbers_of_nodes,
    vector,
)
from gnncompile.sampling.neighborhood import EdgeType, HeteroNeighborhood, Neighborhood

__all__ = ["EdgeType", "HeteroNeighborhood", "Neighborhood", "sample_neighbors", "sample_neighbors_hetero"]

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


def sample_neighbors(
    colptr: Tensor,
    row: Tensor,
    seeds: Tensor,
    num_neighbors: Sequence[int],
    *,
    node_time: Tensor | None = None,
    edge_time: Tensor | None = None,
    seed_time: Tensor | None = None,
    weight: Tensor | None = None,
    replace: bool = False,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    directed: bool = True,
    seed: int,
) -> Neighborhood:
    """Samples the neighbourhood of seeds hop by hop (Hamilton et al., Inductive representation learning on large
    graphs, 2017), with the meaning of ``torch.ops.pyg.neighbor_sample``.

    The same `seed` gives the same subgraph, whatever the number of threads.

    Args:
        colptr: The first edge of each destination in CSC order, int32 or int64 ``[num_nodes + 1]``.
        row: The source of each edge, int32 or int64 ``[num_edges]``.
        seeds: The nodes to start from, of an integer type, ``[num_seeds]``. A node may be given twice.
        num_neighbors: For each hop, the most neighbours of a node; a negative number takes all.
        node_time: The time of each node, int64 ``[num_nodes]``. Neighbours later than the seed are left out. The
            neighbours of a node are sorted by time.
        edge_time: The same by the time of each edge, int64 ``[num_edges]``. It needs `seed_time`.
        seed_time: The time of each seed, int64 ``[num_seeds]``; None takes `node_time` at the seeds.
        weight: The weight of each edge, float32 or float64 ``[num_edges]``. Neighbours are drawn in proportion to it:
            with replacement, or one after the other without (Efraimidis and Spirakis, Weighted random sampling with a
            reservoir, 2006). Edges of weight 0 are taken only where a node has too few others.
        replace: Whether a neighbour may be drawn several times.
        disjoint: Whether each seed gets a subgraph of its own. Times need this.
        temporal_strategy: With times, ``"uniform"`` draws from all earlier neighbours, ``"last"`` takes the latest.
        directed: Whether edges are those that were sampled. Otherwise the subgraph is induced: it has all edges
            between its nodes, by destination.
        seed: The seed of the random numbers.

    Raises:
        ImportError: There is no working C++ compiler.
        IndexError: A seed or a row is outside the graph.
        MemoryError: There is no memory for the subgraph.
        TypeError: A tensor has another dtype.
        ValueError: A size does not fit, weights are no weights, times are not sorted, or arguments exclude each other.
    """
    if device_of(colptr.device).has_streams:
        given = dict(
            node_time=node_time, edge_time=edge_time, seed_time=seed_time, weight=weight, replace=replace,
            disjoint=disjoint, temporal_strategy=temporal_strategy, directed=directed, seed=seed,
        )  # fmt: skip
        on_device: Neighborhood = _on_device(
            colptr.device, "device", sample_neighbors, (colptr, row, seeds, num_neighbors), given
        )
        return on_device
    settings = _settings(seed, replace, disjoint, temporal_strategy, directed)
    is_temporal = node_time is not None or edge_time is not None
    num_nodes = colptr.numel() - 1
    check_exclusive(node_time, edge_time, weight, disjoint)
    relation = _relation(
        cpu.Relation("{}", 0, 0, colptr, row, num_neighbors, node_time, edge_time, weight), num_nodes, num_nodes
    )
    if is_temporal and seed_time is None and node_time is not None:
        seed_time = node_time[seeds.long()]
    nodes = _seeds("seeds", seeds, num_nodes)
    times = _times("seed_time", seed_time, nodes.numel()) if is_temporal else None
    if edge_time is not None and times is None:
        raise ArgumentError("seed_time: found None, expected the time of each seed, as edge_time is given.")
    found = cpu.sample([relation], [num_nodes], cpu.Seeds([nodes], [0], times), settings)
    return Neighborhood(
        node=found.node[0],
        row=found.row[0],
        col=found.col[0],
        edge=found.edge[0],
        batch=found.batch[0] if disjoint else None,
        num_sampled_nodes=found.nodes_per_hop[0],
        num_sampled_edges=found.edges_per_hop[0] if directed else None,
    )


def sample_neighbors_hetero(
    colptr_dict: Mapping[EdgeType, Tensor],
    row_dict: Mapping[EdgeType, Tensor],
    seed_dict: Mapping[str, Tensor],
    num_neighbors_dict: Mapping[EdgeType, Sequence[int]],
    edge_types: Sequence[EdgeType],
    node_types: Sequence[str],
    *,
    node_time_dict: Mapping[str, Tensor] | None = None,
    edge_time_dict: Mapping[EdgeType, Tensor] | None = None,
    seed_time_dict: Mapping[str, Tensor] | None = None,
    weight_dict: Mapping[EdgeType, Tensor] | None = None,
    num_nodes_dict: Mapping[str, int] | None = None,
    replace: bool = False,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    directed: bool = True,
    seed: int,
) -> HeteroNeighborhood:
    """Samples the neighbourhood of seeds in a graph with several node types, with the meaning of
    ``torch.ops.pyg.hetero_neighbor_sample``.

    In each hop and for each edge type, every node that the hop before has found draws its own neighbours. If the graph
    is on a GPU, the GPU samples.

    Args:
        colptr_dict: As `colptr` of :func:`sample_neighbors`, for each edge type.
        row_dict: As `row` of :func:`sample_neighbors`, for each edge type.
        seed_dict: The seeds of each node type that has any. Their order is that of the disjoint subgraphs.
        num_neighbors_dict: As `num_neighbors` of :func:`sample_neighbors`, for each edge type.
        edge_types: The edge types, in the order in which they are sampled.
        node_types: The node types.
        node_time_dict: As `node_time` of :func:`sample_neighbors`. Types without times are not restricted.
        edge_time_dict: As `edge_time` of :func:`sample_neighbors`. Types without times are not restricted.
        seed_time_dict: As `seed_time` of :func:`sample_neighbors`, for each node type that has seeds.
        weight_dict: As `weight` of :func:`sample_neighbors`. Types without weights are drawn uniformly.
        num_nodes_dict: The number of nodes of types that are no destination; others are read off `colptr_dict`.
        replace: As for :func:`sample_neighbors`.
        disjoint: As for :func:`sample_neighbors`.
        temporal_strategy: As for :func:`sample_neighbors`.
        directed: As for :func:`sample_neighbors`.
        seed: As for :func:`sample_neighbors`.

    Raises:
        ImportError: As for :func:`sample_neighbors`.
        IndexError: As for :func:`sample_neighbors`.
        MemoryError: As for :func:`sample_neighbors`.
        TypeError: As for :func:`sample_neighbors`.
        ValueError: As for :func:`sample_neighbors`, or a type is unknown or missing.
    """
    gpu = next((row.device for row in row_dict.values() if device_of(row.device).has_streams), None)
    if gpu is not None:
        more = dict(
            node_time_dict=node_time_dict, edge_time_dict=edge_time_dict, seed_time_dict=seed_time_dict,
            weight_dict=weight_dict, num_nodes_dict=num_nodes_dict, replace=replace, disjoint=disjoint,
            temporal_strategy=temporal_strategy, directed=directed, seed=seed,
        )  # fmt: skip
        args = (colptr_dict, row_dict, seed_dict, num_neighbors_dict, edge_types, node_types)
        on_device: HeteroNeighborhood = _on_device(gpu, "hetero_device", sample_neighbors_hetero, args, more)
        return on_device
    settings = _settings(seed, replace, disjoint, temporal_strategy, directed)
    check_exclusive(node_time_dict, edge_time_dict, weight_dict, disjoint, "_dict")
    place = {name: at for at, name in enumerate(node_types)}
    needed = {"colptr_dict": colptr_dict, "row_dict": row_dict, "num_neighbors_dict": num_neighbors_dict}
    check_types(seed_dict, node_types, edge_types, needed)
    number = numbers_of_nodes(node_types, edge_types, colptr_dict, num_nodes_dict or {})
    relations = [
        _relation(
            cpu.Relation(
                f"{{}}_dict[{kind}]",
                place[kind[0]],
                place[kind[2]],
                colptr_dict[kind],
                row_dict[kind],
                num_neighbors_dict[kind],
                (node_time_dict or {}).get(kind[0]),
                (edge_time_dict or {}).get(kind),
                (weight_dict or {}).get(kind),
            ),
            number[kind[0]],
            number[kind[2]],
        )
        for kind in edge_types
    ]
    check_hops(relation.fan_outs for relation in relations)
    is_temporal = node_time_dict is not None or edge_time_dict is not None
    seeds = _hetero_seeds(seed_dict, seed_time_dict, node_time_dict, node_types, number, is_temporal)
    found = cpu.sample(relations, [number[name] for name in node_types], seeds, settings)
    return HeteroNeighborhood(
        node=dict(zip(node_types, found.node, strict=True)),
        row=dict(zip(edge_types, found.row, strict=True)),
        col=dict(zip(edge_types, found.col, strict=True)),
        edge=dict(zip(edge_types, found.edge, strict=True)),
        batch=dict(zip(node_types, found.batch, strict=True)) if disjoint else None,
        num_sampled_nodes=dict(zip(node_types, found.nodes_per_hop, strict=True)),
        num_sampled_edges=dict(zip(edge_types, found.edges_per_hop, strict=True)) if directed else None,
    )


def _settings(seed: int, replace: bool, disjoint: bool, temporal_strategy: str, directed: bool) -> cpu.Settings:
    check_strategy(temporal_strategy)
    if disjoint and not directed:
        raise ArgumentError(
            "directed: found False with disjoint=True, expected True; induced subgraphs are not disjoint."
        )
    return cpu.Settings(seed, replace, disjoint, temporal_strategy == "last", not directed)


def _relation(given: cpu.Relation, num_sources: int, num_targets: int) -> cpu.Relation:
    """Returns a relation whose tensors have the dtypes and sizes that the sampler reads."""
    name = given.name
    colptr, row = (
        vector(name.format(what), value, (torch.int32, torch.int64), None, CPU)
        for what, value in (("colptr", given.colptr), ("row", given.row))
    )
    if colptr.numel() < 1 or colptr.numel() - 1 != num_targets:
        raise ArgumentError(
            f"{name.format('colptr')}: found {colptr.numel()} entries, expected {max(num_targets, 0) + 1}: one more "
            "than nodes of the destination's type."
        )
    last = int(colptr.numpy()[-1])
    if last != row.numel():
        raise ArgumentError(
            f"{name.format('row')}: found {row.numel()} edges, expected {last}, the last entry of "
            f"{name.format('colptr')}."
        )
    edges = row.numel()
    times = (torch.int64,)
    node_time, edge_time, weight = (
        None if value is None else vector(name.format(what), value, dtypes, size, CPU)
        for what, value, dtypes, size in (
            ("node_time", given.node_time, times, None if num_sources == UNKNOWN else num_sources),
            ("edge_time", given.edge_time, times, edges),
            ("weight", given.weight, (torch.float32, torch.float64), edges),
        )
    )
    fan_outs = [int(number) for number in given.fan_outs]
    return dataclasses.replace(
        given, colptr=colptr, row=row, fan_outs=fan_outs, node_time=node_time, edge_time=edge_time, weight=weight
    )


def _seeds(name: str, seeds: Tensor, num_nodes: int) -> Tensor:
    """Returns the seeds as int64, all of them nodes of the graph."""
    if seeds.is_floating_point() or seeds.is_complex() or seeds.dtype is torch.bool:
        raise ArgumentTypeError(f"{name}: found dtype {seeds.dtype}, expected integers: the nodes to start from.")
    nodes = vector(name, seeds.to(torch.int64), (torch.int64,), None, CPU)
    if nodes.numel():
        numbers = nodes.numpy()
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= num_nodes:
            raise IndexOutOfRangeError(
                f"{name}: found node {low if low < 0 else high}, expected 0 to {num_nodes - 1}: nodes of the graph."
            )
    return nodes


def _times(name: str, times: Tensor | None, number: int) -> Tensor | None:
    return None if times is None else vector(name, times, (torch.int64,), number, CPU)


def _hetero_seeds(
    seed_dict: Mapping[str, Tensor],
    seed_time_dict: Mapping[str, Tensor] | None,
    node_time_dict: Mapping[str, Tensor] | None,
    node_types: Sequence[str],
    number: Mapping[str, int],
    is_temporal: bool,
) -> cpu.Seeds:
    nodes = {name: _seeds(f"seed_dict[{name!r}]", seeds, number[name]) for name, seeds in seed_dict.items()}
    first, times, total = {}, [], 0
    for name, seeds in nodes.items():
        first[name], total = total, total + seeds.numel()
        if not is_temporal:
            continue
        given = (seed_time_dict or {}).get(name)
        if given is None and seed_time_dict is None and node_time_dict is not None and name in node_time_dict:
            given = node_time_dict[name][seeds]
        time = _times(f"seed_time_dict[{name!r}]", given, seeds.numel())
        if time is None:
            raise ArgumentError(f"seed_time_dict: found no times of {name!r}, expected the time of each of its seeds.")
        times.append(time)
    none = torch.empty(0, dtype=torch.int64)
    return cpu.Seeds(
        [nodes.get(name, none) for name in node_types],
        [first.get(name, 0) for name in node_types],
        torch.cat([none, *times]) if is_temporal else None,
    )


def _on_device(device: torch.device, module: str, sample: Callable[..., Any], args: tuple[Any, ...], given: Any) -> Any:
    """Samples on the GPU. What the GPU's sampler does not support is sampled on the CPU, and a warning says so.

    Args:
        device: The GPU.
        module: The module with the function for GPUs, which has the name of `sample`.
        sample: The function for CPUs.
        args: The arguments by position.
        given: The arguments by name.
    """
    try:
        return _device_sampler(module, sample.__name__)(*args, **given)
    except UnsupportedSampling as error:
        if str(error) not in _warned:
            _warned.add(str(error))
            logger.warning("sampling runs on the CPU, and the graph is copied in each call: %s", error)
    args, given = tree_map_only(Tensor, Tensor.cpu, (args, given))
    found = sample(*args, **given)
    there = tree_map_only(Tensor, lambda value: value.to(device), dict(vars(found)))
    return dataclasses.replace(found, **there)


_warned: set[str] = set()
"""Reasons that a warning has named already."""


def _device_sampler(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"gnncompile.sampling.{module}"), name)
    except ModuleNotFoundError as error:
        raise UnsupportedSampling(
            "the sampler for GPUs needs Triton, which is not installed; keep the graph on the CPU"
        ) from error
